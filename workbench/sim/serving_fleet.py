"""A whole simulated fleet behind a router: requests arrive, are routed, run, and leave a result each.

router       anything that keeps `Router`: the core's policy (core_router.py), or another for comparison
snapshots    each replica is scraped every `SCRAPE_EVERY_S` and the router hears of it `SCRAPE_LAG_S` later
dispatches   are counted by the router at once; no network lies between it and the replicas
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from serving.core.state import ReplicaSnapshot
from workbench.sim.fleet import FleetSpec, PoolSpec
from workbench.sim.kernel import Kernel
from workbench.sim.replica_model import ReplicaModel, Running, Work
from workbench.sim.step_time import StepTime
from workbench.sim.workload import SimRequest, Workload

SCRAPE_EVERY_S = 0.25
SCRAPE_LAG_S = 0.25


@dataclass(frozen=True, slots=True)
class SimReplica:
    """One replica of the fleet. `usd_per_hour` is of all its devices."""

    replica_id: str
    pool_id: str
    model: str
    class_name: str
    usd_per_hour: float
    engine: ReplicaModel


class Router(Protocol):
    """What decides. It hears of everything that a gateway worker would hear of, in the same order."""

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """The replica for a request; None sheds it."""

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """The request is on its way there."""

    def on_first_token(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Its prompt is computed."""

    def on_finished(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """It has said everything."""

    def on_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """A replica was scraped, `SCRAPE_LAG_S` ago."""


@dataclass(frozen=True, slots=True)
class SimResult:
    """One served request. `good`: within its tier's TTFT and TPOT."""

    request: SimRequest
    replica_id: str
    ttft_s: float
    tpot_s: float
    num_cached_tokens: int
    num_preemptions: int
    good: bool


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a run came to.

    Attributes:
        results: of the served requests, in order of arrival.
        num_shed: refused by the router.
        busy_usd: each replica's price x its time with a request.
        provisioned_usd: each replica's price x the whole time.
        busy_s: of each replica.
        length_s: from the first arrival to the last token.
    """

    results: Sequence[SimResult]
    num_shed: int
    busy_usd: float
    provisioned_usd: float
    busy_s: dict[str, float]
    length_s: float


class ServingFleet:
    """The fleet of a specification on a kernel; `replicas` by their ids."""

    def __init__(self, spec: FleetSpec, workload: Workload, kernel: Kernel) -> None:
        self.spec, self.kernel = spec, kernel
        self.replicas: dict[str, SimReplica] = {}
        self.num_shed = 0
        self._workload = workload
        self._results: dict[str, SimResult] = {}
        self._placed: dict[str, tuple[SimRequest, str]] = {}
        self._router: Router | None = None
        for model, pools in spec.pools.items():
            for pool in pools:
                self._add_pool(model, pool)

    @property
    def block_tokens(self) -> int:
        """Tokens of a block of a prompt."""
        return self._workload.block_tokens

    def replicas_of(self, model: str) -> list[SimReplica]:
        """Those that serve a model."""
        return [replica for replica in self.replicas.values() if replica.model == model]

    def serve(self, router: Router, *, scraped: bool = True) -> Outcome:
        """Runs the whole workload through a router. Call it once."""
        self._router = router
        self._arrive_next(0)
        if scraped:
            self.kernel.at(0.0, self._scrape)
        self.kernel.run()
        requests = self._workload.requests
        busy_s = {name: replica.engine.busy_s for name, replica in self.replicas.items()}
        length_s = max(
            r.request.at_s + r.ttft_s + r.tpot_s * (r.request.num_output_tokens - 1) for r in self._results.values()
        )
        return Outcome(
            [self._results[r.request_id] for r in requests if r.request_id in self._results],
            self.num_shed,
            sum(r.usd_per_hour / 3600 * busy_s[name] for name, r in self.replicas.items()),
            sum(r.usd_per_hour / 3600 * length_s for r in self.replicas.values()),
            busy_s,
            length_s,
        )

    def _add_pool(self, model: str, pool: PoolSpec) -> None:
        step_time = StepTime.of(self.spec, model, pool.class_name, pool.tp)
        pool_id = f"{model}-{pool.class_name}"
        for number in range(pool.replicas):
            engine = ReplicaModel(
                self.kernel,
                step_time,
                self.spec.engine,
                block_tokens=self._workload.block_tokens,
                on_first_token=self._on_first_token,
                on_finished=self._on_finished,
            )
            name = f"{pool_id}-{number}"
            usd_per_hour = self.spec.usd_per_hour(pool)
            self.replicas[name] = SimReplica(name, pool_id, model, pool.class_name, usd_per_hour, engine)

    def _arrive_next(self, number: int) -> None:
        if number < len(self._workload.requests):
            request = self._workload.requests[number]
            self.kernel.at(max(request.at_s, self.kernel.now_s), lambda: self._arrive(number, request))

    def _arrive(self, number: int, request: SimRequest) -> None:
        assert self._router is not None  # serve() set it
        now_s = self.kernel.now_s
        replica_id = self._router.choose(request, now_s)
        if replica_id is None:
            self.num_shed += 1
        else:
            self._placed[request.request_id] = request, replica_id
            self._router.on_dispatched(replica_id, request, now_s)
            work = Work(request.request_id, request.num_prompt_tokens, request.num_output_tokens, request.blocks)
            self.replicas[replica_id].engine.submit(work)
        self._arrive_next(number + 1)

    def _on_first_token(self, running: Running) -> None:
        assert self._router is not None
        request, replica_id = self._placed[running.work.request_id]
        self._router.on_first_token(replica_id, request, self.kernel.now_s)

    def _on_finished(self, running: Running) -> None:
        assert self._router is not None
        now_s = self.kernel.now_s
        request, replica_id = self._placed.pop(running.work.request_id)
        ttft_s = running.first_token_at_s - request.at_s
        tpot_s = (now_s - running.first_token_at_s) / max(request.num_output_tokens - 1, 1)
        tier = self.spec.tiers[request.tier]
        good = ttft_s <= tier.ttft_limit_s(request.num_prompt_tokens) and tpot_s <= tier.tpot_p99_s
        self._results[request.request_id] = SimResult(
            request, replica_id, ttft_s, tpot_s, running.num_cached_tokens, running.num_preemptions, good
        )
        self._router.on_finished(replica_id, request, now_s)

    def _scrape(self) -> None:
        """Scrapes all replicas; the last scrape is the one after which nothing is left to do."""
        assert self._router is not None
        now_s, on_snapshot = self.kernel.now_s, self._router.on_snapshot
        snapshots = [self._snapshot(replica, now_s) for replica in self.replicas.values()]

        def tell() -> None:
            for snapshot in snapshots:
                on_snapshot(snapshot)

        self.kernel.at(now_s + SCRAPE_LAG_S, tell)
        if self._placed or len(self._results) + self.num_shed < len(self._workload.requests):
            self.kernel.at(now_s + SCRAPE_EVERY_S, self._scrape)

    def _snapshot(self, replica: SimReplica, now_s: float) -> ReplicaSnapshot:
        engine = replica.engine
        return ReplicaSnapshot(
            replica.replica_id,
            now_s,
            engine.num_running,
            engine.num_waiting,
            engine.kv_cache_usage_frac,
            engine.step_time.kv_capacity_tokens,
            num_preemptions_total=engine.num_preemptions,
            prefix_cache_queried_tokens_total=engine.num_prompt_tokens,
            prefix_cache_hit_tokens_total=engine.num_hit_tokens,
        )
