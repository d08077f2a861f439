"""An engine's answer on its way to the client. Replaceable: `open_answer` and `Answer` are all that others use.

`open_answer` reads until it is certain that the engine took the request: the whole of a unary answer, the first
event of a stream (vLLM reports a full queue there, under HTTP 200). Until then nothing was sent to the client and
another replica may be tried. From then on `Answer.relay` sends raw bytes as they come.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from time import perf_counter
from typing import Any, Protocol

import orjson

from serving.core.errors import ErrorCode, NotFound, ServingError, UpstreamError
from serving.engine.client import ConnectionLost, EngineResponse
from serving.engine.sse import DONE, EventSplitter, payload
from serving.gateway.http_errors import Headers, from_engine, from_engine_object
from serving.gateway.request import Call, Endpoint
from serving.gateway.splice import TokenSplice
from serving.gateway.usage import Usage

STREAM_HEADERS: Headers = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

END_TIMEOUT_S = 1.0
MAX_UNCOUNTED_BYTES = 256 * 1024


_OPTIONAL = frozenset({Endpoint.RESPONSES, Endpoint.TOKENIZE})
"""Routes that not every engine has."""


class Writer(Protocol):
    """The client's end: an Exchange, or what turns an engine's answer into another shape on the way to one."""

    on_pause: Callable[[bool], None] | None

    @property
    def is_paused(self) -> bool:
        """Whether the client does not read what was written."""
        ...

    @property
    def is_started(self) -> bool:
        """Whether a head was sent: the response's status can no longer be chosen."""
        ...

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Begins a body that comes in chunks, with its first part."""
        ...

    def write(self, data: bytes) -> None:
        """Sends a part of it."""
        ...

    def end(self, data: bytes = b"") -> None:
        """Sends the last part."""
        ...

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete response."""
        ...


class Answer(Protocol):
    """An answer that an engine has begun.

    Attributes:
        usage: tokens so far; complete after `relay`, and as far as it got when that was cut short.
        first_token_at_s: time.perf_counter() when the first token came from the engine; None before.
        finish_reason: of the last choice that ended; None before, and for embeddings.
    """

    first_token_at_s: float | None
    finish_reason: str | None

    @property
    def usage(self) -> Usage:
        """See above."""
        ...

    async def relay(self, writer: Writer, headers: Headers) -> None:
        """Sends the answer to its end.

        Raises:
            ServingError: the engine broke off or failed; a stream's client is still to be told.
        """
        ...


async def open_answer(upstream: EngineResponse, call: Call) -> Answer:
    """The answer in `upstream`.

    Raises:
        EngineBusy: the engine's queue is full.
        BadRequest: the engine refused the request.
        NotFound: it has no such route.
        UpstreamError: it failed or broke off.
    """
    if upstream.status == 404 and call.endpoint in _OPTIONAL:
        raise NotFound(
            f"the engine of {call.view.model} has no {call.endpoint.value}",
            code=ErrorCode.ROUTE_NOT_FOUND,
            param="model",
        )
    if upstream.status != 200:
        raise from_engine(upstream.status, await upstream.read())
    if call.stream:
        stream = StreamAnswer(upstream, call) if call.endpoint.sends_chunks else ResponseStream(upstream, call)
        await stream.open()
        return stream
    return UnaryAnswer(await upstream.read(), upstream.headers, call)


class UnaryAnswer:
    """A complete answer, sent as the engine wrote it."""

    def __init__(self, body: bytes, headers: Mapping[bytes, bytes], call: Call) -> None:
        self.usage = Usage(call.view.num_prompt_tokens)
        self.first_token_at_s: float | None = perf_counter()
        self.finish_reason: str | None = None
        self._body = body
        self._content_type = headers.get(b"content-type", b"application/json")
        self._read(body)

    async def relay(self, writer: Writer, headers: Headers) -> None:
        """Sends the whole."""
        writer.whole(200, [(b"content-type", self._content_type), *headers], self._body)

    def _read(self, body: bytes) -> None:
        answer = _object(body)
        if answer.get("error") is not None:  # a response says null
            raise from_engine_object(answer, 502)
        if isinstance(answer.get("usage"), dict):
            self.usage.take_report(answer["usage"])
        if answer.get("object") == "response":
            self.finish_reason = _RESPONSE_ENDS.get(f"response.{answer.get('status')}")
        for choice in answer.get("choices") or ():
            self.finish_reason = choice.get("finish_reason") or self.finish_reason


