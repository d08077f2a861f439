"""The relay over a stream that comes in any pieces: what is passed on, what is left out, what is counted."""

from __future__ import annotations

import itertools
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from serving.core.errors import BadRequest, ServingError, UpstreamError
from serving.core.state import RequestView, Task
from serving.engine.errors import ConnectionLost
from serving.engine.sse import EventSplitter, payload
from serving.gateway.generate import GenerateWriter
from serving.gateway.http_errors import EngineBusy
from serving.gateway.relay import Answer, open_answer
from serving.gateway.request import Call, Endpoint

DONE = b"data: [DONE]\n\n"


class Upstream:
    """An engine's response that comes in the pieces given."""

    def __init__(self, pieces: Sequence[bytes], *, status: int = 200, lost: bool = False) -> None:
        self.status = status
        self.headers: dict[bytes, bytes] = {}
        self.is_complete = False
        self._pieces = list(pieces)
        self._lost = lost

    async def chunks(self) -> AsyncIterator[tuple[float, bytes]]:
        while self._pieces:
            yield 1.0, self._pieces.pop(0)
        if self._lost:
            raise self._loss()
        self.is_complete = True

    async def read(self) -> bytes:
        return b"".join([data async for _, data in self.chunks()])

    def forward(self, sink: Any, on_end: Any) -> None:
        while self._pieces:
            sink(1.0, self._pieces.pop(0))
        self.is_complete = not self._lost
        on_end(self._loss() if self._lost else None)

    async def ended(self) -> None:
        assert self.is_complete

    @staticmethod
    def _loss() -> ConnectionLost:
        return ConnectionLost("the engine closed the connection", received_any=True)


class Client:
    """The client's end of an exchange, which keeps what it is sent."""

    is_paused = False
    is_started = False
    on_pause: Any = None

    def __init__(self) -> None:
        self.sent = b""

    def start(self, status: int, headers: Any, data: bytes = b"") -> None:
        assert status == 200
        self.sent += data

    def write(self, data: bytes) -> None:
        self.sent += data

    def end(self, data: bytes = b"") -> None:
        self.sent += data


def a_call(*, stream: bool = True, wants_usage: bool = False, endpoint: Endpoint = Endpoint.CHAT) -> Call:
    view = RequestView("r", "m", None, Task.GENERATE, num_prompt_tokens=11, expected_output_tokens=5)
    return Call(endpoint, view, b"", stream, wants_usage)


