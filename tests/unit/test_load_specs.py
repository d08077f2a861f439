from __future__ import annotations

import contextlib
import re
from pathlib import Path

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.state import Task
from workbench.loadgen import (
    ClosedLoop,
    Constant,
    Diurnal,
    Embeddings,
    Fixed,
    Form,
    Gamma,
    Independent,
    LogNormal,
    Poisson,
    Profile,
    Replay,
    SpecError,
    Synthetic,
    Uniform,
    parse_arrival,
    parse_workload,
)
from workbench.loadgen.specs import parse_spec, shares

ARRIVALS = [
    ("closed:concurrency=8", ClosedLoop(8)),
    ("constant:rate=4", Constant(4.0)),
    ("poisson:rate=0.5,max_in_flight=7", Poisson(0.5, 7)),
    ("gamma:rate=4,cv=2", Gamma(4.0, 2.0)),
    ("gamma:rate=4,burstiness=0.25", Gamma(4.0, 2.0)),
    ("diurnal:mean=2,peak=4,period=3600", Diurnal(2.0, 4.0, 3600.0)),
    ("diurnal:mean=2,peak=3,start=0.5", Diurnal(2.0, 3.0, 86400.0, 0.5)),
    ("ramp:from=1,to=10,seconds=60", Profile(((0.0, 1.0), (60.0, 10.0)))),
    ("steps:rates=1/4,seconds=30", Profile(((0.0, 1.0), (30.0, 1.0), (30.0, 4.0), (60.0, 4.0)))),
]


@pytest.mark.parametrize(("text", "arrival"), ARRIVALS)
def test_arrivals(text, arrival):
    assert parse_arrival(text) == arrival


def test_a_traces_times_and_its_prompts_are_named_by_the_same_words():
    words = "trace:mooncake-conversation,scale=10,skip=3,limit=20,lengths=0.0625"
    replay, workload = parse_arrival(words), parse_workload(words)
    assert isinstance(replay, Replay)
    assert (len(replay.times_s), replay.times_s[0], replay.scale) == (20, 0.0, 10.0)
    assert len(workload.maker.trace.requests) == 20
    assert workload.maker.trace.block_tokens == 32


WORKLOADS = [
    ("completion:prompt=64,output=32", Synthetic(Independent(Fixed(64), Fixed(32)))),
    ("chat", Synthetic(Independent(Fixed(64), Fixed(32)), form=Form.CHAT)),
    (
        "sharedprefix:prefix=512,prompt=64,prefixes=4",
        Synthetic(Independent(Fixed(64), Fixed(32)), num_prefix_tokens=512, num_prefixes=4),
    ),
    (
        "sessions:turns=3,think=2,prompt=16-32,growth=8",
        Synthetic(Independent(Uniform(16, 32), Fixed(32)), num_turns=3, think_s=2.0, growth=Fixed(8)),
    ),
    ("agents", Synthetic(Independent(Fixed(512), Fixed(32)), num_turns=8, growth=Fixed(256))),
    ("tools:tools=2", Synthetic(Independent(Fixed(64), Fixed(32)), form=Form.CHAT, num_tools=2)),
    ("embed:prompt=lognormal/64/1/200", Embeddings(LogNormal(64.0, 1.0, 200))),
]


@pytest.mark.parametrize(("text", "maker"), WORKLOADS)
def test_workloads(text, maker):
    assert parse_workload(text).maker == maker


def test_tiers_and_adapters_are_shares():
    workload = parse_workload("completion:tiers=priority:1/default:3,adapters=base:1/french:1")
    assert workload.tiers == {"priority": 0.25, "default": 0.75}
    assert workload.adapters == {"base": 0.5, "french": 0.5}
    assert workload.task is Task.GENERATE
    assert parse_workload("embed").task is Task.EMBED


def test_lengths_of_a_trace_are_drawn_together():
    shapes = parse_workload("lengths:azure-code,limit=10").maker.shapes
    assert shapes.pairs[:2] == ((4808, 10), (3180, 8))
    assert len(shapes.pairs) == 10


