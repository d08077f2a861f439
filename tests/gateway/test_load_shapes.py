"""Schedules, sessions, tiers and the user's own prompts against the fake engine, whose log is the truth."""

from __future__ import annotations

import itertools
from collections import defaultdict

import pytest

from serving.engine.client import EngineClient
from serving.engine.fake import FakeEngine, FakeSettings, ServerFaults
from tests.unit.vocabularies import write_tokenizer
from workbench.loadgen import (
    ClosedLoop,
    Constant,
    Fixed,
    Form,
    Independent,
    Poisson,
    Prompt,
    Replay,
    Slo,
    Synthetic,
    Target,
    TargetKind,
    UserWorkload,
    Vocabulary,
    WorkloadError,
    ask_chat_frame,
    run_load,
    summarize,
)
from workbench.loadgen.user_rows import check_row


@pytest.fixture
async def engine():
    async with FakeEngine(FakeSettings(ttft_ms=5.0, itl_ms=1.0)) as fake:
        yield fake


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    write_tokenizer(folder)
    return Vocabulary.load(folder)


async def load(engine, prompts, arrival, *, num_requests=100, max_duration_s=20.0, kind=TargetKind.ENGINE, **options):
    target = Target(engine.url, "fake-model", kind=kind)
    options.setdefault("calibrates", False)
    return await run_load(target, prompts, arrival, num_requests=num_requests, max_duration_s=max_duration_s, **options)


def sessions(vocabulary, *, num_turns=3, think_s=0.02, form=Form.IDS, frame=None):
    shapes = Independent(Fixed(24), Fixed(4))
    workload = Synthetic(shapes, form=form, num_turns=num_turns, think_s=think_s, growth=Fixed(10))
    return workload.prompts(vocabulary, seed=1, frame=frame)


@pytest.mark.parametrize("arrival", [ClosedLoop(3), Constant(50.0), Poisson(100.0, max_in_flight=2)], ids=repr)
async def test_a_turn_is_sent_when_the_one_before_has_ended_and_the_user_has_thought(engine, vocabulary, arrival):
    result = await load(engine, sessions(vocabulary), arrival, num_requests=18)
    assert [record.index for record in result.records] == list(range(18))
    turns = defaultdict(list)
    for record in result.records:
        assert record.ok, record.failure_detail
        turns[record.session_id].append(record)
    assert len(turns) == 6
    for records in turns.values():
        assert [record.turn for record in records] == [0, 1, 2]
        for earlier, later in itertools.pairwise(records):
            assert 0.02 <= later.intended_at_s - earlier.stream_end_at_s < 0.1
            assert later.sent_at_s >= later.intended_at_s - 0.001
            assert later.num_prompt_tokens == earlier.num_prompt_tokens + 4 + 10
            assert later.num_cached_tokens >= 16  # what the turn before had sent
    most = 3 if isinstance(arrival, ClosedLoop) else arrival.max_in_flight
    assert most_in_flight(result.records) <= most
    told = {log.id: log.headers[b"x-session-id"].decode() for log in engine.log.ended}
    assert told == {record.request_id: f"load-{record.session_id}" for record in result.records}


def most_in_flight(records):
    sends = [(record.sent_at_s, 1) for record in records]
    edges = sorted(sends + [(record.stream_end_at_s, -1) for record in records])
    return max(itertools.accumulate(step for _, step in edges))


async def test_chats_of_several_turns_have_their_length_by_the_servers_own_frame(engine, vocabulary):
    need = Synthetic(Independent(Fixed(24), Fixed(4)), form=Form.CHAT, num_turns=3).frame_need
    async with EngineClient(engine.url) as client:
        frame = await ask_chat_frame(client, "fake-model", vocabulary, need)
    prompts = sessions(vocabulary, form=Form.CHAT, frame=frame)
    result = await load(engine, prompts, ClosedLoop(2), num_requests=6)
    assert [record.failure_detail for record in result.records] == [None] * 6
    assert {record.usage_prompt_tokens for record in result.records} == {24, 38, 52}


async def test_a_replay_sends_at_the_traces_times(engine, vocabulary):
    replay = Replay((0.0, 0.3, 0.3, 1.0), scale=5.0)
    result = await load(engine, sessions(vocabulary, num_turns=1), replay)
    assert [record.intended_at_s for record in result.records] == pytest.approx([0.0, 0.06, 0.06, 0.2])
    assert result.client_error.num_unsent == 0


async def test_what_came_due_and_was_never_sent_makes_the_run_invalid(engine, vocabulary):
    engine.faults = ServerFaults(ttft_ms=300.0)
    prompts = sessions(vocabulary, num_turns=1)
    result = await load(engine, prompts, Constant(100.0, max_in_flight=2), num_requests=50, max_duration_s=0.2)
    assert len(result.records) == 2
    assert result.client_error.num_unsent == 18
    summary = summarize(result.records, slo=Slo(9.0, 9.0), num_units=1, num_warm_up=0, client_error=result.client_error)
    assert "18 requests came due and were never sent" in summary.invalid
    of_the_client = {name for name in summary.metrics if name.startswith("client_")}
    assert set(summary.metrics) - of_the_client == {"failed_frac", "send_lag_s/p99"}


async def test_service_time_stands_beside_the_time_from_the_schedule(engine, vocabulary):
    engine.faults = ServerFaults(ttft_ms=30.0)
    result = await load(engine, sessions(vocabulary, num_turns=1), Constant(200.0, max_in_flight=1), num_requests=5)
    last = result.records[-1]
    assert last.e2e_s - last.service_e2e_s == pytest.approx(last.send_lag_s)
    assert last.send_lag_s > 0.05


def own(*rows, **options):
    return UserWorkload(tuple(check_row(f"line {n}", row) for n, row in enumerate(rows, start=1)), **options)


async def test_the_servers_count_replaces_an_estimate_and_repeats_are_noted(engine):
    rows = [{"prompt": "a b c", "max_tokens": 4}, {"messages": [{"role": "user", "content": "a b"}]}]
    workload = own(*rows, num_output_tokens=5, repeats=True)
    result = await load(engine, workload.prompts(None, seed=1), ClosedLoop(1), num_requests=4)
    assert [record.failure_detail for record in result.records] == [None] * 4
    assert [record.num_prompt_tokens for record in result.records] == [3, 2, 3, 2]
    assert not any(record.is_prompt_estimated for record in result.records)
    assert result.num_repeated_prompts == 2
    assert "2 of 4 prompts were sent in this run before" in result.notes[0]
    assert [log.body["ignore_eos"] for log in engine.log.ended] == [False] * 4


async def test_gateways_are_asked_by_service_tier_and_engines_by_priority(engine):
    prompts = [
        Prompt(2, 2, text=f"a {tier}", is_estimated=True, tier=tier, adapter=adapter)
        for tier, adapter in (("priority", None), ("batch", "french"))
    ]
    await load(engine, prompts, ClosedLoop(1))
    await load(engine, prompts, ClosedLoop(1), kind=TargetKind.GATEWAY)
    asked = [{name: log.body.get(name) for name in ("model", "priority", "service_tier")} for log in engine.log.ended]
    assert asked[0] == {"model": "fake-model", "priority": -1, "service_tier": None}
    assert asked[2] == {"model": "fake-model", "priority": None, "service_tier": "priority"}
    with pytest.raises(WorkloadError, match="known are priority"):
        await load(engine, [Prompt(1, 1, text="a", tier="gold")], ClosedLoop(1))
