"""One case of `benchmarks.routing`: the same requests through every router, each on a fleet of its own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

from serving.core.state import CostRow
from workbench.sim.core_router import CoreRouter, cost_aware_policy
from workbench.sim.cost_rows import cost_rows
from workbench.sim.fleet import FleetSpec, load_fleet
from workbench.sim.kernel import Kernel
from workbench.sim.oracle import UTILIZATIONS, good_frac, serve_split
from workbench.sim.peers import PEERS
from workbench.sim.serving_fleet import Outcome, Router, ServingFleet
from workbench.sim.workload import Workload, workload

OURS, SPLIT = "ours", "split that knows everything"
ONE_CLASS = "one_class"
ONE_CLASS_NAME, ONE_CLASS_TRACE = "rtx-pro-6000-96g", "azure_conversation"
CAPACITY_RPS = {
    "azure_conversation": 118.65,
    "azure_code": 12.07,
    "mooncake": 9.41,
    "no_sharing": 208.39,
    ONE_CLASS: 29.03,
}
"""The highest rate at which the split keeps 99 % within their SLO, seed 1, as `capacity_rps` finds it."""


@dataclass(frozen=True, slots=True)
class Case:
    """A trace at a load with a seed; the first `max_requests` alone where that is said."""

    trace: str
    load: float
    seed: int
    max_requests: int | None = None


@dataclass(frozen=True, slots=True)
class Served:
    """What a run came to, small enough to cross processes. Times by request, in order of arrival."""

    ttft_s: list[float]
    tpot_s: list[float]
    num_requests: int
    num_good: int
    num_shed: int
    good_tokens: int
    prompt_tokens: int
    cached_tokens: int
    busy_usd: float
    provisioned_usd: float

    @classmethod
    def of(cls, outcome: Outcome) -> Served:
        """The run's."""
        results = outcome.results
        return cls(
            [result.ttft_s for result in results],
            [result.tpot_s for result in results],
            len(results) + outcome.num_shed,
            sum(result.good for result in results),
            outcome.num_shed,
            sum(result.request.num_output_tokens for result in results if result.good),
            sum(result.request.num_prompt_tokens for result in results),
            sum(result.num_cached_tokens for result in results),
            outcome.busy_usd,
            outcome.provisioned_usd,
        )


def serve(case: Case) -> dict[str, Served]:
    """Every router on the case's requests; the split at the utilization that serves most of them well."""
    spec = fleet_of(case.trace)
    asked = requests_of(spec, case).at_rate(case.load * CAPACITY_RPS[case.trace])
    routers: dict[str, Callable[[ServingFleet], Router]] = {
        OURS: lambda fleet: CoreRouter(fleet, cost_aware_policy(spec), rows_of(case.trace), seed=case.seed)
    }
    for name, peer in PEERS.items():
        routers[name] = lambda fleet, peer=peer: peer(fleet, case.seed)  # type: ignore[misc]
    served = {}
    for name, make in routers.items():
        fleet = ServingFleet(spec, asked, Kernel())
        served[name] = Served.of(fleet.serve(make(fleet), scraped=name == OURS))
    splits = [serve_split(spec, asked, utilization) for utilization in UTILIZATIONS]
    return {**served, SPLIT: Served.of(max(splits, key=good_frac))}


def fleet_of(trace: str) -> FleetSpec:
    """The frozen fleet; for `one_class` the replicas of one class and model alone."""
    spec = load_fleet()
    if trace != ONE_CLASS:
        return spec
    pools = tuple(pool for pool in spec.pools["llama-8b"] if pool.class_name == ONE_CLASS_NAME)
    return spec.model_copy(update={"pools": {"llama-8b": pools}, "mix": {"llama-8b": 1.0}})


def requests_of(spec: FleetSpec, case: Case) -> Workload:
    """The case's requests at the trace's own times."""
    trace = ONE_CLASS_TRACE if case.trace == ONE_CLASS else case.trace
    return workload(spec, trace, case.seed, max_requests=case.max_requests)


@lru_cache(maxsize=2)
def rows_of(trace: str) -> tuple[CostRow, ...]:
    """The fleet's cost table."""
    spec = fleet_of(trace)
    return tuple(row for model, pools in spec.pools.items() for pool in pools for row in cost_rows(spec, model, pool))


def capacity_rps(trace: str, within: float = 0.01) -> float:
    """The highest rate that the split carries, by bisection. Takes minutes; `CAPACITY_RPS` keeps what it found."""
    spec = fleet_of(trace)
    asked = requests_of(spec, Case(trace, 1.0, spec.seeds[0]))

    def is_carried(rate_rps: float) -> bool:
        scaled = asked.at_rate(rate_rps)
        return any(good_frac(serve_split(spec, scaled, share)) >= 0.99 for share in UTILIZATIONS)

    low = high = 1.0
    while is_carried(high):
        low, high = high, 2.0 * high
    while high / low > 1.0 + within:
        middle = (low * high) ** 0.5
        low, high = (middle, high) if is_carried(middle) else (low, middle)
    return low


if __name__ == "__main__":
    for name in CAPACITY_RPS:
        print(name, round(capacity_rps(name), 2))
