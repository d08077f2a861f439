"""What one routing decision costs in CPU among a hundred and among ten thousand replicas, beside a reference."""

from __future__ import annotations

import random
import time
from collections.abc import Callable

from benchmarks.harness import Bar, at_most
from serving.core.chance import Chance
from serving.core.fleet import Fleet
from serving.core.policies import routing
from serving.core.policies.scorers import COST_AWARE_WEIGHTS
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

LIMITS_US = {100: 15.0, 10_000: 30.0}
NUM_POOLS = 2
NUM_DECISIONS, NUM_ROUNDS = 2000, 7
NOW_S = 1e6
SLOS = {tier: TierSlo(2.0, 0.1) for tier in COST_AWARE_WEIGHTS}
LOAD_POLICY = RoutingPolicy()
COST_POLICY = RoutingPolicy(tier_weights=COST_AWARE_WEIGHTS, slos=SLOS)


def decision_bars() -> list[Bar]:
    """The bars, and a reference by which to read them on another machine: a thousand dictionary look-ups."""
    table = {number: float(number) for number in range(1000)}

    def look_up() -> None:
        total = 0.0
        for number in range(1000):
            total += table[number]

    bars = [Bar("reference: 1,000 look-ups and additions, us of CPU", _best_us(look_up, 200), "shown", None)]
    for num_replicas, limit_us in LIMITS_US.items():
        for name, policy in (("load and price", LOAD_POLICY), ("cost-aware with SLOs", COST_POLICY)):
            decide = _decider(num_replicas, policy)
            label = f"one decision among {num_replicas:,} replicas of {NUM_POOLS} pools, {name}, us of CPU"
            bars.append(at_most(label, _best_us(decide, NUM_DECISIONS), limit_us))
    return bars


def _best_us(work: Callable[[], None], times: int) -> float:
    """The best of some rounds: what else the machine does only ever adds."""
    best = float("inf")
    for _ in range(NUM_ROUNDS):
        begun_s = time.process_time()
        for _ in range(times):
            work()
        best = min(best, time.process_time() - begun_s)
    return best / times * 1e6


def _decider(num_replicas: int, policy: RoutingPolicy) -> Callable[[], None]:
    fleet, rng = Fleet(), random.Random(1)
    fleet.on_table(_table(num_replicas, policy))
    for view in fleet.replicas:
        busy = rng.randint(0, 40)
        fleet.on_snapshot(ReplicaSnapshot(view.replica_id, NOW_S, busy, 0, busy / 50, 400_000))
    requests = [
        RequestView(str(number), "m", None, Task.GENERATE, rng.randint(10, 4000), rng.randint(10, 400))
        for number in range(64)
    ]

    def decide() -> None:
        request = requests[rng.getrandbits(6)]
        routing.route(request, fleet.view(request, NOW_S), Chance(rng.getrandbits(48)))

    return decide


def _table(num_replicas: int, policy: RoutingPolicy) -> RoutingTable:
    pools, rows = [], []
    for number in range(NUM_POOLS):
        names = [f"{number}-{index}" for index in range(num_replicas // NUM_POOLS)]
        replicas = tuple(Replica(name, f"http://{name}", ReplicaState.READY) for name in names)
        pools.append(Pool(str(number), "m", "1", Task.GENERATE, "cpu", 1.0, 8192, str(number), "h", replicas))
        for shape in ((128, 128), (1024, 128), (4096, 128)):
            rows += [_row(str(number), shape, concurrency) for concurrency in (1, 4, 16, 64)]
    return RoutingTable(1, NOW_S, (Model("m", Task.GENERATE, "1", ("1",)),), tuple(pools), tuple(rows), policy=policy)


def _row(engine: str, shape: tuple[int, int], concurrency: int) -> CostRow:
    return CostRow(
        model="m",
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        engine_fingerprint=engine,
        hardware_fingerprint="h",
        num_prompt_tokens=shape[0],
        num_output_tokens=shape[1],
        concurrency=concurrency,
        output_tokens_per_s_per_gpu=1000.0,
        prefill_tokens_per_s_per_gpu=20_000.0,
        ttft_p50_s=shape[0] / 20_000.0 + 0.02,
        ttft_p99_s=shape[0] / 10_000.0 + 0.05,
        tpot_p50_s=0.01 + 0.0005 * concurrency,
        tpot_p99_s=0.02 + 0.0005 * concurrency,
        usd_per_million_input_tokens=0.1,
        usd_per_million_cached_input_tokens=0.01,
        usd_per_million_output_tokens=4.0 / concurrency,
        provenance="measured",
        measured_at_s=NOW_S,
        expires_at_s=NOW_S + 1e6,
        mlflow_run_id="benchmark",
    )