WRONG_ARRIVALS = [
    ("poison:rate=4", "did you mean poisson"),
    ("poisson", r"lacks rate=; write it as in `poisson:rate="),
    ("poisson:rat=4", "no rat=; did you mean rate"),
    ("poisson:rate=four", "'four' is no number"),
    ("poisson:rate=nan", "not a number above 0"),
    ("poisson:rate=0", "not a number above 0"),
    ("poisson:4", r"'4' has no key; write KEY=4|lacks rate="),
    ("poisson:rate=4,rate=5", "twice"),
    ("poisson:rate=4,cv=2", "no cv=.*It takes: max_in_flight, rate"),
    ("closed:concurrency=1.5", "no whole number"),
    ("gamma:rate=4,cv=1,burstiness=1", "give one"),
    ("diurnal:mean=2,peak=6,period=60", "between that and 4"),
    ("steps:rates=1+2,seconds=3", "as in 1/2/4"),
    ("trace:nowhere.csv", "no trace file nowhere.csv.*azure-code"),
    ("trace", "lacks file"),
    ("trace:azure-code,skip=900", "has 500 requests, none from number 900"),
]


@pytest.mark.parametrize(("text", "why"), WRONG_ARRIVALS)
def test_a_wrong_arrival_says_what_is_right(text, why):
    with pytest.raises(SpecError, match=why):
        parse_arrival(text)


WRONG_WORKLOADS = [
    ("chats:prompt=3", "did you mean chat"),
    ("completion:prompt=0", "0 is less than 1"),
    ("completion:prompt=9-3", "write 3-9"),
    ("completion:prompt=a-b", "write 64, 16-256"),
    ("completion:prompt=lognormal/64", "MEAN/CV"),
    ("completion:prompt=lognormal/64/1/32", "below the mean"),
    ("completion:form=xml", "neither ids nor chat"),
    ("completion:tools=2", "form=chat"),
    ("completion:tiers=priority:0", "weight above 0"),
    ("completion:tiers=a:1/a:2", "twice"),
    ("completion:scale=3", "no scale="),
    ("trace:mooncake-conversation,lengths=0.0001", "have none left"),
    ("file:nowhere.jsonl", "no file nowhere.jsonl"),
    ("file", "lacks file"),
]


@pytest.mark.parametrize(("text", "why"), WRONG_WORKLOADS)
def test_a_wrong_workload_says_what_is_right(text, why):
    with pytest.raises(SpecError, match=why):
        parse_workload(text)


@given(st.text(max_size=40))
def test_any_text_is_parsed_or_refused(text):
    for words in (text, "poisson:" + text, "sharedprefix:" + text):
        for parse in (parse_arrival, parse_workload):
            with contextlib.suppress(SpecError):
                parse(words)


@given(st.dictionaries(st.text("abc", min_size=1), st.floats(0.01, 100), min_size=1))
def test_shares_add_up(weights):
    found = shares("/".join(f"{name}:{weight!r}" for name, weight in weights.items()))
    assert set(found) == set(weights)
    assert sum(found.values()) == pytest.approx(1.0)


def test_a_spec_keeps_equal_signs_and_colons_of_values():
    spec = parse_spec("file:a:b,output=x=y", ["file"])
    assert (spec.subject, spec.fields) == ("a:b", {"output": "x=y"})


WRONG_ROWS = [
    ("{broken\n", "prompts.jsonl:1: no JSON"),
    ("[1]\n", "1: a line is an object, not list"),
    ({"promt": "a"}, "1: it has neither messages, prompt nor input"),
    ({"prompt": "a", "messages": [{"role": "user"}]}, "both messages and prompt"),
    ({"prompt": ""}, "a text that is not empty"),
    ({"messages": [{"content": "x"}]}, "objects with a role"),
    ({"prompt": "a", "max_tokens": 0}, "max_tokens is 0; it must be a whole number"),
    ({"prompt": "a", "n": 2}, "one answer a request"),
    ({"prompt": "a", "temprature": 1}, "did you mean temperature"),
    ({"prompt": "a", "service_tier": 3}, "it must be a text"),
    ({"prompt": "a", "session_id": "a\r\nx: y"}, "printable ASCII"),
]


