"""The usage event on the wire: a CloudEvents envelope, the contract's fields, and a reader that says what is wrong."""

from __future__ import annotations

from dataclasses import replace

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.errors import ClientGone, DeadlineExceeded, UpstreamError
from serving.core.state import Tier
from serving.metering.events import SCHEMA, BrokenEvent, UsageEvent, Waste, decode, encode, retried_id, waste_of
from tests.unit.usage_examples import an_event

CONTRACT = {
    *("id", "tenant", "request_id", "model", "version", "adapter", "pool", "replica", "tier"),
    *("num_prompt_tokens", "num_cached_tokens", "num_output_tokens", "finish_reason", "usd", "cost_table_run_id"),
    *("status", "replayed", "batch_id", "started_at", "ended_at"),
}


def test_an_event_is_a_cloud_event_whose_key_is_the_tenant() -> None:
    line = encode(an_event(tenant="acme", ended_at_s=1_700_000_000.25), "/gateway/0")
    assert line.endswith(b"\n")
    assert line.count(b"\n") == 1
    envelope = orjson.loads(line)
    assert {name: value for name, value in envelope.items() if name != "data"} == {
        "specversion": "1.0",
        "id": envelope["data"]["id"],
        "source": "/gateway/0",
        "type": "workbench.usage",
        "time": "2023-11-14T22:13:20.250000Z",
        "subject": "acme",
        "partitionkey": "acme",
        "datacontenttype": "application/json",
        "dataschema": SCHEMA,
    }
    assert set(envelope["data"]) == CONTRACT | {"key_id", "waste", "exact"}


@given(
    tokens=st.lists(st.integers(0, 2**40), min_size=3, max_size=3),
    usd=st.none() | st.floats(0, 1e6),
    tier=st.sampled_from(Tier),
    waste=st.none() | st.sampled_from(Waste),
    request_id=st.text(max_size=128).filter(lambda text: text.isprintable()),
    milliseconds=st.integers(0, 4_000_000_000_000),
)
def test_what_is_written_is_read(
    tokens: list[int], usd: float | None, tier: Tier, waste: Waste | None, request_id: str, milliseconds: int
) -> None:
    prompt, cached, output = tokens
    event = an_event(
        num_prompt_tokens=prompt,
        num_cached_tokens=cached,
        num_output_tokens=output,
        usd=usd,
        tier=tier,
        waste=waste,
        request_id=request_id,
        started_at_s=milliseconds / 1000,
    )
    read = decode(encode(event, "/gateway/0"))
    assert replace(read, started_at_s=0.0) == replace(event, started_at_s=0.0)
    assert read.started_at_s == pytest.approx(event.started_at_s, abs=1e-6)


def test_a_field_of_a_newer_writer_is_left_out() -> None:
    envelope = orjson.loads(encode(an_event(), "/gateway/0"))
    envelope["data"]["colour"] = "green"
    assert decode(orjson.dumps(envelope)) == an_event()


@pytest.mark.parametrize(
    ("line", "says"),
    [
        (b"\0\0\0\n", "no usage event"),
        (b"[]\n", "no usage event"),
        (b"{}\n", "lacks 'dataschema'"),
        (b'{"dataschema":"urn:workbench:usage:2","data":{}}\n', "is not 'urn:workbench:usage:1'"),
        (b'{"dataschema":"urn:workbench:usage:1","data":{"id":"a"}}\n', "lacks 'tenant'"),
    ],
)
def test_a_line_that_is_no_event_says_why(line: bytes, says: str) -> None:
    with pytest.raises(BrokenEvent, match=says):
        decode(line)


@pytest.mark.parametrize("change", [{"num_prompt_tokens": "many"}, {"started_at": "yesterday"}, {"waste": "lost"}])
def test_a_field_of_a_wrong_kind_is_broken(change: dict[str, object]) -> None:
    envelope = orjson.loads(encode(an_event(), "/gateway/0"))
    envelope["data"] |= change
    with pytest.raises(BrokenEvent):
        decode(orjson.dumps(envelope))


def test_waste_is_classed_by_who_ended_the_request() -> None:
    assert waste_of(None) is None
    assert waste_of(ClientGone("left")) is Waste.ABANDONED
    assert waste_of(DeadlineExceeded("too long")) is Waste.ABANDONED
    assert waste_of(UpstreamError("died")) is Waste.FAILED


def test_the_waste_of_an_attempt_has_an_id_of_its_own() -> None:
    event: UsageEvent = an_event(id="abc")
    assert len({event.id, retried_id(event.id, 1), retried_id(event.id, 2)}) == 3
