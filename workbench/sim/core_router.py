"""The policies of `serving/core`, as the gateway runs them, before a simulated fleet: the same events, the same calls.

One worker, one tenant. What the gateway learns from answers (their lengths) is learned here too.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from serving.core.chance import Chance
from serving.core.decisions import RouteRecord
from serving.core.fleet import Fleet
from serving.core.output_lengths import OutputLengths
from serving.core.policies import routing
from serving.core.policies.scorers import COST_AWARE_WEIGHTS
from serving.core.prefix_index import Prefix
from serving.core.state import (
    CostRow,
    Model,
    Pool,
    Replica,
    ReplicaSnapshot,
    ReplicaState,
    RequestView,
    RoutingPolicy,
    RoutingTable,
    Task,
    TierSlo,
)
from workbench.sim.cost_rows import MODEL_VERSION
from workbench.sim.fleet import FleetSpec, PoolSpec
from workbench.sim.serving_fleet import ServingFleet
from workbench.sim.workload import SimRequest

TENANT = "simulated"


class CoreRouter:
    """`routing.route` over a `Fleet`. With `records` every decision is kept there."""

    def __init__(
        self,
        fleet: ServingFleet,
        policy: RoutingPolicy,
        rows: Sequence[CostRow],
        *,
        seed: int,
        records: list[RouteRecord] | None = None,
    ) -> None:
        self._fleet = Fleet()
        self._fleet.on_table(routing_table(fleet.spec, policy, rows))
        self._lengths = OutputLengths()
        self._rng = random.Random(f"router/{seed}")
        self._block_tokens = fleet.block_tokens
        self._views: dict[str, RequestView] = {}
        self._records = records

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """As the gateway's dispatcher: a view, a decision, and the first attempt alone."""
        asked = RequestView(
            request.request_id,
            request.model,
            None,
            Task.GENERATE,
            request.num_prompt_tokens,
            self._lengths.expected(TENANT, request.model, None),
            request.tier,
        )
        view = self._fleet.view(asked, now_s, self._prefix(request))
        seed = self._rng.getrandbits(48)
        decision = routing.route(asked, view, Chance(seed))
        if self._records is not None:
            self._records.append(RouteRecord.of(asked, view, seed, (), decision))
        if decision.kind == "reject":
            return None
        self._views[request.request_id] = asked
        return decision.replica_id

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Counted at dispatch."""
        self._fleet.on_dispatched(replica_id, self._views.pop(request.request_id), now_s, self._prefix(request))

    def on_first_token(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Its prompt is computed."""
        self._fleet.on_first_token(replica_id, request.request_id)

    def on_finished(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Off the count, and its length is learned."""
        self._fleet.on_finished(replica_id, request.request_id, now_s)
        self._lengths.add(TENANT, request.model, request.num_output_tokens)

    def on_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """A scrape."""
        self._fleet.on_snapshot(snapshot)

    def _prefix(self, request: SimRequest) -> Prefix | None:
        """The trace's block ids stand for hashes; each is of all that lies before it, with its model."""
        if not request.blocks:
            return None
        return Prefix([hash((request.model, block)) for block in request.blocks], self._block_tokens)


def cost_aware_policy(spec: FleetSpec) -> RoutingPolicy:
    """The core's cost-aware weights and the fleet's SLOs; predicted rows count, for there are no others."""
    slos = {
        tier.value: TierSlo(of.ttft_p99_s.base, of.tpot_p99_s, of.ttft_p99_s.per_1k) for tier, of in spec.tiers.items()
    }
    return RoutingPolicy(tier_weights=COST_AWARE_WEIGHTS, slos=slos, provenances=("predicted",))


def routing_table(spec: FleetSpec, policy: RoutingPolicy, rows: Sequence[CostRow]) -> RoutingTable:
    """The fleet's table, all replicas ready."""
    models = tuple(Model(name, Task.GENERATE, MODEL_VERSION, (MODEL_VERSION,)) for name in spec.pools)
    pools = tuple(_pool(spec, model, pool) for model, pools in spec.pools.items() for pool in pools)
    return RoutingTable(1, 0.0, models, pools, tuple(rows), policy=policy)


def _pool(spec: FleetSpec, model: str, pool: PoolSpec) -> Pool:
    pool_id = f"{model}-{pool.class_name}"
    names = [f"{pool_id}-{number}" for number in range(pool.replicas)]
    return Pool(
        pool_id=pool_id,
        model=model,
        version=MODEL_VERSION,
        task=Task.GENERATE,
        hardware_class=pool.class_name,
        usd_per_hour=spec.usd_per_hour(pool),
        max_model_len=spec.max_prompt_tokens * 2,
        engine_fingerprint="simulated",
        hardware_fingerprint="simulated",
        replicas=tuple(Replica(name, f"http://{name}", ReplicaState.READY) for name in names),
        num_devices=pool.tp,
    )
