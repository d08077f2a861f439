"""The simulated replica against queues whose answer is known: M/M/1, M/M/c, Little's law."""

from __future__ import annotations

import math
import random

import pytest

from workbench.sim.fleet import EngineSpec
from workbench.sim.kernel import Kernel
from workbench.sim.replica_model import ReplicaModel, Running, Work
from workbench.sim.step_time import StepTime

STEP_S = 0.001  # whatever runs: so that each slot of the batch is a server of its own
MEAN_TOKENS = 2000


def erlang_c_wait_s(slots: int, rate_rps: float, service_s: float) -> float:
    """Mean wait of M/M/c (Erlang C)."""
    offered = rate_rps * service_s
    blocked = 1.0
    for servers in range(1, slots + 1):
        blocked = offered * blocked / (servers + offered * blocked)
    waits = blocked / (1 - offered / slots * (1 - blocked))
    return waits * service_s / (slots - offered)


@pytest.mark.parametrize(("slots", "load"), [(1, 0.5), (4, 0.6)], ids=["M/M/1", "M/M/4"])
def test_waits_are_those_of_the_queue(slots: int, load: float):
    kernel, rng = Kernel(), random.Random(7)
    arrived: dict[str, float] = {}
    waits: list[float] = []
    stays: list[float] = []
    engine = EngineSpec(
        max_num_seqs=slots, max_num_batched_tokens=64, block_size=16, gpu_memory_utilization=0.9, prefix_caching=False
    )
    replica = ReplicaModel(
        kernel,
        StepTime(STEP_S, 0.0, 0.0, 0.0, 0.0, 0.0, kv_capacity_tokens=10**9),
        engine,
        block_tokens=16,
        on_first_token=lambda r: waits.append(kernel.now_s - arrived[r.work.request_id]),
        on_finished=lambda r: stays.append(kernel.now_s - arrived[r.work.request_id]),
    )
    service_s = MEAN_TOKENS * STEP_S
    rate_rps = load * slots / service_s
    at_s, count = 0.0, 40_000

    def arrive(name: str, tokens: int) -> None:
        arrived[name] = kernel.now_s
        replica.submit(Work(name, 1, tokens))

    for number in range(count):
        at_s += rng.expovariate(rate_rps)
        tokens = max(round(rng.expovariate(1 / MEAN_TOKENS)), 1)
        kernel.at(at_s, lambda name=str(number), tokens=tokens: arrive(name, tokens))  # type: ignore[misc]
    kernel.run()

    expected_s = erlang_c_wait_s(slots, rate_rps, service_s)
    assert sum(waits) / count == pytest.approx(expected_s, rel=0.1)  # the noise of a queue of this length
    # Little: the mean number there is the rate times the mean stay; busy whenever anyone is there.
    assert sum(stays) / count == pytest.approx(expected_s + service_s, rel=0.04)
    if slots == 1:
        assert replica.busy_s / kernel.now_s == pytest.approx(load, rel=0.03)
    assert not math.isnan(sum(waits))


def test_the_same_run_is_the_same_to_the_last_bit():
    def run() -> list[tuple[str, float]]:
        kernel, rng = Kernel(), random.Random(3)
        ends: list[tuple[str, float]] = []

        def on_finished(running: Running) -> None:
            ends.append((running.work.request_id, kernel.now_s))

        engine = EngineSpec(
            max_num_seqs=8, max_num_batched_tokens=256, block_size=16, gpu_memory_utilization=0.9, prefix_caching=True
        )
        step = StepTime(0.001, 0.0001, 0.01, 0.0001, 1e-8, 1e-6, kv_capacity_tokens=2048)
        replica = ReplicaModel(
            kernel, step, engine, block_tokens=64, on_first_token=lambda _: None, on_finished=on_finished
        )
        for number in range(300):
            work = Work(str(number), rng.randint(1, 500), rng.randint(1, 100), (number % 7,))
            kernel.at(rng.uniform(0, 20), lambda work=work: replica.submit(work))  # type: ignore[misc]
        kernel.run()
        return ends

    assert run() == run()