class StreamAnswer:
    """A stream of events, sent as they come; only the usage report that the client didn't ask for is left out.

    A chunk that is a token and nothing else is spliced where the client's end takes it (`splice.py`). Data of whole
    events that carry tokens and nothing else goes on unparsed; everything else is parsed.
    """

    def __init__(self, upstream: EngineResponse, call: Call) -> None:
        self.first_token_at_s: float | None = None
        self.finish_reason: str | None = None
        self._usage = Usage(call.view.num_prompt_tokens)
        self._upstream = upstream
        self._splitter = EventSplitter()
        self._first: list[bytes] = []
        self._uncounted: list[bytes] = []
        self._uncounted_bytes = 0
        self._wants_usage = call.wants_usage
        self._num_choices = call.num_choices
        self._finished: set[int] = set()
        self._begun = False
        self._done = False
        self._failure: ServingError | None = None
        self._writer: Writer | None = None
        self._splice: TokenSplice | None = None
        self._ended: asyncio.Future[None] | None = None
        self._patience: asyncio.TimerHandle | None = None

    @property
    def usage(self) -> Usage:
        """Tokens so far; what went by unparsed is counted now, unless the engine has reported the whole."""
        if not self._usage.exact:
            for event in EventSplitter().feed(b"".join(self._uncounted)):
                self._usage.take_chunk(_object(payload(event) or b"{}").get("choices") or [])
        self._uncounted.clear()
        self._uncounted_bytes = 0
        if self._splice is not None:
            self._usage.take_tokens(self._splice.num_tokens)
            self._splice.num_tokens = 0
        return self._usage

    async def open(self) -> None:
        """Reads up to the first event that is no comment. Raises what `open_answer` does."""
        chunks = self._upstream.chunks()
        while not self._begun:
            received = await anext(chunks, None)
            if received is None:
                raise _cut_off()
            received_at_s, data = received
            self._first += self._parse(received_at_s, data)
            if self._failure is not None and not self._begun:
                raise self._failure

    async def relay(self, writer: Writer, headers: Headers) -> None:
        """Sends the head, the first events, and the rest as it comes."""
        self._writer = writer
        self._ended = asyncio.get_running_loop().create_future()
        writer.on_pause = self._on_pause
        if writer.is_started:  # a comment kept the connection alive until now
            self._send(self._first)
        elif self._done or self._failure is not None:
            writer.start(200, STREAM_HEADERS + headers)
            self._send(self._first)
        else:
            writer.start(200, STREAM_HEADERS + headers, b"".join(self._first))
        self._forward(writer)
        if writer.is_paused:
            self._on_pause(True)
        try:
            await self._ended
        finally:
            if self._patience is not None:
                self._patience.cancel()
        if self._failure is not None:
            raise self._failure

    def _forward(self, writer: Writer) -> None:
        """Has the rest come as it comes; spliced where the writer is the client's own end, which changes nothing."""
        write_framed = getattr(writer, "write_framed", None)
        if write_framed is not None and not self._done:
            self._splice = TokenSplice(write_framed)
            self._upstream.forward(self._on_data, self._on_end, self._splice.take)
        else:
            self._upstream.forward(self._on_data, self._on_end)

    def _on_data(self, received_at_s: float, data: bytes) -> None:
        """Called for what the engine sent, in its socket's callback."""
        assert self._writer is not None
        if self._done or self._failure is not None:
            return
        if self.first_token_at_s is not None and not self._splitter.rest and _carries_only_tokens(data):
            self._uncounted.append(data)
            self._uncounted_bytes += len(data)
            if self._uncounted_bytes > MAX_UNCOUNTED_BYTES:
                _ = self.usage
            self._writer.write(data)
            if self._splice is not None and self._splice.lessons_left and data.count(b"\n\n") == 1:
                self._splice.learn(data)
            return
        self._send(self._parse(received_at_s, data))

    def _send(self, events: list[bytes]) -> None:
        """Sends events; the last ones with the end of the response."""
        assert self._writer is not None
        if self._splice is not None and (self._done or self._failure is not None):
            self._splice.stop()
        if self._done and self._failure is None:
            self._writer.end(b"".join(events))
        elif events:
            self._writer.write(b"".join(events))
        if self._failure is not None:
            self._end()
        elif self._done and self._patience is None:
            # What the engine sends after [DONE] is nothing but the end: read, so that its connection can be kept.
            self._patience = asyncio.get_running_loop().call_later(END_TIMEOUT_S, self._end)

    def _on_end(self, lost: ConnectionLost | None) -> None:
        """The engine's answer is at its end."""
        if not self._done and self._failure is None:
            self._failure = lost or _cut_off()
        self._end()

    def _end(self) -> None:
        assert self._ended is not None
        if not self._ended.done():
            self._ended.set_result(None)

    def _on_pause(self, paused: bool) -> None:
        """A client that does not read holds up its engine's answer, not our memory."""
        if paused:
            self._upstream.pause()
        else:
            self._upstream.resume()

    def _parse(self, received_at_s: float, data: bytes) -> list[bytes]:
        """The events in `data` to send. A failure among them is kept: what came before it is sent first."""
        events: list[bytes] = []
        try:
            for event in self._splitter.feed(data):
                if self._take(event, received_at_s):
                    events.append(event)
                if self._done:
                    break
        except ServingError as error:
            self._failure = error
        return events

    def _take(self, event: bytes, received_at_s: float) -> bool:
        """Reads an event; True when it is sent on. Raises when it reports a failure."""
        data = payload(event)
        if data is None:
            return True
        if data == DONE:
            self._check_finished()
            self._begun = self._done = True
            return True
        chunk = _object(data)
        if "error" in chunk:
            raise from_engine_object(chunk, 502)
        self._begun = True
        choices = chunk.get("choices") or []
        if self._usage.take_chunk(choices) and self.first_token_at_s is None:
            self.first_token_at_s = received_at_s
        for choice in choices:
            if choice.get("finish_reason") is not None:
                self.finish_reason = choice["finish_reason"]
                self._finished.add(choice.get("index", 0))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self._usage.take_report(usage)
            return bool(choices) or self._wants_usage
        return True

    def _check_finished(self) -> None:
        # vLLM closes a stream with [DONE] also after its worker died: only a finish_reason says that the text is whole.
        if len(self._finished) < self._num_choices:
            raise UpstreamError("the engine ended its stream before the answer was complete")


