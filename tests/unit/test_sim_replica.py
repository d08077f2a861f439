"""The simulated replica: what its steps take, how it batches, what its KV cache holds, against figures by hand."""

from __future__ import annotations

import gzip
import json
import math
from dataclasses import replace
from importlib.resources import files
from statistics import fmean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench.sim.fleet import EngineSpec, FleetSpec, load_fleet
from workbench.sim.kernel import Kernel
from workbench.sim.prefix_cache import PrefixCache
from workbench.sim.replica_model import ReplicaModel, Running, Work
from workbench.sim.step_time import StepTime

ENGINE = EngineSpec(
    max_num_seqs=8, max_num_batched_tokens=256, block_size=16, gpu_memory_utilization=0.9, prefix_caching=True
)
STEP = StepTime(0.001, 0.0001, 0.01, 0.0001, 1e-8, 1e-6, kv_capacity_tokens=4096)


class Bench:
    """One replica and what came out of it."""

    def __init__(self, step: StepTime = STEP, engine: EngineSpec = ENGINE, block_tokens: int = 64) -> None:
        self.kernel = Kernel()
        self.first: dict[str, float] = {}
        self.finished: dict[str, float] = {}
        self.sequences: dict[str, Running] = {}
        self.replica = ReplicaModel(
            self.kernel,
            step,
            engine,
            block_tokens=block_tokens,
            on_first_token=self._on_first,
            on_finished=self._on_finished,
        )

    def _on_first(self, running: Running) -> None:
        self.first[running.work.request_id] = self.kernel.now_s

    def _on_finished(self, running: Running) -> None:
        assert running.work.request_id not in self.finished, "finished twice"
        self.finished[running.work.request_id] = self.kernel.now_s
        self.sequences[running.work.request_id] = running

    def submit_at(self, at_s: float, work: Work) -> None:
        self.kernel.at(at_s, lambda: self.replica.submit(work))


def test_events_run_in_order_and_never_in_the_past():
    kernel, seen = Kernel(), []
    kernel.at(2.0, lambda: seen.append("later"))
    kernel.at(1.0, lambda: seen.append("first"))
    kernel.at(1.0, lambda: kernel.at(1.5, lambda: seen.append("between")))
    kernel.run()
    assert seen == ["first", "between", "later"]
    for at_s in (1.0, math.nan):
        with pytest.raises(ValueError, match="cannot be scheduled"):
            kernel.at(at_s, kernel.run)


def test_the_roofline_of_the_fleet_by_hand():
    step = StepTime.of(load_fleet(), "llama-8b", "h100-80g", 1)
    assert step.weights_s == pytest.approx(8.03e9 * 2 / (3.35e12 * 0.81))
    assert step.per_token_s == pytest.approx(2 * 8.03e9 / (989e12 * 0.78))
    assert step.per_kv_token_s == pytest.approx(131072 / (3.35e12 * 0.93))
    assert step.kv_capacity_tokens == int((72e9 - 16.06e9) / 131072) // 16 * 16
    two = StepTime.of(load_fleet(), "llama-8b", "h100-80g", 2)
    assert (two.weights_s, two.per_token_s) == (pytest.approx(step.weights_s / 2), pytest.approx(step.per_token_s / 2))
    with pytest.raises(ValueError, match="does not fit"):
        StepTime.of(load_fleet(), "llama-70b", "l4-24g", 1)


@given(st.integers(1, 500), st.integers(1, 64), st.integers(1, 4000))
def test_steps_taken_in_one_go_last_as_long_as_one_by_one(num_steps: int, num_decoding: int, kv_tokens: int):
    one_by_one = sum(STEP.step_s(num_decoding, kv_tokens + num_decoding * i, 0, 0.0, 0) for i in range(num_steps))
    length_s = STEP.decode_s(num_steps, num_decoding, kv_tokens)
    assert length_s == pytest.approx(one_by_one)
    assert STEP.decode_steps_in(length_s, num_decoding, kv_tokens) == pytest.approx(num_steps)


def test_a_request_alone_takes_its_chunks_and_then_a_step_a_token():
    bench = Bench()
    bench.submit_at(0.0, Work("a", 300, 5))
    bench.kernel.run()
    chunks_s = STEP.step_s(0, 0, 256, 256 * 128.0, 1) + STEP.step_s(0, 0, 44, 44 * (256 + 22.0), 1)
    assert bench.first["a"] == pytest.approx(chunks_s)
    assert bench.finished["a"] == pytest.approx(chunks_s + STEP.decode_s(4, 1, 300))
    assert bench.replica.busy_s == pytest.approx(bench.finished["a"])
    assert bench.replica.kv_cache_usage_frac == 0.0


