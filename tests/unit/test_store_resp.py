"""The store's protocol: commands as bytes, replies however the socket cuts them."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.store.pipelined import Script
from serving.store.resp import BrokenReply, Reply, ReplyParser, StoreRefused, encode

REPLIES = st.recursive(
    st.one_of(st.none(), st.integers(-(2**63), 2**63 - 1), st.binary(max_size=40)),
    lambda inner: st.lists(inner, max_size=4),
    max_leaves=12,
)


def as_sent(reply: Reply) -> bytes:
    if reply is None:
        return b"$-1\r\n"
    if isinstance(reply, int):
        return b":%d\r\n" % reply
    if isinstance(reply, list):
        return b"*%d\r\n" % len(reply) + b"".join(as_sent(item) for item in reply)
    assert isinstance(reply, bytes)
    return b"$%d\r\n%b\r\n" % (len(reply), reply)


def pieces(data: bytes, cuts: list[int]) -> Iterator[bytes]:
    edges = sorted({0, len(data), *(cut % (len(data) + 1) for cut in cuts)})
    for begin, end in pairwise(edges):
        yield data[begin:end]


@given(st.lists(REPLIES, max_size=6), st.lists(st.integers(0, 10_000), max_size=8))
def test_replies_come_whole_wherever_the_stream_is_cut(replies: list[Reply], cuts: list[int]):
    parser = ReplyParser()
    data = b"".join(as_sent(reply) for reply in replies)
    assert [reply for piece in pieces(data, cuts) for reply in parser.feed(piece)] == replies


def test_statuses_errors_and_nothing():
    status, error, nothing = ReplyParser().feed(b"+OK\r\n-WRONGTYPE Operation against a key\r\n*-1\r\n")
    assert status == b"OK"
    assert isinstance(error, StoreRefused)
    assert error.reason == "WRONGTYPE"
    assert nothing is None


@pytest.mark.parametrize("data", [b"HTTP/1.1 400\r\n", b"$x\r\n", b":\r\n", b"*1\r\n" * 40, b"\r\n"])
def test_what_is_no_reply_ends_the_stream(data: bytes):
    with pytest.raises(BrokenReply):
        ReplyParser().feed(data)


def test_commands_are_arrays_of_bulk_strings():
    assert encode(("SET", b"k\r\n", "é", 7, 0.5)) == (
        b"*5\r\n$3\r\nSET\r\n$3\r\nk\r\n\r\n$2\r\n\xc3\xa9\r\n$1\r\n7\r\n$3\r\n0.5\r\n"
    )


def test_the_kept_head_of_a_call_and_its_last_argument_are_the_whole_call():
    script = Script("return 1")
    assert script.head(["k"], ["a"], 1) + b"$1\r\nb\r\n" == script.command(["k"], ["a", "b"])
