"""The search for the highest load under an SLO on a fake engine, whose steps grow with its batch."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.state import Task
from serving.engine.fake import FakeEngine
from tests.measured import FAST, make_replica, make_vocabulary
from workbench.loadgen import FailureKind, RequestRecord
from workbench.slo.search import Capacity, Ending, SearchPlan, Verdict, verdict
from workbench.slo.searching import LoadKind, SearchStep, SloLimits, SloQuestion, read_probe, search_slo
from workbench.sweeps.cells import Shape

# A step takes 4 ms + 0.5 ms a stream: 12 ms at 16 streams.
ENGINE = FAST.model_copy(update={"itl_ms": 4.0, "itl_ms_per_seq": 0.5, "prefill_ms_per_token": 0.0})
QUESTION = SloQuestion(
    LoadKind.CONCURRENCY,
    Shape(24, 5),
    SloLimits(None, 0.012, None),
    SearchPlan(8, 1, 64, is_whole=True, max_cells=5),
)


async def test_the_load_is_found_and_a_search_goes_on_where_it_stopped(tmp_path: Path) -> None:
    vocabulary = make_vocabulary(tmp_path / "weights")
    steps: list[SearchStep] = []

    def stop_after_two(step: SearchStep) -> None:
        steps.append(step)
        if step.number == 3:
            raise asyncio.CancelledError

    async with FakeEngine(ENGINE) as engine:
        replica = make_replica(engine.url)
        with pytest.raises(asyncio.CancelledError):
            await search_slo(QUESTION, replica, vocabulary, tmp_path, on_step=stop_after_two)
        kept = [step.probe for step in steps if step.probe is not None]
        answer = await search_slo(QUESTION, replica, vocabulary, tmp_path)
    assert answer.probes[:2] == tuple(kept)
    assert isinstance(answer.capacity, Capacity)
    # The fake's own timers and two busy cores add to a step, so the answer lies at or below the arithmetic.
    assert answer.capacity.load is not None and 6 <= answer.capacity.load <= 18
    assert answer.capacity.limit == "tpot_s/p99"
    assert (answer.folder / "search.json").exists()


def records(count: int, ttft_s: float, num_failed: int = 0) -> list[RequestRecord]:
    base = RequestRecord("r", 0, Task.GENERATE, 8, 3, 0.0, 0.0, chunk_tokens=(1, 1, 1), num_output_tokens=3)
    found = []
    for index in range(count):
        at = (ttft_s, ttft_s + 0.01, ttft_s + 0.02)
        failure = FailureKind.LOST if index >= count - num_failed else None
        found.append(replace(base, index=index, chunk_at_s=at, stream_end_at_s=at[-1], failure=failure))
    return found


def test_requests_that_fail_break_the_slo() -> None:
    question = replace(QUESTION, limits=SloLimits(1.0, 0.1, 0.99))
    assert verdict(read_probe(question, 8, records(500, 0.1))) is Verdict.KEPT
    assert verdict(read_probe(question, 8, records(500, 2.0))) is Verdict.BROKEN
    assert verdict(read_probe(question, 8, records(500, 0.1, num_failed=50))) is Verdict.BROKEN


def test_too_few_requests_are_never_enough_to_keep_an_slo() -> None:
    probe = read_probe(replace(QUESTION, limits=SloLimits(1.0, 0.1, 0.99)), 8, records(100, 0.1))
    assert not probe.is_complete and verdict(probe) is Verdict.INCONCLUSIVE
    assert Ending.TOO_FEW_REQUESTS in Ending


def test_an_slo_asks_for_something() -> None:
    with pytest.raises(ValueError, match="needs a limit"):
        SloLimits(None, None, 0.99)