def event(obj: dict[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(obj) + b"\n\n"


def token(text: str, *, finish: str | None = None, index: int = 0, **more: Any) -> bytes:
    choice = {"index": index, "delta": {"content": text}, "finish_reason": finish}
    return event({"choices": [choice], **more})


def usage(output: int, *, cached: int = 2) -> dict[str, Any]:
    details = {"cached_tokens": cached}
    return {"prompt_tokens": 7, "completion_tokens": output, "prompt_tokens_details": details}


async def relay(
    pieces: Sequence[bytes],
    *,
    wants_usage: bool = False,
    lost: bool = False,
    endpoint: Endpoint = Endpoint.CHAT,
) -> tuple[bytes, Answer, ServingError | None]:
    client = Client()
    upstream: Any = Upstream(pieces, lost=lost)
    answer = await open_answer(upstream, a_call(wants_usage=wants_usage, endpoint=endpoint))
    try:
        await answer.relay(client, [])  # type: ignore[arg-type]
    except ServingError as error:
        return client.sent, answer, error
    return client.sent, answer, None


HEAD = event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
# Characters of two, three and four bytes, and what looks like the end of an event inside a text.
TOKENS = [token("a\u00fc\u20ac"), token('\U0001f680\u65e5: {"usage": {"x": 1}} \n\n [DONE]'), token("", finish="stop")]
USAGE = event({"choices": [], "usage": usage(2)})
WHOLE = b"".join([HEAD, *TOKENS, USAGE, DONE])


def cut(stream: bytes, places: Sequence[int]) -> list[bytes]:
    edges = [0, *sorted(min(place, len(stream)) for place in places), len(stream)]
    return [stream[begin:end] for begin, end in itertools.pairwise(edges) if begin < end]


CUTS = st.lists(st.integers(0, len(WHOLE)), max_size=12)


@given(cuts=CUTS, wants_usage=st.booleans(), field=st.sampled_from([b"data: ", b"data:"]))
@example(cuts=list(range(len(WHOLE))), wants_usage=False, field=b"data: ")
async def test_the_pieces_in_which_it_comes_change_nothing(cuts: list[int], wants_usage: bool, field: bytes) -> None:
    whole, last = WHOLE.replace(b"data: ", field), USAGE.replace(b"data: ", field)
    sent, answer, error = await relay(cut(whole, cuts), wants_usage=wants_usage)
    assert error is None
    assert sent == (whole if wants_usage else whole.replace(last, b""))
    counted = answer.usage
    assert (counted.num_prompt_tokens, counted.num_cached_tokens, counted.num_output_tokens) == (7, 2, 2)
    assert counted.exact
    assert (answer.finish_reason, answer.first_token_at_s) == ("stop", 1.0)


@given(cuts=CUTS, field=st.sampled_from([b"data: ", b"data:"]))
async def test_texts_of_our_own_api_are_whole_whatever_the_pieces(cuts: list[int], field: bytes) -> None:
    client = Client()
    upstream: Any = Upstream(cut(WHOLE.replace(b"data: ", field), cuts))
    answer = await open_answer(upstream, a_call())
    await answer.relay(GenerateWriter(client, "r", lambda: {"finish_reason": answer.finish_reason}), [])  # type: ignore[arg-type]
    *texts, last, done = [payload(sent) for sent in EventSplitter().feed(client.sent)]
    expected = '{"usage": {"x": 1}} \n\n [DONE]'
    assert "".join(orjson.loads(text or b"")["text"] for text in texts) == f"a\u00fc\u20ac\U0001f680\u65e5: {expected}"
    assert (orjson.loads(last or b""), done) == ({"id": "r", "finish_reason": "stop"}, b"[DONE]")


@pytest.mark.parametrize("wants_usage", [False, True])
async def test_no_cached_tokens_is_a_count_and_stays_one(wants_usage: bool) -> None:
    report = event({"choices": [], "usage": usage(1, cached=0)})
    continuous = token("a", usage=usage(1, cached=3))
    sent, answer, _ = await relay([continuous, token("", finish="stop"), report, DONE], wants_usage=wants_usage)
    assert (answer.usage.num_cached_tokens, answer.usage.exact) == (0, True)
    assert (b'"cached_tokens":0' in sent) is wants_usage


async def test_comments_and_windows_line_ends_pass() -> None:
    stream = (b": ping\n\n" + WHOLE).replace(b"\n", b"\r\n").replace(b"\r\n\r\n [DONE]", b"")
    sent, _, error = await relay([stream], wants_usage=True)
    assert error is None
    assert sent == stream


async def test_usage_in_a_chunk_with_choices_is_counted_and_passed() -> None:
    last = token("b", finish="stop", usage=usage(2))
    sent, answer, _ = await relay([token("a"), last, DONE])
    assert last in sent
    assert (answer.usage.num_output_tokens, answer.usage.exact) == (2, True)


async def test_token_ids_count_more_than_one_a_chunk() -> None:
    chunk = {
        "choices": [{"index": 0, "delta": {"content": "abcd"}, "token_ids": [1, 2, 3, 4], "finish_reason": "stop"}]
    }
    _, answer, _ = await relay([event(chunk), DONE])
    assert (answer.usage.num_output_tokens, answer.usage.exact) == (4, False)


@pytest.mark.parametrize("field", ["reasoning", "reasoning_content", "tool_calls"])
async def test_reasoning_and_tool_calls_are_tokens(field: str) -> None:
    chunk = {"choices": [{"index": 0, "delta": {field: "think"}, "finish_reason": None}]}
    _, answer, _ = await relay([event(chunk), token("x", finish="stop"), DONE])
    assert answer.usage.num_output_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "lost"),
    [
        pytest.param([HEAD, token("a")], True, id="connection lost"),
        pytest.param([HEAD, token("a")], False, id="ended without [DONE]"),
        pytest.param([HEAD, token("a"), DONE], False, id="[DONE] without finish_reason"),
        pytest.param([HEAD, token("a"), event({"error": {"message": "died", "code": 500}}), DONE], False, id="error"),
        pytest.param([HEAD + token("a") + event({"error": "died"}) + DONE], False, id="error in the same read"),
        pytest.param([HEAD, token("a"), b"data: {not json\n\n"], False, id="no JSON"),
        pytest.param([HEAD, token("a"), token("b", index=1), DONE], False, id="no choice ended"),
    ],
)
async def test_a_broken_stream_is_passed_on_up_to_where_it_broke(pieces: list[bytes], lost: bool) -> None:
    sent, answer, error = await relay(pieces, lost=lost)
    assert isinstance(error, UpstreamError)
    assert HEAD in sent
    assert b'"content":"a"' in sent
    assert DONE not in sent
    assert b'"error"' not in sent
    assert answer.usage.num_prompt_tokens == 11
    assert not answer.usage.exact


