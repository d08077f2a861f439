"""Heads known again: whatever is taken for one means what the parser would find in it."""

from __future__ import annotations

import httptools
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.engine.known_head import KnownHead, known_head

FIELDS = {b"host": b"h", b"content-length": b"4", b"x-id": b"4"}
HEAD = b"POST /v1 HTTP/1.1\r\nHost: h\r\nContent-Length: %d\r\nX-Id: 4\r\n\r\n"
FIRST = HEAD % 4 + b"abcd"


def known(data: bytes = FIRST, fields: dict[bytes, bytes] = FIELDS) -> KnownHead:
    found = known_head(data, fields)
    assert found is not None
    return found


class Parsed:
    """What httptools finds in a request."""

    def __init__(self, data: bytes) -> None:
        self.fields: dict[bytes, bytes] = {}
        self.url = self.body = b""
        self.num_complete = 0
        self.parser = httptools.HttpRequestParser(self)
        self.parser.feed_data(data)

    def on_url(self, url: bytes) -> None:
        self.url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self.fields[name.lower()] = value

    def on_body(self, body: bytes) -> None:
        self.body += body

    def on_message_complete(self) -> None:
        self.num_complete += 1


@pytest.mark.parametrize("body", [b"", b"x", b"4" * 1000, b"\r\n\r\n", FIRST])
def test_another_length_with_as_much_body_is_known(body: bytes) -> None:
    assert known().body_in(HEAD % len(body) + body) == body


def test_the_fields_are_those_of_the_head_but_for_its_length() -> None:
    assert known().fields == {b"host": b"h", b"x-id": b"4"}


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(HEAD % 5 + b"abcd", id="body missing"),
        pytest.param(HEAD % 3 + b"abcd", id="more than the body"),
        pytest.param((HEAD % 4).replace(b": 4", b": 04", 1) + b"abcd", id="a zero before the length"),
        pytest.param((HEAD % 4).replace(b": 4", b": +4", 1) + b"abcd", id="a sign"),
        pytest.param((HEAD % 4).replace(b": 4", b": 4 ", 1) + b"abcd", id="a blank after the length"),
        pytest.param((HEAD % 4).replace(b": 4\r\n", b": 4\n", 1) + b"abcd", id="a bare line end"),
        pytest.param((HEAD % 4).replace(b"X-Id: 4", b"X-Id: 5") + b"abcd", id="another field"),
        pytest.param((HEAD % 4).replace(b"/v1", b"/v2") + b"abcd", id="another target"),
        pytest.param(FIRST[:20], id="half a head"),
        pytest.param(FIRST + FIRST, id="two requests"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_whatever_differs_is_left_to_the_parser(data: bytes) -> None:
    assert known().body_in(data) is None


@pytest.mark.parametrize(
    ("data", "fields"),
    [
        pytest.param(b"GET / HTTP/1.1\r\nHost: h\r\n\r\n", {b"host": b"h"}, id="no length"),
        pytest.param(FIRST + b"x", FIELDS, id="more than one message"),
        pytest.param(FIRST[:-1], FIELDS, id="not whole"),
        pytest.param((HEAD % 4).replace(b": 4", b": 04", 1) + b"abcd", FIELDS | {b"content-length": b"04"}, id="zeros"),
        pytest.param(b"POST / HTTP/1.1\r\nA: b\r\n\r\nabcd", FIELDS, id="a length from elsewhere"),
    ],
)
def test_no_head_is_kept_of_what_has_no_plain_length(data: bytes, fields: dict[bytes, bytes]) -> None:
    assert known_head(data, fields) is None


@given(st.binary(max_size=12), st.integers(0, len(HEAD)), st.binary(max_size=3), st.integers(0, 3))
def test_what_is_known_means_what_the_parser_finds(body: bytes, at: int, put_in: bytes, num_left_out: int) -> None:
    data = HEAD % len(body) + body
    data = data[:at] + put_in + data[at + num_left_out :]
    found = known().body_in(data)
    if found is not None:
        parsed = Parsed(data)
        assert (parsed.num_complete, parsed.url, parsed.body) == (1, b"/v1", found)
        assert parsed.fields == {**known().fields, b"content-length": b"%d" % len(found)}
