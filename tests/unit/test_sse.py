"""Splitting server-sent events, whatever the pieces in which they come."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.errors import UpstreamError
from serving.engine.sse import MAX_EVENT_BYTES, EventSplitter, payload

LINES = st.sampled_from([b"data: {}", b'data:{"a": 1}', b": ping", b"event: x", b"data: [DONE]", b"id: 7", b"data"])
EVENTS = st.tuples(st.lists(LINES, min_size=1, max_size=3), st.sampled_from([b"\n", b"\r\n"])).map(
    lambda event: event[1].join(event[0]) + event[1] * 2
)


@given(events=st.lists(EVENTS, max_size=6), cuts=st.lists(st.integers(0, 200), max_size=10))
def test_events_come_out_as_they_went_in_however_cut(events: list[bytes], cuts: list[int]) -> None:
    stream = b"".join(events)
    bounds = [0, *sorted(min(cut, len(stream)) for cut in cuts), len(stream)]
    splitter = EventSplitter()
    out = []
    for begin, end in pairwise(bounds):
        out += splitter.feed(stream[begin:end])
    assert out == events
    assert splitter.rest == b""


def test_an_incomplete_event_is_kept_back_and_shown() -> None:
    splitter = EventSplitter()
    assert splitter.feed(b"data: a\n\ndata: b\n") == [b"data: a\n\n"]
    assert splitter.rest == b"data: b\n"
    assert splitter.feed(b"\n") == [b"data: b\n\n"]


def test_an_endless_event_is_refused() -> None:
    splitter = EventSplitter()
    with pytest.raises(UpstreamError, match="event of more than"):
        splitter.feed(b"x" * (MAX_EVENT_BYTES + 1))


@pytest.mark.parametrize(
    ("event", "expected"),
    [
        (b"data: {}\n\n", b"{}"),
        (b"data:{}\n\n", b"{}"),
        (b"data: {}\r\n\r\n", b"{}"),
        (b"data:  two spaces\n\n", b" two spaces"),
        (b"data: a\ndata: b\n\n", b"a\nb"),
        (b"event: error\ndata: a\nid: 3\n\n", b"a"),
        (b"data\n\n", b""),
        (b"data: \n\n", b""),
        (b": comment\n\n", None),
        (b"\n\n", None),
        (b"database: x\n\n", None),
    ],
)
def test_payload(event: bytes, expected: bytes | None) -> None:
    assert payload(event) == expected
