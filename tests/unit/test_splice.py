"""Tokens that go past the parser: whatever the engine's socket gives at a time, the client gets the same events."""

from __future__ import annotations

import asyncio
import itertools
import socket
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.state import RequestView, Task
from serving.engine.connection import Connection
from serving.gateway.relay import Answer, open_answer
from serving.gateway.request import Call, Endpoint
from serving.gateway.splice import MAX_LESSONS, TokenSplice

RESPONSE = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
DONE = b"data: [DONE]\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


def event(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return b"data: " + orjson.dumps({"id": "c-1", "choices": choices, **more}) + b"\n\n"


def token(text: str, *, field: str = "content", finish: str | None = None) -> bytes:
    return event([{"index": 0, "delta": {field: text}, "finish_reason": finish}])


def splice(first: bytes) -> tuple[TokenSplice, list[bytes]]:
    sent: list[bytes] = []
    found = TokenSplice(sent.append)
    found.learn(first)
    return found, sent


@pytest.mark.parametrize("text", ["b", "more words", "é", "\\", "\n\n", "[DONE]"])
def test_a_token_in_known_bytes_is_sent_as_it_came(text: str) -> None:
    found, sent = splice(token("a"))
    assert found.take(chunk(token(text)))
    assert (sent, found.num_tokens) == ([chunk(token(text))], 1)


def test_tokens_that_came_together_are_sent_together() -> None:
    found, sent = splice(token("a"))
    data = b"".join(chunk(token(text)) for text in ("b", "longer than that", "\\n"))
    assert found.take(data)
    assert (sent, found.num_tokens) == ([data], 3)


@pytest.mark.parametrize(
    "data",
    [
        pytest.param(chunk(token("b", finish="stop")), id="the end"),
        pytest.param(chunk(token("")), id="no token"),
        pytest.param(chunk(token('say "b"')), id="quotes"),
        pytest.param(chunk(token("b", field="reasoning")), id="another field"),
        pytest.param(chunk(token("b")) + chunk(token("c", finish="stop")), id="a token and the end"),
        pytest.param(chunk(token("b")) + chunk(token('say "c"')), id="a token and quotes"),
        pytest.param(chunk(token("b")) + chunk(token("")), id="a token and none"),
        pytest.param(chunk(token("b")) + chunk(token("cc")).replace(b"cc", b"c"), id="the second of a wrong size"),
        pytest.param(chunk(token("b")) + chunk(token("c"))[:-3], id="the second not whole"),
        pytest.param(chunk(token("b") + token("c")), id="two events"),
        pytest.param(chunk(token("b"))[1:], id="no size"),
        pytest.param(chunk(token("b")).replace(b"\r\n", b";x\r\n", 1), id="an extension"),
        pytest.param(chunk(token("b"))[:-1], id="not whole"),
        pytest.param(b"0" + chunk(token("b")), id="a zero before the size"),
        pytest.param(chunk(token("bb")).replace(b"bb", b"b"), id="a wrong size"),
        pytest.param(
            chunk(event([{"index": 0, "delta": {"content": "b"}, "finish_reason": None}], usage={})), id="usage"
        ),
        pytest.param(chunk(DONE), id="[DONE]"),
        pytest.param(b"", id="nothing"),
    ],
)
def test_what_is_no_single_token_is_left_to_the_parser(data: bytes) -> None:
    found, sent = splice(token("a"))
    assert not found.take(data)
    assert (sent, found.num_tokens) == ([], 0)


def test_nothing_is_taken_before_a_lesson_and_after_the_end() -> None:
    assert not TokenSplice(lambda _: None).take(chunk(token("a")))
    found, _ = splice(token("a"))
    found.stop()
    assert not found.take(chunk(token("a")))
    assert found.lessons_left == 0


def test_events_without_one_text_teach_nothing() -> None:
    found, _ = splice(event([{"index": 0, "delta": {"tool_calls": []}, "finish_reason": None}]))
    ids = event([{"index": 0, "delta": {"content": "a"}, "token_ids": [1, 2], "finish_reason": None}])
    found.learn(ids)
    assert not found.take(chunk(ids))
    assert found.lessons_left == MAX_LESSONS - 2


class Wire(asyncio.Transport):
    """An engine's socket that takes everything."""

    def __init__(self, end: socket.socket) -> None:
        super().__init__({"socket": end})

    def write(self, data: Any) -> None: ...
    def abort(self) -> None: ...
    def close(self) -> None: ...
    def is_closing(self) -> bool:
        return False

    def get_write_buffer_size(self) -> int:
        return 0


class Client:
    """The client's end: keeps the events it is sent, and counts those that went by in their own framing."""

    is_paused = is_started = False
    on_pause: Any = None

    def __init__(self) -> None:
        self.sent = b""
        self.num_framed = 0

    def start(self, status: int, headers: Any, data: bytes = b"") -> None:
        self.sent += data

    def write(self, data: bytes) -> None:
        self.sent += data

    end = write

    def write_framed(self, data: bytes) -> None:
        while data:
            size, _, data = data.partition(b"\r\n")
            stop = int(size, 16)
            assert data[stop : stop + 2] == b"\r\n"
            self.sent += data[:stop]
            self.num_framed += 1
            data = data[stop + 2 :]


async def relayed(pieces: list[bytes]) -> tuple[Client, Answer]:
    """What a client gets when the engine's socket gives these pieces, one after another."""
    ends = socket.socketpair()
    client = Client()
    try:
        connection = Connection("engine", lambda _: None, lambda _: None)
        connection.connection_made(Wire(ends[0]))
        upstream = connection.send(b"", None)
        view = RequestView("r", "m", None, Task.GENERATE, num_prompt_tokens=11, expected_output_tokens=5)
        waiting = iter(pieces)
        opening = asyncio.ensure_future(open_answer(upstream, Call(Endpoint.CHAT, view, b"", True, False)))
        upstream.status = 200
        while not opening.done():
            connection.data_received(next(waiting))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        answer = opening.result()
        relaying = asyncio.ensure_future(answer.relay(client, []))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        for piece in waiting:
            connection.data_received(piece)
        await relaying
    finally:
        for end in ends:
            end.close()
    return client, answer


HEAD = event([{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}])
TOKENS = [
    token("hm", field="reasoning"),
    token("so", field="reasoning"),
    *(token(text) for text in ("a", "b", 'c: {"usage": {"x": 1}} \n\n [DONE]', "d", "", "e\r\n1\r\n", "f")),
    token("g", finish="stop"),
]
USAGE = event([], usage={"prompt_tokens": 7, "completion_tokens": 9})
CHUNKS = [chunk(one) for one in [HEAD, *TOKENS, USAGE, DONE]]


async def test_single_tokens_pass_in_their_own_framing() -> None:
    client, answer = await relayed([RESPONSE, *CHUNKS, b"0\r\n\r\n"])
    assert client.sent == b"".join([HEAD, *TOKENS, DONE])
    assert client.num_framed >= 4
    assert (answer.usage.num_output_tokens, answer.usage.exact) == (9, True)


BODY = b"".join(CHUNKS) + b"0\r\n\r\n"
EDGES = list(itertools.accumulate((len(one) for one in CHUNKS), initial=0))


@given(st.lists(st.integers(1, len(BODY) - 1) | st.sampled_from(EDGES[1:-1]), max_size=14, unique=True))
async def test_the_pieces_in_which_it_comes_change_nothing(cuts: list[int]) -> None:
    edges = [0, *sorted(cuts), len(BODY)]
    client, answer = await relayed([RESPONSE, *(BODY[begin:end] for begin, end in itertools.pairwise(edges))])
    assert client.sent == b"".join([HEAD, *TOKENS, DONE])
    assert (answer.usage.num_output_tokens, answer.finish_reason) == (9, "stop")


async def test_tokens_are_counted_when_the_engine_never_reports_usage() -> None:
    chunks = [chunk(one) for one in [HEAD, *TOKENS, DONE]]
    client, answer = await relayed([RESPONSE, *chunks, b"0\r\n\r\n"])
    assert client.num_framed
    assert (answer.usage.num_output_tokens, answer.usage.exact) == (9, False)