@pytest.mark.parametrize(
    ("code", "kind"),
    [(503, EngineBusy), (429, EngineBusy), (400, BadRequest), (500, UpstreamError), (None, UpstreamError)],
)
async def test_an_error_as_first_event_is_known_before_anything_is_sent(code: int | None, kind: type) -> None:
    first = event({"error": {"message": "no", "code": code, "param": "max_tokens"}})
    with pytest.raises(kind):
        await relay([b": ping\n\n", first, DONE])


@pytest.mark.parametrize("body", [b"", b"<html>", b"[]", b'{"error": {"message": "no", "code": 500}}'])
async def test_a_unary_answer_that_is_none_is_an_upstream_error(body: bytes) -> None:
    with pytest.raises(UpstreamError):
        await open_answer(Upstream([body]), a_call(stream=False))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "body", [b"", b"plain text", b"[1]", b'{"object": "error", "message": "no"}', b'{"error": "no"}']
)
async def test_an_engines_refusal_in_any_shape_is_relayed(body: bytes) -> None:
    with pytest.raises(BadRequest):
        await open_answer(Upstream([body], status=400), a_call())  # type: ignore[arg-type]


# ---- /v1/responses


def step(kind: str, **more: Any) -> bytes:
    return f"event: {kind}\n".encode() + event({"type": kind, **more})


def ended(kind: str) -> bytes:
    usage = {"input_tokens": 7, "output_tokens": 2, "input_tokens_details": {"cached_tokens": 3}}
    return step(f"response.{kind}", response={"status": kind, "usage": usage})


STEPS = [
    step("response.created", response={"status": "in_progress"}),
    step("response.output_text.delta", delta="a\u00fc"),
    step("response.output_text.delta", delta="\U0001f680 \n\n data: [DONE]"),
]


@given(
    cuts=st.lists(st.integers(0, 700), max_size=12),
    end=st.sampled_from([("completed", "stop"), ("incomplete", "length")]),
)
async def test_the_events_of_a_response_pass_in_any_pieces(cuts: list[int], end: tuple[str, str]) -> None:
    whole = b"".join([*STEPS, ended(end[0])])
    sent, answer, error = await relay(cut(whole, cuts), endpoint=Endpoint.RESPONSES)
    assert (sent, error, answer.finish_reason) == (whole, None, end[1])
    counted = answer.usage
    assert (counted.num_prompt_tokens, counted.num_cached_tokens, counted.num_output_tokens) == (7, 3, 2)
    assert (counted.exact, answer.first_token_at_s) == (True, 1.0)


@pytest.mark.parametrize(
    ("last", "lost"),
    [
        pytest.param(b"", True, id="connection lost"),
        pytest.param(b"", False, id="ended without its end"),
        pytest.param(step("response.failed", response={"status": "failed"}), False, id="failed"),
        pytest.param(step("error", message="died"), False, id="error"),
        pytest.param(event({"error": {"message": "died", "code": 500}}), False, id="error of vLLM"),
    ],
)
async def test_a_response_that_breaks_is_passed_on_up_to_where_it_broke(last: bytes, lost: bool) -> None:
    sent, answer, error = await relay([*STEPS, last], lost=lost, endpoint=Endpoint.RESPONSES)
    assert isinstance(error, UpstreamError)
    assert sent == b"".join(STEPS)
    assert (answer.usage.num_prompt_tokens, answer.usage.num_output_tokens, answer.usage.exact) == (11, 2, False)