def test_who_comes_joins_at_the_next_step_and_delays_the_others_by_its_prompt():
    bench = Bench()
    bench.submit_at(0.0, Work("a", 100, 50))
    bench.submit_at(0.1, Work("b", 100, 2))
    bench.kernel.run()
    alone = Bench()
    alone.submit_at(0.0, Work("a", 100, 50))
    alone.kernel.run()
    assert 0.1 < bench.first["b"] < 0.1 + 2 * STEP.step_s(1, 150, 100, 5000.0, 1)
    assert alone.finished["a"] < bench.finished["a"] < alone.finished["a"] + 2 * STEP.step_s(1, 150, 100, 5000.0, 1)


def test_a_prefix_that_is_there_is_not_computed_again():
    bench = Bench()
    bench.submit_at(0.0, Work("a", 200, 2, (1, 2, 3)))
    bench.submit_at(1.0, Work("b", 200, 2, (1, 2, 3)))
    bench.submit_at(2.0, Work("whole", 192, 2, (1, 2, 3)))
    bench.kernel.run()
    assert [bench.sequences[name].num_cached_tokens for name in ("a", "b", "whole")] == [0, 192, 128]
    assert bench.first["b"] - 1.0 == pytest.approx(STEP.step_s(0, 0, 8, 8 * (192 + 4.0), 1))


def test_a_cached_block_is_evicted_by_age_of_use_and_never_while_held():
    cache = PrefixCache(64)
    cache.hold((1, 2))
    cache.hold((1, 3))
    assert cache.used_tokens == 3 * 64
    cache.release((1, 2))
    assert (cache.used_tokens, cache.idle_tokens) == (2 * 64, 64)
    cache.evict(1000)
    assert (cache.num_cached((1, 2)), cache.num_cached((1, 3))) == (1, 2)
    cache.release((1, 3))
    cache.evict(1)
    assert cache.num_cached((1, 3)) == 1, "what follows goes before its prefix"
    with pytest.raises(KeyError):
        cache.release((1, 3))


def test_without_room_the_last_is_preempted_and_says_everything_all_the_same():
    bench = Bench(replace(STEP, kv_capacity_tokens=640))
    for number in range(3):
        bench.submit_at(0.0, Work(str(number), 150, 200))
    bench.kernel.run()
    assert bench.replica.num_preemptions > 0
    assert bench.finished.keys() == {"0", "1", "2"}
    assert bench.finished["0"] < bench.finished["2"]
    assert bench.sequences["0"].num_preemptions == 0
    with pytest.raises(ValueError, match="do not fit"):
        bench.replica.submit(Work("huge", 600, 100))


works = st.lists(
    st.tuples(st.floats(0, 3), st.integers(1, 500), st.integers(1, 120), st.integers(0, 3)), min_size=1, max_size=30
)


@settings(deadline=None, max_examples=60)
@given(works, st.integers(700, 3000))
def test_every_request_is_finished_once_and_the_cache_is_given_back(
    requests: list[tuple[float, int, int, int]], capacity: int
):
    bench = Bench(replace(STEP, kv_capacity_tokens=capacity))
    used: list[float] = []
    for number, (at_s, prompt, output, conversation) in enumerate(requests):
        blocks = tuple(f"{conversation}/{i}" for i in range(prompt // 64))
        bench.submit_at(at_s, Work(str(number), prompt, output, blocks))
        bench.kernel.at(at_s + 0.01, lambda: used.append(bench.replica.kv_cache_usage_frac))
    bench.kernel.run()
    assert len(bench.finished) == len(requests)
    assert all(bench.first[name] <= at_s for name, at_s in bench.finished.items())
    assert (bench.replica.num_running, bench.replica.num_waiting) == (0, 0)
    assert bench.replica.kv_cache_usage_frac == 0.0
    assert all(0.0 <= frac <= 1.0 for frac in used)


def test_a_real_run_of_vllm_is_reproduced():
    """300 requests at 10/s on one RTX PRO 6000: the time of a token within 8 %, the whole within 6 %."""
    with gzip.open(str(files("workbench").joinpath("data", "engine_run_rtx_pro_6000_llama_8b.jsonl.gz")), "rt") as file:
        run = [json.loads(line) for line in file]
    fleet: FleetSpec = load_fleet()
    engine = fleet.engine.model_copy(update={"max_num_seqs": 128})
    bench = Bench(StepTime.of(fleet, "llama-8b", "rtx-pro-6000-96g", 1), engine)
    begun_s = min(row["queued_ts"] for row in run)
    for row in run:
        bench.submit_at(row["queued_ts"] - begun_s, Work(row["request_id"], row["input_toks"], row["output_toks"]))
    bench.kernel.run()
    tpot_s = [(row["last_token_ts"] - row["first_token_ts"]) / (row["output_toks"] - 1) for row in run]
    names = [row["request_id"] for row in run]
    predicted_s = [
        (bench.finished[n] - bench.first[n]) / (row["output_toks"] - 1) for n, row in zip(names, run, strict=True)
    ]
    assert fmean(predicted_s) == pytest.approx(fmean(tpot_s), rel=0.08)
    assert max(bench.finished.values()) == pytest.approx(max(r["last_token_ts"] for r in run) - begun_s, rel=0.06)
