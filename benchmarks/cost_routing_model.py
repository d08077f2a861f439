"""What `cost_routing` expects: cost tables, and the core's own policy run through them on a virtual clock."""

from __future__ import annotations

import heapq
import random
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from serving.core.chance import Chance
from serving.core.decisions import Route
from serving.core.fleet import Fleet
from serving.core.policies import routing
from serving.core.state import (
    CostRow,
    Model,
    Pool,
    Replica,
    ReplicaSnapshot,
    ReplicaState,
    RequestView,
    RoutingTable,
    Task,
)

MODEL = "fake-model"
POOLS = ("left", "right")
NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS = 32, 32
TTFT_MS, ITL_MS = 20.0, 10.0
CHEAP_USD, DEAR_USD = 1.0, 3.0  # an hour of a replica, and per million output tokens; input a tenth of it
REPORT_EVERY_S = 0.25


@dataclass(frozen=True, slots=True)
class Phase:
    """A cost table in force: usd per million output tokens of each pool, and whose row has expired."""

    name: str
    usd: dict[str, float]
    expired: str | None = None

    def usd_per_s(self, busy_frac: Mapping[str, float]) -> float:
        """Money of both replicas a second, each for the share of time that it is busy."""
        return sum(self.usd[pool] * busy_frac[pool] for pool in POOLS) / 3600.0

    def rows(self, now_s: float) -> tuple[CostRow, ...]:
        """The table's rows."""
        return tuple(_row(pool, self.usd[pool], now_s, is_expired=pool == self.expired) for pool in POOLS)


PHASES = (
    Phase("left dear", {"left": DEAR_USD, "right": CHEAP_USD}),
    Phase("prices swapped", {"left": CHEAP_USD, "right": DEAR_USD}),
    Phase("cheap row expired", {"left": CHEAP_USD, "right": DEAR_USD}, expired="left"),
)


@dataclass(frozen=True, slots=True)
class Prediction:
    """Share of the requests, and share of the time with a request running, of each pool."""

    share: dict[str, float]
    busy_frac: dict[str, float]


def predict(phase: Phase, concurrency: int, seed: int, num_requests: int = 6000) -> Prediction:
    """What the core's own policy does with `concurrency` streams on a virtual clock, after the first quarter."""
    rng, now_s, fleet = random.Random(seed), time.time(), Fleet()
    fleet.on_table(_table(phase, now_s))
    ends: list[tuple[float, int, str]] = []
    runs: dict[str, list[tuple[float, float]]] = {pool: [] for pool in POOLS}
    scrape_at_s = now_s
    for number in range(num_requests):
        if number >= concurrency:
            now_s, ended, replica_id = heapq.heappop(ends)
            fleet.on_finished(replica_id, str(ended), now_s)
        if now_s >= scrape_at_s:
            scrape_at_s = now_s + REPORT_EVERY_S
            for snapshot in _snapshots(fleet, now_s):
                fleet.on_snapshot(snapshot)
        request = RequestView(
            str(number), MODEL, "1", Task.GENERATE, NUM_PROMPT_TOKENS, expected_output_tokens=NUM_OUTPUT_TOKENS
        )
        decision = routing.route(request, fleet.view(request, now_s), Chance(rng.getrandbits(64)))
        if not isinstance(decision, Route):
            raise RuntimeError(f"the core rejected: {decision.reason}")
        fleet.on_dispatched(decision.replica_id, request, now_s)
        first_wave_s = rng.random() * service_s() if number < concurrency else 0.0
        end_s = now_s + service_s() - first_wave_s
        heapq.heappush(ends, (end_s, number, decision.replica_id))
        if number == num_requests // 4:
            start_s = now_s
        if number >= num_requests // 4:
            runs[decision.pool_id].append((now_s, end_s))
    total = sum(map(len, runs.values()))
    share = {pool: len(runs[pool]) / total for pool in POOLS}
    return Prediction(share, {pool: busy_s(runs[pool], start_s, now_s) / (now_s - start_s) for pool in POOLS})


def busy_s(runs: Iterable[tuple[float, float]], start_s: float, end_s: float) -> float:
    """Seconds of the window in which at least one of the (start, end) intervals runs."""
    total, until_s = 0.0, start_s
    for begin_s, over_s in sorted(runs):
        total += max(min(over_s, end_s) - max(begin_s, until_s), 0.0)
        until_s = max(until_s, over_s)
    return total


def _snapshots(fleet: Fleet, now_s: float) -> list[ReplicaSnapshot]:
    capacity = 16 * 8192  # the fake engine's defaults
    return [
        ReplicaSnapshot(r.replica_id, now_s, r.num_in_flight, 0, r.in_flight_tokens / capacity, capacity)
        for r in fleet.replicas
    ]


def _table(phase: Phase, now_s: float) -> RoutingTable:
    pools = tuple(
        replace(pool_of(pool), replicas=(Replica(f"{pool}-0", f"http://{pool}", ReplicaState.READY),)) for pool in POOLS
    )
    return RoutingTable(1, now_s, (Model(MODEL, Task.GENERATE, "1", ("1",)),), pools, phase.rows(now_s))


def pool_of(pool_id: str) -> Pool:
    """The pool as a supervisor publishes it."""
    return Pool(
        pool_id=pool_id,
        model=MODEL,
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        usd_per_hour=1.0,
        max_model_len=4096,
        engine_fingerprint=pool_id,
        hardware_fingerprint="fake",
        replicas=(),
    )


def _row(pool: str, usd_output: float, now_s: float, *, is_expired: bool) -> CostRow:
    return CostRow(
        model=MODEL,
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        engine_fingerprint=pool,
        hardware_fingerprint="fake",
        num_prompt_tokens=NUM_PROMPT_TOKENS,
        num_output_tokens=NUM_OUTPUT_TOKENS,
        concurrency=1,  # the only row of its shape: it prices every concurrency
        output_tokens_per_s_per_gpu=None,
        prefill_tokens_per_s_per_gpu=None,
        ttft_p50_s=None,
        ttft_p99_s=None,
        tpot_p50_s=None,
        tpot_p99_s=None,
        usd_per_million_input_tokens=usd_output / 10.0,
        usd_per_million_cached_input_tokens=None,
        usd_per_million_output_tokens=usd_output,
        provenance="measured",
        measured_at_s=now_s - 7200.0,
        expires_at_s=now_s - 3600.0 if is_expired else now_s + 3600.0,
        mlflow_run_id="benchmark",
    )


def usd_of(usd_output: float, num_output_tokens: int) -> float:
    """What a request of that output costs by the table."""
    return (NUM_PROMPT_TOKENS * usd_output / 10.0 + num_output_tokens * usd_output) / 1e6


def service_s() -> float:
    """Seconds that the fake engine takes for a request."""
    return (TTFT_MS + (NUM_OUTPUT_TOKENS - 1) * ITL_MS) / 1e3
