from __future__ import annotations

import gzip
import random
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.state import Task
from serving.metering.events import UsageEvent, Waste, encode
from tests.unit.vocabularies import write_tokenizer
from workbench.loadgen import (
    ChatFrame,
    FailureKind,
    Form,
    RequestRecord,
    Trace,
    TracedRequest,
    TraceError,
    TraceWorkload,
    Vocabulary,
    WorkloadError,
    events_trace,
    read_trace,
    trace_prompts,
    write_parquet,
)
from workbench.loadgen.trace_files import SAMPLES
from workbench.loadgen.vocabulary import FIRST_BLOCK_TOKENS

AZURE = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    folder = tmp_path_factory.mktemp("weights")
    write_tokenizer(folder, special="<bos> $A")
    return Vocabulary.load(folder)


def write(path: Path, *lines: object, head: str = "") -> Path:
    texts = [line if isinstance(line, str) else orjson.dumps(line).decode() for line in lines]
    data = (head + "\n".join(texts) + "\n").encode()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)
    return path


def mooncake(at_ms: object = 0, length: object = 1000, output: object = 5, blocks: object = (1, 2)) -> dict:
    return {"timestamp": at_ms, "input_length": length, "output_length": output, "hash_ids": blocks}


@pytest.mark.parametrize("name", SAMPLES)
def test_samples_come_along(name):
    trace = read_trace(name)
    assert len(trace.requests) + sum(trace.skipped.values()) in (300, 500)
    assert trace.requests[0].at_s == 0.0
    assert trace.length_s > 10
    assert (trace.shared_frac > 0.01) == (name in ("mooncake-conversation", "agent-turns"))


def test_azure_times_keep_their_seven_digits(tmp_path):
    rows = ["2023-11-16 18:17:03.9799600,4808,10", "2023-11-16 18:17:04.0319601,3180,8"]
    trace = read_trace(write(tmp_path / "t.csv.gz", *rows, head=AZURE))
    assert [r.num_prompt_tokens for r in trace.requests] == [4808, 3180]
    assert trace.requests[1].at_s == pytest.approx(0.0520001, abs=1e-6)


def test_mooncake_blocks(tmp_path):
    trace = read_trace(write(tmp_path / "t.jsonl", mooncake(500, 1000, 5, [7, 8]), mooncake(2500, 600, 6, [7, 9])))
    assert trace.block_tokens == 512
    assert [(r.at_s, r.block_ids) for r in trace.requests] == [(0.0, (7, 8)), (2.0, (7, 9))]
    assert trace.shared_frac == pytest.approx(512 / 1600)


BROKEN = [
    ("t.csv", "", ["TIMESTAMP,ContextTokens"], "t.csv:1: no column GeneratedTokens"),
    ("t.csv", AZURE, ["2023-11-16 18:17:03,3"], "t.csv:2: 2 values in 3 columns"),
    ("t.csv", AZURE, ["2023-11-16 18:17:03,3,4", "yesterday,3,4"], "t.csv:3: TIMESTAMP is 'yesterday'"),
    ("t.csv", AZURE, ["2023-11-16 18:17:03,-3,4"], "t.csv:2: ContextTokens is '-3'"),
    ("t.csv", AZURE, ["2023-11-16 18:17:03,3,0"], "t.csv:2: GeneratedTokens is 0; it must be a whole number"),
    ("t.csv", AZURE, [], "holds no request"),
    ("t.jsonl", "", [], "holds no request"),
    ("t.jsonl", "", [mooncake(), "{"], "t.jsonl:2: no JSON"),
    ("t.jsonl", "", [[1]], "t.jsonl:1: a line is an object, not list"),
    ("t.jsonl", "", [{"a": 1}], "t.jsonl:1: neither a request"),
    ("t.jsonl", "", [mooncake(), mooncake(at_ms="x")], "t.jsonl:2: timestamp is 'x'"),
    ("t.jsonl", "", [mooncake(length=1.5)], "t.jsonl:1: input_length is 1.5"),
    ("t.jsonl", "", [mooncake(output=None)], "t.jsonl:1: output_length is None"),
    ("t.jsonl", "", [mooncake(blocks=[1, 2, 3])], "t.jsonl:1: hash_ids has 3 blocks"),
    ("t.jsonl", "", [mooncake(blocks="ab")], "t.jsonl:1: hash_ids must be a list"),
    ("t.jsonl", "", [{"dataschema": "x"}], "t.jsonl:1: it lacks 'data'"),
    ("t.parquet", "", ["x"], "t.parquet holds no request records"),
    ("t.xml", "", ["x"], "not .xml"),
]


