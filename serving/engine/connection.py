"""One HTTP/1.1 connection to an engine and the response that is being read from it.

A `Connection` serves one request at a time. The socket's callbacks (data_received, the parser's on_body) put
chunks into the `EngineResponse` and wake its reader; the reader takes them and, below a low-water mark, lets the
socket go on. Cost of a chunk: one append and one wake.

    connect ── send ──▶ busy ── message complete ──▶ idle (in the client's pool) ── send ──▶ busy …
                          └── abort, timeout, peer gone, not HTTP, "connection: close" ──▶ closed
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Callable
from time import perf_counter
from typing import cast

import httptools

from serving.core.errors import ErrorCode
from serving.engine.known_head import MAX_MISSES, KnownHead, known_head
from serving.engine.response import EngineResponse

PAUSE_ABOVE_BYTES = 1024 * 1024
_STATUSES_WITHOUT_BODY = frozenset({204, 304})


class Connection(asyncio.Protocol):
    """The socket, its parser, and the response in progress, if there is one."""

    def __init__(
        self, name: str, on_idle: Callable[[Connection], None], on_closed: Callable[[Connection], None]
    ) -> None:
        self.idle_since_s = 0.0
        self._name = name
        self._on_idle = on_idle
        self._on_closed = on_closed
        self._parser = httptools.HttpResponseParser(self)
        self._response: EngineResponse | None = None
        self.received_at_s = 0.0
        self._timeout_s = self._wakes_at_s = 0.0
        self._watch: asyncio.TimerHandle | None = None
        self._keep_alive = False
        self._ends_at_close = False
        self._is_interim = False
        self._paused = False
        self._headers: dict[bytes, bytes] = {}
        self._known: KnownHead | None = None  # of the last 200 that came whole at a time
        self._num_misses = 0

    # ---- used by the client

    def send(self, request: bytes, timeout_s: float | None) -> EngineResponse:
        """Writes `request`; the response ends at latest `timeout_s` seconds from now."""
        response = self._response = EngineResponse(self)
        if timeout_s is not None:
            self._timeout_s = timeout_s
            response._due_s = due_s = self._loop.time() + timeout_s
            if self._watch is None or due_s < self._wakes_at_s:
                self._wake_at(due_s)
        response.sent_at_s = perf_counter()
        self._transport.write(request)
        return response

    def close(self) -> None:
        """Closes the socket; a response in progress ends with an error."""
        if self._response is not None:
            self._response.abort()
        else:
            self.drop()

    def is_closing(self) -> bool:
        """Whether the socket is closed or about to be."""
        return self._transport.is_closing()

    def is_usable(self) -> bool:
        """Whether an idle connection still stands: nothing to read, so neither closed by the peer nor confused.

        Asking the kernel right before the write is what makes it known that a request was not sent on a
        connection which the engine had already closed.
        """
        if self._transport.is_closing():
            return False
        return not self._poll.poll(0)

    def pause(self) -> None:
        """Stops reading until `resume()`."""
        if not self._paused and not self._transport.is_closing():
            self._paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        """Reads on, if reading was paused."""
        if self._paused:
            self._paused = False
            if not self._transport.is_closing():
                self._transport.resume_reading()

    def drop(self) -> None:
        """Closes the socket at once and forgets the response."""
        self._response = None
        self._transport.abort()

    def _wake_at(self, due_s: float) -> None:
        if self._watch is not None:
            self._watch.cancel()
        self._wakes_at_s = due_s
        self._watch = self._loop.call_at(due_s, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """One timer a connection: it is set anew when it finds a later response, and not with each of them."""
        self._watch = None
        response = self._response
        if response is None or response._due_s is None:
            return
        if response._due_s > self._loop.time():
            self._wake_at(response._due_s)
        else:
            message = f"{self._name} did not complete its answer within {self._timeout_s:g} s"
            response._fail(message, ErrorCode.UPSTREAM_TIMEOUT)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._loop = asyncio.get_running_loop()
        self._transport = cast("asyncio.Transport", transport)
        self._poll = select.poll()
        self._poll.register(transport.get_extra_info("socket").fileno(), select.POLLIN)

    def data_received(self, data: bytes) -> None:
        """Stamps the data before anything else, then lets the parser take it apart, unless it is spliced."""
        response = self._response
        if response is not None and response.is_between_chunks and response._splice(data):  # type: ignore[misc]
            return
        self.received_at_s = perf_counter()
        if response is None:  # nothing was asked: the stream is out of step, no later answer could be trusted
            self._transport.abort()
            return
        is_first = not response._received_any
        response._received_any = True
        if is_first and self._known is not None:
            body = self._known.body_in(data)
            if body is not None:
                self._take_whole(response, self._known, body)
                return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            if self._response is not None:
                response._fail(f"{self._name} sent what is no HTTP/1.1 response: {error}")
            self._transport.abort()
        if is_first and response._complete:
            self._learn(response, data)
        # Once for all that came at a time:
        if response._piece:
            splices = response._splices(data)
            response._hand_over()
            response.is_between_chunks = splices and response._splice is not None
        elif response._waiter is not None:
            response._wake()
        if response._buffered_bytes > PAUSE_ABOVE_BYTES and self._response is not None:
            self.pause()

    def connection_lost(self, exc: Exception | None) -> None:
        """The end of a response without a length, or the loss of one."""
        self._on_closed(self)
        del self._parser  # which holds this connection: a cycle, for which a load client would need full collections
        if self._watch is not None:
            self._watch.cancel()
        response, self._response = self._response, None
        if response is None:
            return
        if self._ends_at_close and exc is None:
            response._finish()
        else:
            response._fail(f"{self._name} closed the connection before its answer was complete ({exc or 'EOF'})")

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """A response begins; one that answers no request puts the stream out of step."""
        self._headers = {}
        if self._response is None:
            self._transport.abort()

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes one header line."""
        name = name.lower()
        known = self._headers.get(name)
        self._headers[name] = value if known is None else known + b", " + value

    def on_headers_complete(self) -> None:
        """Hands the head to the response, unless it is an interim one (1xx)."""
        status = self._parser.get_status_code()
        self._is_interim = status < 200
        response = self._response
        if self._is_interim or response is None:
            return
        headers = self._headers
        self._keep_alive = self._parser.should_keep_alive()
        self._ends_at_close = (
            status not in _STATUSES_WITHOUT_BODY
            and b"content-length" not in headers
            and b"chunked" not in headers.get(b"transfer-encoding", b"").lower()
        )
        response._on_head(status, headers, self.received_at_s)

    def on_body(self, data: bytes) -> None:
        """Takes a piece of body, as large as the socket and the chunk framing gave it."""
        response = self._response
        if response is None:
            return
        if response._sink is not None:
            response._piece += data
        else:
            response._chunks.append((self.received_at_s, data))
            response._buffered_bytes += len(data)

    def on_message_complete(self) -> None:
        """Ends the response and returns the connection to the pool, if it may be used again."""
        response = self._response
        if self._is_interim or response is None:
            return
        self._response = None
        self._ends_at_close = False
        if self._paused:
            self.resume()
        self._end(response)

    # ----

    def _take_whole(self, response: EngineResponse, known: KnownHead, body: bytes) -> None:
        """Ends the response, all of which came at a time under a head that is known."""
        self._num_misses = 0
        self._response = None
        response._on_head(200, known.fields, self.received_at_s)
        response._chunks.append((self.received_at_s, body))
        self._end(response)

    def _learn(self, response: EngineResponse, data: bytes) -> None:
        self._num_misses += 1
        self._known = None
        if response.status == 200 and self._keep_alive and self._num_misses <= MAX_MISSES:
            self._known = known_head(data, response.headers)

    def _end(self, response: EngineResponse) -> None:
        """The response is complete; the connection is idle, if it may be used again."""
        response._finish()
        if self._keep_alive and self._transport.get_write_buffer_size() == 0:
            self.idle_since_s = self.received_at_s
            self._on_idle(self)
        else:
            self._transport.close()
