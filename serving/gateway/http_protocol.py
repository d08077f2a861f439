"""HTTP/1.1 for a worker: uvicorn's own protocol with bounds on what a request may take, and with two habits put right.

    nothing ── first byte ──▶ head ── complete ──▶ body ── complete ──▶ nothing
       75 s, then closed       20 s and 64 KiB       30 s without a byte

A head that is wrong, too large or too slow is answered once the requests before it are: their answers come first.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import traceback
from http import HTTPStatus
from typing import Any, ClassVar

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle

from serving.core.errors import BadRequest, ErrorCode
from serving.gateway.http_errors import Headers, error_response

logger = logging.getLogger(__name__)

MAX_HEAD_BYTES = 64 * 1024
MAX_HEADERS = 100
# A chunk of one byte travels as six: more framing than this for a byte of body is nobody's way to send one.
MAX_FRAMING_BYTES_PER_BODY_BYTE = 8

# A client that still sends when it is refused would lose the answer if the socket closed on it.
LINGER_S = 2.0

_OFFER_HEADERS = frozenset({b"upgrade", b"http2-settings"})


# What the next byte belongs to.
NOTHING, HEAD, BODY = range(3)

_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class StaysHttp11(HttpToolsProtocol):
    """One client's connection.

    A request that offers an upgrade (`h2c` of Java's client, say) is served as if it did not, as RFC 9110 7.8 allows.
    httptools ends such a request after its head and gives no body to it. So its head is held back and read again
    without the offer, with the bytes after it.

    When a client that pipelines leaves, uvicorn tells the request it read last; here the one that runs hears of it.

    Trailers are dropped: they come when the head has been judged, and must not add to it.
    """

    head_timeout_s: ClassVar[float] = 20.0
    body_idle_timeout_s: ClassVar[float] = 30.0

    _held_head: bytes | None = None
    _running: RequestResponseCycle | None = None
    _reading = NOTHING
    _num_piece_bytes = 0  # of what is parsed now
    _is_new_head = False  # it began in the piece that is parsed now
    _num_head_bytes = 0  # of pieces that hold nothing but a part of the head
    _num_framing_bytes = 0  # of the body that is read: what came for it less what it holds
    _refusal: bytes | None = None  # from here on everything that comes is dropped
    _idle_until_s = _wakes_at_s = 0.0  # when the connection is closed if no request begins; when that is looked at
    _due_s: float | None = None  # the client must have got on by then
    _patience: asyncio.TimerHandle | None = None
    _linger: asyncio.TimerHandle | None = None

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the connection; one that never sends a byte is closed as an idle one is."""
        super().connection_made(transport)
        self.keep_idle()

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells the request that runs."""
        super().connection_lost(exc)
        self._unset_keepalive_if_required()
        for timer in (self._patience, self._linger):
            if timer is not None:
                timer.cancel()
        if self._running is not None and not self._running.response_complete:
            self._running.disconnected = True
            self._running.message_event.set()

    def data_received(self, data: bytes) -> None:
        """Feeds the parser; anew after each head that was held back."""
        if self._refusal is not None:
            return
        self._num_piece_bytes = len(data)
        self._is_new_head = False
        rest: bytes | memoryview = data
        try:
            while rest:
                rest = self._feed(rest)
            if self._reading or not self._is_answering:
                self._wait_for_more(len(data))
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            self._refuse(cause if isinstance(cause, BadRequest) else _own_failure(cause or error))
        except httptools.HttpParserError:
            self._refuse(BadRequest("what came is no HTTP request"))
        except BadRequest as error:
            self._refuse(error)

    def _feed(self, data: bytes | memoryview) -> bytes | memoryview:
        """Returns what is still to be parsed."""
        num_parsed = len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            num_parsed = upgrade.args[0]
        if self._held_head is None:
            return b""
        self.parser = httptools.HttpRequestParser(self)
        self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        head, self._held_head = self._held_head, None
        self.parser.feed_data(head)
        return memoryview(data)[num_parsed:]

    # ---- bounds

    def keep_idle(self) -> None:
        """Closes the connection unless a request begins in time.

        One timer a connection: it is set anew when it finds that requests came, and not with each of them.
        """
        self._idle_until_s = self.loop.time() + self.timeout_keep_alive
        if self.timeout_keep_alive_task is None or self._idle_until_s < self._wakes_at_s:
            self._wake_when_idle()

    def _wake_when_idle(self) -> None:
        self._unset_keepalive_if_required()
        self._wakes_at_s = self._idle_until_s
        self.timeout_keep_alive_task = self.loop.call_at(self._wakes_at_s, self.timeout_keep_alive_handler)

    def timeout_keep_alive_handler(self) -> None:
        """The timer; a connection that is not idle now sets it again when it is."""
        self.timeout_keep_alive_task = None
        if self._reading != NOTHING or self._is_answering or self.transport.is_closing():
            return
        if self._idle_until_s > self.loop.time():
            self._wake_when_idle()
        else:
            self.transport.close()

    def _wait_for_more(self, num_bytes: int) -> None:
        """A piece ended in the middle of a request, or between requests while nothing is answered."""
        if self._reading == BODY:
            self._num_framing_bytes += num_bytes
            if self._num_framing_bytes > MAX_HEAD_BYTES + self._num_piece_bytes:
                raise BadRequest("the body's chunks hold hardly any bytes, or its trailers are too large")
            self._due_s = self.loop.time() + self.body_idle_timeout_s
        else:
            if not self._is_new_head:
                self._num_head_bytes += num_bytes
                if self._num_head_bytes > MAX_HEAD_BYTES:
                    raise _head_too_large(f"is over the limit of {MAX_HEAD_BYTES} bytes")
            if self._due_s is None:
                self._due_s = self.loop.time() + self.head_timeout_s
        if self._patience is None:
            self._patience = self.loop.call_at(self._due_s, self._look_at_clock)

    def _look_at_clock(self) -> None:
        """One timer a connection: it is set anew when it finds that the client got on."""
        self._patience = None
        if self._due_s is None or self._refusal is not None or self.transport.is_closing():
            return
        now_s = self.loop.time()
        due_s = now_s + self.body_idle_timeout_s if self.flow.read_paused else self._due_s
        if due_s > now_s:
            self._patience = self.loop.call_at(due_s, self._look_at_clock)
        elif self._reading == NOTHING:
            self.transport.close()
        else:
            part = "head" if self._reading == HEAD else "body"
            self._refuse(_with_status(408, BadRequest(f"the rest of the request's {part} did not come in time")))

    def _judge_head(self) -> None:
        """Raises BadRequest for a head with too much in it; called only for one that could have."""
        headers = self.headers
        if len(headers) > MAX_HEADERS:
            raise _head_too_large(f"has more than {MAX_HEADERS} fields")
        if len(self.url) + sum(len(name) + len(value) + 4 for name, value in headers) > MAX_HEAD_BYTES:
            raise _head_too_large(f"is over the limit of {MAX_HEAD_BYTES} bytes")

    # ---- what is refused

    @property
    def _is_answering(self) -> bool:
        """Whether a request is not answered yet."""
        return self.cycle is not None and not self.cycle.response_complete

    def _refuse(self, error: BadRequest) -> None:
        """Answers what cannot be read with an error, after the answers before it; reads nothing more from here on."""
        request_id = secrets.token_hex(12)
        status, headers, body = error_response(error)
        logger.info("refused what came on a connection: %d %s, request %s", status, error.message, request_id)
        lines = [b"HTTP/1.1 %d %b" % (status, _PHRASES[status])]
        told = (*self.server_state.default_headers, *headers, *self.refusal_headers())
        lines += [name + b": " + value for name, value in told]
        lines += [b"x-request-id: " + request_id.encode(), b"connection: close", b"content-length: %d" % len(body)]
        self._refusal = b"\r\n".join([*lines, b"", body])
        if self._reading == BODY:
            self._refuse_body(error)
        elif not self._is_answering:
            self._send_refusal()

    def refusal_headers(self) -> Headers:
        """What else the answer to a request that cannot be read says; `headers` are those read of it."""
        return []

    def _refuse_body(self, error: BadRequest) -> None:
        """The request whose body it is has begun: it hears that no more comes, and whatever it answered stands."""
        cycle = self.cycle
        if self.pipeline:  # it waits for its turn, which is the refusal's now
            self.pipeline.popleft()
        elif not self._is_answering or cycle.response_started:
            self.transport.close()
        else:
            cycle.disconnected = True
            cycle.message_event.set()
            self._send_refusal()

    def _send_refusal(self) -> None:
        if self._refusal is not None and not self.transport.is_closing():
            self.transport.write(self._refusal)
            if self.transport.can_write_eof():
                self.transport.write_eof()
            self._linger = self.loop.call_later(LINGER_S, self.transport.close)

    def on_response_complete(self) -> None:
        """Begins the next request, waits for one, or ends the connection with the refusal that waits."""
        if self.pipeline:
            super().on_response_complete()
            return
        self.server_state.total_requests += 1
        if self._refusal is not None:
            self._send_refusal()
        elif not self.transport.is_closing():
            if self.flow.read_paused:
                self.flow.resume_reading()
            self.keep_idle()

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """A request begins; uvicorn's scope of it is made when its head is known to be right."""
        self.url = b""
        self.expect_100_continue = False
        self.headers = []
        self._reading = HEAD
        self._is_new_head = True
        self._num_head_bytes = 0
        self._due_s = None

    def on_header(self, name: bytes, value: bytes) -> None:
        """A field of the head."""
        if self._reading == HEAD:
            name = name.lower()
            if name == b"expect" and value.lower() == b"100-continue":
                self.expect_100_continue = True
            self.headers.append((name, value))

    def on_headers_complete(self) -> None:
        """Begins the request, or holds its head back."""
        if len(self.headers) > MAX_HEADERS or self._num_piece_bytes > MAX_HEAD_BYTES or not self._is_new_head:
            self._judge_head()
        if self.parser.should_upgrade() and self.parser.get_method() != b"CONNECT":
            self._held_head = self._head_without_offer()
            return
        before = self.cycle
        try:
            self._begin()
        except BaseException:
            self.cycle = before  # nobody answers what was begun by half
            raise
        self._reading = BODY
        self._num_framing_bytes = 0

    def _begin(self) -> None:
        """Begins the request as uvicorn does."""
        self.target_path()  # refuses one that uvicorn would stumble over
        url, headers, expects = self.url, self.headers, self.expect_100_continue
        super().on_message_begin()
        self.url, self.headers, self.expect_100_continue = url, headers, expects
        self.scope["headers"] = headers
        super().on_headers_complete()

    def target_path(self) -> bytes:
        """The path that the request asks for.

        Raises:
            BadRequest: there is none in its target.
        """
        try:
            path: bytes | None = httptools.parse_url(self.url).path
        except httptools.HttpParserError:
            path = None
        if path is None or not path.isascii():
            raise BadRequest("the request's target is no path or URL")
        return path

    def on_body(self, body: bytes) -> None:
        """A piece of the body of the request that was read last."""
        if self._num_framing_bytes:
            self.count_body(body)
        super().on_body(body)

    def count_body(self, body: bytes) -> None:
        """Bytes of the body pay for the framing that came before them."""
        self._num_framing_bytes = max(self._num_framing_bytes - MAX_FRAMING_BYTES_PER_BODY_BYTE * len(body), 0)

    def on_message_complete(self) -> None:
        """Ends the request; one that was held back has not begun."""
        if self._held_head is None:
            self._reading, self._due_s = NOTHING, None
            super().on_message_complete()

    def _start_asgi_task(self, cycle: RequestResponseCycle, app: Any) -> None:
        self._running = cycle
        super()._start_asgi_task(cycle, app)

    def _head_without_offer(self) -> bytes:
        version = self.parser.get_http_version().encode()
        lines = [self.parser.get_method() + b" " + self.url + b" HTTP/" + version]
        for name, value in self.headers:
            if name == b"connection":
                options = (option.strip() for option in value.split(b","))
                value = (
                    b", ".join(option for option in options if option.lower() not in _OFFER_HEADERS) or b"keep-alive"
                )
            if name not in _OFFER_HEADERS and (value or name != b"connection"):
                lines.append(name + b": " + value)
        return b"\r\n".join(lines) + b"\r\n\r\n"


def _head_too_large(how: str) -> BadRequest:
    return _with_status(431, BadRequest(f"the request's head {how}"))


def _own_failure(error: BaseException) -> BadRequest:
    """Logs a mistake of ours; without the error's own words, which may quote a request."""
    frames = "".join(traceback.format_tb(error.__traceback__))
    logger.critical("reading a request failed inside the gateway: %s\n%s", type(error).__name__, frames)
    return _with_status(500, BadRequest("the gateway failed; its log has the details", code=ErrorCode.INTERNAL))


def _with_status(status: int, error: BadRequest) -> BadRequest:
    error.status = status
    return error