class TestFiles:
    def rows(self, tmp_path, *rows, name="prompts.jsonl", more=""):
        path = tmp_path / name
        path.write_text("".join(row if isinstance(row, str) else orjson.dumps(row).decode() + "\n" for row in rows))
        return parse_workload(f"file:{path}{more}")

    def test_chats_prompts_and_batch_lines(self, tmp_path):
        chat = {"messages": [{"role": "user", "content": "hi there"}], "max_tokens": 7, "temperature": 0.5}
        batch = {"custom_id": "1", "url": "/v1/chat/completions", "body": {**chat, "model": "x", "stream": True}}
        text = {"prompt": "once upon", "service_tier": "flex", "model": "x"}
        prompts = list(self.rows(tmp_path, chat, batch, text, more=",output=9").prompts(None, seed=1))
        assert [prompt.num_output_tokens for prompt in prompts] == [7, 7, 9]
        assert [prompt.text for prompt in prompts] == [None, None, "once upon"]
        assert prompts[0].messages == prompts[1].messages == (chat["messages"][0],)
        assert prompts[1].extra == {"temperature": 0.5}
        assert prompts[2].tier == "flex"
        assert all(prompt.is_estimated and prompt.may_stop for prompt in prompts)

    def test_lines_of_text_limits_and_repeats(self, tmp_path):
        workload = self.rows(
            tmp_path, "one\n\n", "two\n", "one\n", name="lines.txt", more=",repeat=yes,exact=yes,limit=3"
        )
        prompts = workload.prompts(None, seed=1)
        found = [next(prompts) for _ in range(5)]
        assert [prompt.text for prompt in found] == ["one", "two", "one", "one", "two"]
        assert not found[0].may_stop
        assert workload.maker.num_repeated == 1

    def test_sessions_keep_their_turns(self, tmp_path):
        rows = [{"prompt": text, "session_id": who} for text, who in (("a", "x"), ("b", "y"), ("c", "x"))]
        prompts = list(self.rows(tmp_path, *rows).prompts(None, seed=1))
        assert [(prompt.session_id, prompt.turn) for prompt in prompts] == [("x-0", 0), ("y-0", 0), ("x-0", 1)]

    def test_inputs_are_embeddings(self, tmp_path):
        workload = self.rows(tmp_path, {"input": "a text"}, {"input": [1, 2, 3]})
        assert workload.task is Task.EMBED
        assert [(p.text, p.token_ids, p.num_output_tokens) for p in workload.prompts(None, seed=1)] == [
            ("a text", None, 0),
            (None, (1, 2, 3), 0),
        ]

    @pytest.mark.parametrize(("row", "why"), WRONG_ROWS)
    def test_a_line_that_cannot_be_sent_is_named(self, tmp_path, row, why):
        with pytest.raises(SpecError, match=why):
            self.rows(tmp_path, row)

    def test_a_run_has_one_task_and_something_to_send(self, tmp_path):
        with pytest.raises(SpecError, match="mixes embeddings"):
            self.rows(tmp_path, {"prompt": "a"}, {"input": "b"})
        with pytest.raises(SpecError, match="holds no prompt"):
            self.rows(tmp_path)


def test_every_short_form_in_the_docs_is_right():
    page = (Path(__file__).parents[2] / "docs" / "users" / "loads.md").read_text("utf-8")
    arrivals, workloads = (
        part.split("\n## ")[0] for part in (page.split("## Arrivals")[1], page.split("## Workloads")[1])
    )
    for part, parse, number in ((arrivals, parse_arrival, 8), (workloads, parse_workload, 9)):
        rows = re.findall(r"^\| `([^`]+)`", part, re.MULTILINE)
        assert len(rows) == number
        for text in rows:
            parse(text)
    assert parse_arrival("diurnal:mean=2,peak=4,period=3600,start=0.5").start_frac == 0.5
