"""Several client processes share one load: one schedule, one start, one result, whoever dies."""

from __future__ import annotations

import asyncio

import psutil
import pytest

from serving.engine.fake.server import FakeEngine
from serving.engine.fake.settings import FakeSettings
from workbench.loadgen import ClosedLoop, Constant, FailureKind, Prompt, Target, run_load
from workbench.loadgen.calibration import stamp_error_s


@pytest.fixture
async def engine():
    async with FakeEngine(FakeSettings(ttft_ms=5.0, itl_ms=2.0)) as fake:
        yield fake


def prompts(num_turns=1):
    session = None
    for number in range(10_000):
        if num_turns > 1:
            session = f"s{number // num_turns}"
        ids = (number % 5000, number // 5000, 7)
        yield Prompt(3, 5, token_ids=ids, session_id=session, turn=number % num_turns)


async def load(engine, arrival, *, num_requests, num_turns=1, **options):
    target, made = Target(engine.url, "fake-model"), prompts(num_turns)
    options = {"max_duration_s": 20.0, "client_processes": 2, "calibrates": False} | options
    return await run_load(target, made, arrival, num_requests=num_requests, **options)


async def test_an_open_loop_keeps_its_schedule_over_processes(engine):
    seen: list[tuple[int, int]] = []
    told = lambda done, planned: seen.append((done, planned))  # noqa: E731
    result = await load(engine, Constant(100.0), num_requests=40, on_progress=told, calibrates=True)
    assert [record.index for record in result.records] == list(range(40))
    assert [record.intended_at_s for record in result.records] == pytest.approx([n / 100 for n in range(40)])
    assert all(record.ok for record in result.records)
    assert {log.id for log in engine.log.ended} == {record.request_id for record in result.records}
    assert (result.client_error.num_processes, seen[-1]) == (2, (40, 40))
    assert result.client_error.stamp_error_p99_s > 0
    assert result.notes == ()


async def test_a_closed_loop_splits_its_users_and_ends_for_all_at_once(engine):
    result = await load(engine, ClosedLoop(3), num_requests=30, num_turns=2)
    sent = {record.request_id for record in result.records}
    assert all(record.ok for record in result.records)
    assert 20 <= len(sent) == len(result.records) <= 30
    assert len(sent) == 30 or any("had sent its part" in note for note in result.notes)


async def test_a_client_process_that_dies_ends_the_run_and_keeps_what_the_others_had(engine):
    killed = []

    def kill(done, planned):
        if done >= 10 and not killed:  # the dead stay listed as zombies, which have no command line to read
            for child in psutil.Process().children():
                if any(part.endswith("0.job") for part in child.cmdline()):
                    child.kill()
                    killed.append(child)

    result = await load(engine, ClosedLoop(4), num_requests=10_000, on_progress=kill)
    assert "client process 1 died (exit code -9)" in result.client_error.invalid
    assert sum(record.ok for record in result.records) > 0


async def test_a_run_over_processes_ends_when_it_is_told_to(engine):
    stop = asyncio.Event()
    result = await load(
        engine, ClosedLoop(4), num_requests=10_000, stop=stop, on_progress=lambda done, planned: stop.set()
    )
    assert result.client_error.invalid is None
    assert {record.failure for record in result.records} <= {None, FailureKind.CUT_OFF}
    assert 4 <= len(result.records) < 10_000


async def test_the_client_measures_its_own_error():
    assert 0.0 < await stamp_error_s() < 5.0
