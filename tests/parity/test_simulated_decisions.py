"""The simulator runs the gateway's own policy: its decisions replay, are explained, and serve every request once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from serving.core.decisions import Route, RouteRecord
from serving.core.policies import routing
from serving.core.state import RoutingPolicy, Tier, TierSlo
from workbench.sim.core_router import CoreRouter
from workbench.sim.cost_rows import Grid, cost_rows
from workbench.sim.fleet import FleetSpec, load_fleet
from workbench.sim.kernel import Kernel
from workbench.sim.oracle import good_frac, serve_split
from workbench.sim.serving_fleet import Outcome, ServingFleet
from workbench.sim.workload import workload

POLICY = RoutingPolicy(
    tier_weights={"interactive": {"latency": 1.0}, "batch": {"cost": 1.0}},
    slos={tier.value: TierSlo(1.0, 0.05) for tier in Tier},
    provenances=("predicted",),
)


GRID = Grid((1024,), (192,), (1, 16))


@pytest.fixture(scope="module")
def spec() -> FleetSpec:
    """Two classes and one model of the fleet."""
    whole = load_fleet()
    pools = {"llama-8b": whole.pools["llama-8b"][1:3]}
    return whole.model_copy(update={"pools": pools, "mix": {"llama-8b": 1.0}})


def run(spec: FleetSpec, trace: str, seed: int = 1) -> tuple[Outcome, list[RouteRecord]]:
    asked = workload(spec, trace, seed, max_requests=150).at_rate(20.0)
    fleet = ServingFleet(spec, asked, Kernel())
    rows = tuple(cost_rows(spec, "llama-8b", spec.pools["llama-8b"][0], GRID))
    records: list[RouteRecord] = []
    return fleet.serve(CoreRouter(fleet, POLICY, rows, seed=seed, records=records)), records


@pytest.mark.parametrize("trace", ["azure_conversation", "mooncake"])
def test_every_request_is_served_once_and_every_decision_replays(spec: FleetSpec, trace: str):
    outcome, records = run(spec, trace)
    assert Counter(r.request.request_id for r in outcome.results) == Counter(str(n) for n in range(150))
    assert outcome.num_shed == 0
    assert 0 < outcome.busy_usd <= outcome.provisioned_usd
    for record in records:
        assert routing.replay(record) == record.decision
        assert isinstance(record.decision, Route)
        assert record.decision.reason
    if trace == "mooncake":
        assert any(record.view.affinities for record in records)
        assert sum(r.num_cached_tokens for r in outcome.results) > 0


def test_an_altered_input_is_detected(spec: FleetSpec):
    _, records = run(spec, "azure_conversation")
    record = records[100]
    longer = replace(record, request=replace(record.request, num_prompt_tokens=record.request.num_prompt_tokens + 1))
    assert routing.replay(longer) != record.decision


def test_the_same_seed_serves_alike(spec: FleetSpec):
    first, second = (run(spec, "no_sharing")[0] for _ in range(2))
    assert first == second
    assert run(spec, "no_sharing", seed=2)[0] != first


def test_the_split_that_knows_everything_keeps_the_slo_at_a_low_rate(spec: FleetSpec):
    asked = workload(spec, "azure_conversation", 1, max_requests=1000)
    assert good_frac(serve_split(spec, asked.at_rate(5.0), 0.6)) > 0.99
    assert good_frac(serve_split(spec, asked.at_rate(1000.0), 0.6)) < 0.9