class ResponseStream(StreamAnswer):
    """The events of /v1/responses: each says its type, the last one holds the whole response and its usage."""

    def _take(self, event: bytes, received_at_s: float) -> bool:
        data = payload(event)
        if data is None:
            return True
        chunk = _object(data)
        kind = str(chunk.get("type", ""))
        if "error" in chunk or kind == "error":
            raise from_engine_object(chunk, 502)
        self._begun = True
        if kind.endswith(".delta"):
            self._usage.take_tokens(1)
            if self.first_token_at_s is None:
                self.first_token_at_s = received_at_s
        elif kind in _RESPONSE_ENDS:
            self._done = True
            self.finish_reason = _RESPONSE_ENDS[kind]
            self._usage.take_report((chunk.get("response") or {}).get("usage") or {})
        elif kind == "response.failed":
            raise UpstreamError("the engine failed in the middle of its response")
        return True


_RESPONSE_ENDS = {"response.completed": "stop", "response.incomplete": "length"}


def _carries_only_tokens(data: bytes) -> bool:
    """Whether `data` is whole events each with a choice that goes on, without usage or error.

    Inside a JSON text every quote is escaped, so that no generated text can hold one of these patterns.
    """
    return (
        data.endswith(b"\n\n")
        and data.startswith(b'data: {"')
        and data.count(b"\n\n") == data.count(b'"finish_reason":null')
        and b'"error"' not in data
        and b"[DONE]" not in data
        and (b'"usage"' not in data or data.count(b'"usage"') == data.count(b'"usage":null'))
    )


def _cut_off() -> UpstreamError:
    return UpstreamError("the engine ended its stream without [DONE]")


def _object(data: bytes) -> dict[str, Any]:
    try:
        found = orjson.loads(data)
    except orjson.JSONDecodeError as error:
        raise UpstreamError("the engine sent what is no JSON") from error
    if not isinstance(found, dict):
        raise UpstreamError("the engine sent JSON that is no object")
    return found
