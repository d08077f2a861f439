"""The load generator against the fake engine, whose own log is the truth."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator

import pytest

from serving.core.state import Task
from serving.engine.fake import FakeEngine, FakeSettings, ServerFaults
from workbench.loadgen import ClosedLoop, FailureKind, Poisson, Prompt, Slo, Target, TokenSource, run_load, summarize

LOOSE = Slo(ttft_s=60.0, tpot_s=60.0)


def prompts(num_prompt_tokens: int = 24, num_output_tokens: int = 6, *, chat: bool = False) -> Iterator[Prompt]:
    rng = random.Random(1)
    while True:
        ids = tuple(rng.randrange(5000) for _ in range(num_prompt_tokens))
        if chat:
            content = " ".join(f"w{token_id}" for token_id in ids)
            yield Prompt(num_prompt_tokens, num_output_tokens, messages=({"role": "user", "content": content},))
        else:
            yield Prompt(num_prompt_tokens, num_output_tokens, token_ids=ids)


@pytest.fixture
async def engine():
    async with FakeEngine(FakeSettings(ttft_ms=5.0, itl_ms=1.0)) as fake:
        yield fake


async def load(engine, arrival=None, *, chat=False, num_requests=8, max_duration_s=20.0, target=None, **options):
    target = target or Target(engine.url, "fake-model")
    options.setdefault("cache_salt", "cell")
    options.setdefault("calibrates", False)
    arrival = arrival or ClosedLoop(4)
    return await run_load(
        target, prompts(chat=chat), arrival, num_requests=num_requests, max_duration_s=max_duration_s, **options
    )


def truth_of(engine, record):
    return next(log for log in engine.log.ended if log.id == record.request_id)


@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("count_by", [TokenSource.TOKEN_IDS, TokenSource.CONTINUOUS_USAGE, TokenSource.FINAL_USAGE])
async def test_counts_and_stamps_are_those_of_the_engines_log(engine, chat, count_by):
    result = await load(engine, chat=chat, count_by=count_by)
    assert len(result.records) == 8
    for record in result.records:
        log = truth_of(engine, record)
        assert record.ok, record.failure_detail
        assert record.token_source is count_by
        assert record.num_output_tokens == log.num_output_tokens == 6
        assert record.usage_prompt_tokens == log.num_prompt_tokens == 24
        assert record.chunk_tokens == tuple(write.num_tokens for write in log.token_writes)
        for stamp_s, write in zip(record.chunk_at_s, log.token_writes, strict=True):
            assert write.at_s <= stamp_s + result.started_perf_s


async def test_a_fresh_salt_and_distinct_prompts_hit_no_cache_and_repeats_do(engine):
    cold = await load(engine, cache_salt="a")
    again = await load(engine, cache_salt="a")
    assert {record.num_cached_tokens for record in cold.records} == {0}
    assert all(record.num_cached_tokens for record in again.records)
    salts = {log.body["cache_salt"] for log in engine.log.ended}
    assert salts == {"a"}


async def test_a_closed_loop_never_has_more_in_flight_than_its_concurrency(engine):
    result = await load(engine, ClosedLoop(3), num_requests=15)
    edges = sorted(
        [(record.sent_at_s, 1) for record in result.records] + [(r.stream_end_at_s, -1) for r in result.records]
    )
    in_flight = most = 0
    for _, step in edges:
        in_flight += step
        most = max(most, in_flight)
    assert most == 3
    assert len(result.records) == 15


async def test_an_open_loop_sends_on_schedule_whatever_the_answers_do(engine):
    engine.faults = ServerFaults(hang=True)
    result = await load(engine, Poisson(200.0), num_requests=20, timeout_s=0.3, seed=3)
    schedule = Poisson(200.0).send_times_s(random.Random("3/arrivals"))
    assert [record.intended_at_s for record in result.records] == pytest.approx(
        [at_s for at_s, _ in zip(schedule, range(20), strict=False)]
    )
    assert {record.failure for record in result.records} == {FailureKind.TIMEOUT}


async def test_a_cap_on_flight_makes_sends_late_and_the_client_says_so(engine):
    engine.faults = ServerFaults(ttft_ms=30.0)
    result = await load(engine, Poisson(1000.0, max_in_flight=1), num_requests=6)
    lags = [record.send_lag_s for record in result.records]
    assert lags[-1] > 0.1
    assert "fell behind" in result.client_error.invalid
    assert result.records[-1].ttft_s > result.records[-1].service_ttft_s


async def test_gateways_get_no_extras_and_may_stop_early(engine):
    target = Target(engine.url, "fake-model", kind="gateway")
    result = await load(engine, target=target, num_requests=2)
    assert all(record.ok for record in result.records)
    assert {record.token_source for record in result.records} == {TokenSource.FINAL_USAGE}
    for log in engine.log.ended:
        assert not {"cache_salt", "ignore_eos", "return_token_ids"} & set(log.body)


FAULTS = [
    (ServerFaults(error_after_tokens=0), FailureKind.ERROR_EVENT),
    (ServerFaults(error_after_tokens=2), FailureKind.ERROR_EVENT),
    (ServerFaults(no_token=True), FailureKind.NO_TOKEN),
    (ServerFaults(status=503), FailureKind.HTTP_STATUS),
    (ServerFaults(status=429, retry_after_s=1), FailureKind.HTTP_STATUS),
    (ServerFaults(die_after_tokens=2), FailureKind.LOST),
    (ServerFaults(die_after_tokens=0), FailureKind.LOST),
    (ServerFaults(hang=True), FailureKind.TIMEOUT),
    (ServerFaults(hang_after_tokens=2), FailureKind.TIMEOUT),
]


@pytest.mark.parametrize(("faults", "kind"), FAULTS, ids=lambda value: str(value)[:40])
async def test_failures_by_kind(engine, faults, kind):
    engine.faults = faults
    result = await load(engine, num_requests=4, timeout_s=0.3)
    assert [record.failure for record in result.records] == [kind] * 4
    summary = summarize(result.records, slo=LOOSE, num_units=1, num_warm_up=0)
    assert summary.failures == {kind: 4}
    assert summary.invalid is not None
    assert set(summary.metrics) == {"failed_frac"}


async def test_nobody_listens(engine):
    result = await load(engine, target=Target("http://127.0.0.1:9", "fake-model"), num_requests=3)
    assert [record.failure for record in result.records] == [FailureKind.CONNECT] * 3


async def test_a_backend_that_stops_answering_ends_the_run_in_time(engine):
    engine.faults = ServerFaults(hang_after_tokens=2)
    async with asyncio.timeout(10.0):  # far under a request's timeout of 120 s
        result = await load(engine, num_requests=100, max_duration_s=0.2, drain_timeout_s=0.1)
    assert [record.failure for record in result.records] == [FailureKind.CUT_OFF] * 4
    assert {record.num_output_tokens for record in result.records} == {2}
    await engine.wait_until(lambda fake: not fake.log.active)
    assert {log.finish_reason for log in engine.log.ended} == {"abort"}


async def test_the_duration_bounds_the_sends_and_what_runs_may_finish(engine):
    engine.faults = ServerFaults(ttft_ms=30.0)
    result = await load(engine, ClosedLoop(2), num_requests=1000, max_duration_s=0.15)
    assert 2 <= len(result.records) < 1000
    assert all(record.ok and record.sent_at_s < 0.15 for record in result.records)


async def test_late_role_usage_and_done_move_nothing(engine):
    engine.faults = ServerFaults(role_late_ms=60.0, usage_late_ms=60.0, done_late_ms=60.0)
    result = await load(engine, chat=True, num_requests=4)
    for record in result.records:
        writes = truth_of(engine, record).token_writes
        assert record.ok
        assert record.chunk_at_s[0] + result.started_perf_s >= writes[0].at_s
        assert record.stream_end_at_s - record.end_at_s > 0.1
        assert record.first_token_at_s == record.chunk_at_s[0] < record.end_at_s


async def test_reasoning_counts_as_tokens_but_not_as_content(engine):
    engine.faults = ServerFaults(reasoning_tokens=3)
    result = await load(engine, chat=True, num_requests=2)
    for record in result.records:
        assert (record.num_output_tokens, record.ok) == (6, True)
        assert record.first_content_at_s == record.chunk_at_s[3]


async def test_embeddings():
    async with FakeEngine(FakeSettings(ttft_ms=2.0)) as fake:
        target = Target(fake.url, "fake-model", task=Task.EMBED)
        made = (Prompt(12, 0, token_ids=tuple(range(n, n + 12))) for n in range(100))
        result = await run_load(target, made, ClosedLoop(2), num_requests=12, max_duration_s=20, calibrates=False)
        summary = summarize(result.records, slo=LOOSE, num_units=1, num_warm_up=2, client_error=result.client_error)
        assert all(record.ok for record in result.records)
        assert {record.usage_prompt_tokens for record in result.records} == {12}
        assert summary.metrics["request_rps"] > 0
        assert summary.metrics["prompt_tokens_per_s_per_gpu"] == pytest.approx(12 * summary.metrics["request_rps"])


async def test_progress_is_told_after_each_request(engine):
    seen: list[tuple[int, int]] = []
    await load(engine, num_requests=5, on_progress=lambda done, planned: seen.append((done, planned)))
    assert seen == [(n, 5) for n in range(1, 6)]


async def test_a_load_that_cannot_run_is_refused(engine):
    with pytest.raises(ValueError, match="no prompts"):
        await run_load(Target(engine.url, "m"), [], ClosedLoop(1), num_requests=1, max_duration_s=1)
    with pytest.raises(ValueError, match="above 0"):
        await load(engine, max_duration_s=0.0)


@pytest.mark.parametrize("arrival", [ClosedLoop(4), Poisson(40.0)])
async def test_a_run_that_is_stopped_keeps_what_came_and_cuts_off_the_rest(engine, arrival):
    stop, ended = asyncio.Event(), []

    def on_progress(num_ended: int, num_planned: int) -> None:
        ended.append(num_ended)
        if num_ended == 12:
            stop.set()

    result = await load(engine, arrival, num_requests=1000, stop=stop, on_progress=on_progress)
    kinds = {record.failure for record in result.records}
    assert 12 <= len(result.records) <= 12 + 8
    assert kinds <= {None, FailureKind.CUT_OFF}
    assert sum(record.ok for record in result.records) >= 12
