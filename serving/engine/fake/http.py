"""One HTTP/1.1 connection of the fake engine: whole requests in, writes out at the moment they are asked for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from http import HTTPStatus
from time import perf_counter
from typing import Any, cast

import httptools
import orjson


@dataclass(slots=True)
class Request:
    """A request, complete. `received_at_s` is time.perf_counter() when its last byte came."""

    method: str = ""
    path: str = ""
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""
    received_at_s: float = 0.0


class HttpConnection(asyncio.Protocol):
    """Parses requests and writes responses; one at a time, for the clients here never pipeline.

    Args:
        on_open, on_closed: called with the connection at its beginning and end.
        on_request: called with each complete request; answers by the methods below, at once or later.

    Attributes:
        on_lost: called when the peer leaves while a request is unanswered; set by whoever answers it.
    """

    def __init__(
        self,
        on_open: Callable[[HttpConnection], None],
        on_closed: Callable[[HttpConnection], None],
        on_request: Callable[[HttpConnection, Request], None],
    ) -> None:
        self.on_lost: Callable[[], None] | None = None
        self._on_open = on_open
        self._on_closed = on_closed
        self._on_request = on_request
        self._parser = httptools.HttpRequestParser(self)
        self._request = Request()
        self._is_busy = False
        self._keep_alive = True
        self._is_lost = False
        self._received_at_s = 0.0

    def answer(self, begin: Callable[[], None]) -> None:
        """Begins the answer by `begin`; if the peer has left by now, whoever answers is told right after."""
        begin()
        if self._is_lost:
            self._tell_lost()

    # ---- writing

    def respond(self, status: int, content: bytes, content_type: str, **headers: str) -> None:
        """Writes a whole response."""
        head = self._head(status, {"content-type": content_type, "content-length": str(len(content)), **headers})
        self._transport.write(head + content)
        self._answered()

    def respond_json(self, status: int, obj: Any, **headers: str) -> None:
        """Writes a whole response of JSON."""
        self.respond(status, orjson.dumps(obj), "application/json", **headers)

    def begin_stream(self) -> None:
        """Writes the head of an event stream."""
        headers = {"content-type": "text/event-stream; charset=utf-8", "transfer-encoding": "chunked"}
        self._transport.write(self._head(200, headers))

    def send_event(self, data: bytes, *, is_last: bool = False) -> None:
        """Writes one `data:` event, with the end of the stream if it is the last."""
        end = b"\r\n0\r\n\r\n" if is_last else b"\r\n"
        self._transport.write(b"%x\r\ndata: %b\n\n%b" % (len(data) + 8, data, end))
        if is_last:
            self._answered()

    def abort(self) -> None:
        """Closes the socket at once; nobody is told that the peer left, for it did not."""
        self.on_lost = None
        self._transport.abort()

    def reset(self) -> None:
        """Closes the socket at once, as the end of the process would; an unanswered request counts as left."""
        self._transport.abort()

    def _head(self, status: int, headers: dict[str, str]) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}", "server: fake"]
        lines += [f"{name.replace('_', '-')}: {value}" for name, value in headers.items()]
        if not self._keep_alive:
            lines.append("connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    def _answered(self) -> None:
        self.on_lost = None
        self._is_busy = False
        if not self._keep_alive:
            self._transport.close()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """A client has connected."""
        self._transport = cast("asyncio.Transport", transport)
        self._on_open(self)

    def data_received(self, data: bytes) -> None:
        """Lets the parser take the data apart."""
        self._received_at_s = perf_counter()
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError:
            raise  # a mistake in this package, not in the request
        except httptools.HttpParserError as error:
            self._keep_alive = False
            self.respond(400, str(error).encode(), "text/plain")

    def connection_lost(self, exc: Exception | None) -> None:
        """The client has left, or the socket was closed here."""
        self._is_lost = True
        self._tell_lost()
        self._on_closed(self)

    def _tell_lost(self) -> None:
        on_lost, self.on_lost = self.on_lost, None
        if on_lost is not None:
            on_lost()

    # ---- called by the parser

    def on_message_begin(self) -> None:
        """A request begins."""
        if self._is_busy:
            self._transport.abort()
        self._request = Request()

    def on_url(self, url: bytes) -> None:
        """Takes the request's target."""
        self._request.path += url.decode("ascii", "replace")

    def on_header(self, name: bytes, value: bytes) -> None:
        """Takes one header line."""
        self._request.headers[name.lower()] = value

    def on_body(self, data: bytes) -> None:
        """Takes a piece of body."""
        self._request.body += data

    def on_message_complete(self) -> None:
        """Hands the request on."""
        request = self._request
        request.method = self._parser.get_method().decode("ascii")
        request.received_at_s = self._received_at_s
        self._keep_alive = self._parser.should_keep_alive()
        self._is_busy = True
        self._on_request(self, request)