@pytest.mark.parametrize(("name", "head", "lines", "why"), BROKEN)
def test_a_broken_trace_names_line_and_field(tmp_path, name, head, lines, why):
    with pytest.raises(TraceError, match=why):
        read_trace(write(tmp_path / name, *lines, head=head))


def test_a_file_that_is_cut_off_is_no_surprise(tmp_path):
    path = write(tmp_path / "t.jsonl.gz", *[mooncake() for _ in range(500)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(path)


def event(number: int, **changes: object) -> UsageEvent:
    own = UsageEvent(
        id=f"e{number}", tenant="t", request_id="r", key_id="k", model="m", version="1", adapter=None, pool="p",
        replica="r1", tier="batch", num_prompt_tokens=100, num_cached_tokens=0, num_output_tokens=9,
        finish_reason="stop", usd=None, cost_table_run_id=None, status=200, started_at_s=1e9 + number,
        ended_at_s=1e9 + number + 1,
    )  # fmt: skip
    return replace(own, **changes)


def test_our_own_usage_events_become_a_trace(tmp_path):
    events = [
        event(0),
        event(1, num_cached_tokens=48, tenant="u"),
        event(2, num_cached_tokens=64, tenant="u"),
        event(2, num_cached_tokens=64, tenant="u"),
        event(3, waste=Waste.RETRIED),
        event(4, replayed=True, num_prompt_tokens=0),
        event(5, status=429, num_prompt_tokens=0, num_output_tokens=0),
        event(6, waste=Waste.ABANDONED),
    ]
    path = tmp_path / "spool.jsonl"
    path.write_bytes(b"".join(encode(own, "/gateway/0") for own in events))
    trace = read_trace(path)
    assert [r.at_s for r in trace.requests] == [0.0, 1.0, 2.0]
    assert {r.tier for r in trace.requests} == {"batch"}
    assert trace.requests[2].block_ids[:3] == trace.requests[1].block_ids
    assert sum(trace.skipped.values()) == 4
    assert trace.shared_frac == pytest.approx(48 / 300)
    with pytest.raises(TraceError, match="holds no request; left out: 1 replayed"):
        events_trace("none", [events[5]])


def test_request_records_become_a_trace(tmp_path):
    record = RequestRecord("r", 0, Task.GENERATE, 40, 8, 3.0, 3.1, num_output_tokens=7, num_cached_tokens=32)
    failed = replace(record, index=1, failure=FailureKind.LOST)
    later = replace(record, index=2, intended_at_s=4.5, tier="flex", adapter="french")
    write_parquet([record, failed, later], tmp_path / "r.parquet")
    trace = read_trace(tmp_path / "r.parquet")
    assert [(r.at_s, r.num_prompt_tokens, r.num_output_tokens) for r in trace.requests] == [(0.0, 40, 7), (1.5, 40, 7)]
    assert (trace.requests[1].tier, trace.requests[1].adapter) == ("flex", "french")
    assert not set(trace.requests[0].block_ids) & set(trace.requests[1].block_ids)  # another adapter, another cache
    assert trace.skipped == {"failed": 1}


@st.composite
def traces(draw):
    block = draw(st.integers(1, 40))
    requests = []
    for number in range(draw(st.integers(1, 12))):
        blocks = tuple(draw(st.lists(st.integers(0, 3), max_size=4)))
        least = max(2, (len(blocks) - 1) * block + 1)
        requests.append(TracedRequest(float(number), draw(st.integers(least, least + 60)), 3, blocks))
    return Trace("drawn", tuple(requests), block)


@settings(max_examples=60, deadline=None)
@given(trace=traces(), seed=st.integers(0, 99))
def test_prompts_have_the_traces_lengths_and_equal_blocks_equal_text(vocabulary, trace, seed):
    prompts = list(trace_prompts(trace, vocabulary, seed=seed))
    assert prompts == list(trace_prompts(trace, vocabulary, seed=seed))
    texts: dict[int, set[tuple[int, ...]]] = defaultdict(set)
    own: set[tuple[int, ...]] = set()
    for request, prompt in zip(trace.requests, prompts, strict=True):
        assert len(prompt.token_ids) == prompt.num_prompt_tokens == request.num_prompt_tokens
        assert prompt.token_ids[: len(vocabulary.prefix)] == vocabulary.prefix
        words = prompt.token_ids[len(vocabulary.prefix) :]
        size = trace.block_tokens
        for place, block_id in enumerate(request.block_ids):
            block = words[place * size : (place + 1) * size]
            if len(block) == size:
                texts[block_id].add(block)
        rest = words[len(request.block_ids) * size :]
        if len(rest) >= FIRST_BLOCK_TOKENS:
            assert rest[:FIRST_BLOCK_TOKENS] not in own
            own.add(rest[:FIRST_BLOCK_TOKENS])
    assert all(len(found) == 1 for found in texts.values())


@settings(max_examples=30)
@given(traces(), st.floats(0.05, 1.5))
def test_a_shortened_trace_shares_as_much(trace, factor):
    try:
        shorter = trace.shortened(factor)
    except TraceError:
        assert round(trace.block_tokens * factor) < 1
        return
    assert all(r.num_prompt_tokens >= 1 and r.num_output_tokens >= 1 for r in shorter.requests)
    assert [r.block_ids for r in shorter.requests] == [r.block_ids for r in trace.requests]
    if any(r.block_ids for r in trace.requests):
        for before, after in zip(trace.requests, shorter.requests, strict=True):
            blocks = before.num_prompt_tokens / trace.block_tokens
            assert after.num_prompt_tokens == pytest.approx(blocks * shorter.block_tokens, abs=1)


def test_a_public_trace_is_reproduced_token_by_token(vocabulary):
    trace = read_trace("mooncake-conversation").part(0, 60).shortened(1 / 16)
    prompts = list(trace_prompts(trace, vocabulary, seed=random.Random(1).randrange(99)))
    assert sum(len(p.token_ids) for p in prompts) == sum(r.num_prompt_tokens for r in trace.requests)
    shared = [p.token_ids[: 1 + trace.block_tokens] for p in prompts if len(p.token_ids) > trace.block_tokens]
    assert len(set(shared)) < len(shared) / 10  # nearly all of that trace begin with its block 0


def test_a_chat_says_its_own_length(vocabulary):
    trace = read_trace("azure-code").part(0, 20).shortened(1 / 8)
    prompts = list(TraceWorkload(trace, Form.CHAT).prompts(vocabulary, seed=1, frame=ChatFrame(9)))
    for prompt, request in zip(prompts, trace.requests, strict=True):
        assert prompt.num_prompt_tokens == 9 + vocabulary.count(prompt.messages[0]["content"])
        assert prompt.num_prompt_tokens == pytest.approx(max(10, request.num_prompt_tokens), abs=2)
    with pytest.raises(WorkloadError, match="ask_chat_frame"):
        next(TraceWorkload(trace, Form.CHAT).prompts(vocabulary, seed=1))


def test_a_prompt_has_at_least_a_word(vocabulary):
    prompt = next(trace_prompts(Trace("t", (TracedRequest(0.0, 1, 1),)), vocabulary, seed=1))
    assert (prompt.num_prompt_tokens, prompt.token_ids[0]) == (2, 1)


AGENTS = "agent,session,turn,t_rel_s,input_chars,output_chars,common_prefix_chars_with_prev_turn\n"


def test_turns_of_agents_share_the_start_of_the_turn_before(tmp_path):
    path = tmp_path / "agents.csv"
    rows = ["a,s1,0,0.0,400,40,0", "a,s1,1,-1.5,800,20,400", "a,s1,2,2.0,0,9,0", "a,s2,0,0.5,80,8,0"]
    path.write_text(AGENTS + "\n".join(rows) + "\n")
    second, first, other = read_trace(path).requests
    assert [r.at_s for r in (second, first, other)] == [0.0, 1.5, 2.0]
    assert (first.num_prompt_tokens, first.num_output_tokens, len(first.block_ids)) == (100, 10, 6)
    assert (second.num_prompt_tokens, second.block_ids[:6], len(second.block_ids)) == (200, first.block_ids, 12)
    assert not set(other.block_ids) & set(second.block_ids)
    assert read_trace(path).skipped == {"turns without a prompt or an answer": 1}
    path.write_text(AGENTS + "a,s1,0,0.0,many,40,0\n")
    with pytest.raises(TraceError, match=r":2: input_chars is 'many'"):
        read_trace(path)
