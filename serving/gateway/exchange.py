"""A request on a hot route and its response, straight on the client's connection.

    head ── body ──▶ complete ── handler's task ── start ── write … ── end
                        └── over the limit ──▶ the handler is told, and the rest is dropped
    the client leaves, its deadline passes ──▶ the task is cancelled; `gone` and `expired` say which

Nothing here waits: bytes go to the transport at once, and `on_pause` tells whoever writes that the client reads
too slowly. FastAPI's routes don't come here, they go the server's ordinary way.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping
from http import HTTPStatus
from typing import Protocol

from serving.core.errors import BadRequest, BodyTooLarge, ServingError
from serving.gateway.http_errors import Headers, error_response

_STATUS_LINES = {status.value: f"HTTP/1.1 {status.value} {status.phrase}\r\n".encode() for status in HTTPStatus}
_STATUS_LINES[499] = b"HTTP/1.1 499 Client Closed Request\r\n"
_AS_LINE = b"%b: %b\r\n".__mod__
_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

# A client that is still sending when it is refused would lose the answer if the socket closed on it: what it
# sends is read and dropped for at most this long.
LINGER_S = 2.0


class Connection(Protocol):
    """What an exchange needs of the connection that it came on."""

    def write(self, data: bytes) -> bool:
        """Sends data, or keeps it until the client reads; False when the client has left."""
        ...

    def default_head(self) -> bytes:
        """Header lines that every response has (date), each with its line end."""
        ...

    def on_exchange_complete(self, exchange: Exchange) -> None:
        """The response is complete: the next request may begin, or the connection ends."""
        ...


class Exchange:
    """One request and its one response.

    Attributes:
        path: the route.
        header: gives the value of a request header by its name in lower case, None without it; the first one counts.
        body: of the request; whole when the handler is called, unless `refusal` is set.
        refusal: why the body was not read: it is too large, or its length is no number.
        status: of the response; 0 before `start`.
        response_complete: the whole response was written.
        gone: the client left before that.
        expired: its own deadline passed before that.
        is_paused: the client does not read what was written.
        on_lost: asked when the client leaves whether the task goes on without it; None when it doesn't.
        on_pause: called with True when `is_paused` becomes so, with False when it reads again.
    """

    __slots__ = (
        "_chunks",
        "_connection",
        "_deadline",
        "_lingers",
        "_num_bytes",
        "_received",
        "_task",
        "body",
        "expired",
        "gone",
        "header",
        "is_paused",
        "keep_alive",
        "on_lost",
        "on_pause",
        "path",
        "refusal",
        "response_complete",
        "status",
    )

    def __init__(
        self,
        connection: Connection,
        path: str,
        headers: Mapping[bytes, bytes],
        *,
        keep_alive: bool,
        body: bytes | None = None,
    ) -> None:
        """`headers`: names in lower case. `body`: the whole one, where it has come."""
        self.path = path
        self.keep_alive = keep_alive
        self.body = body or b""
        self.refusal: BadRequest | None = None
        self.status = 0
        self.response_complete = self.gone = self.expired = self.is_paused = False
        self.on_lost: Callable[[], bool] | None = None
        self.on_pause: Callable[[bool], None] | None = None
        self._connection = connection
        self.header: Callable[[bytes], bytes | None] = headers.get
        self._chunks: list[bytes] = []
        self._num_bytes = 0
        self._received = body is not None
        self._lingers: asyncio.TimerHandle | None = None
        self._deadline: asyncio.TimerHandle | None = None
        self._task: asyncio.Task[None] | None = None

    # ---- the request

    def announced(self, max_bytes: int, *, expects_continue: bool) -> None:
        """Called when the head has come: refuses a length that is too large before the body is read."""
        length = self.header(b"content-length")
        if length is not None and not length.isdigit():
            self.refusal = BadRequest("content-length is no number")
        elif length is not None and int(length) > max_bytes:
            self.refusal = _too_large(max_bytes)
        elif expects_continue:
            self._connection.write(_CONTINUE)

    def take(self, data: bytes, max_bytes: int) -> None:
        """Takes a piece of the body; sets `refusal` when it is too much."""
        if self.refusal is not None or self.response_complete:
            return
        self._num_bytes += len(data)
        self._chunks.append(data)
        if self._num_bytes > max_bytes:
            self.refusal = _too_large(max_bytes)
            self._chunks.clear()

    def body_complete(self) -> None:
        """The client has sent everything."""
        self._received = True
        self.body = self._chunks[0] if len(self._chunks) == 1 else b"".join(self._chunks)
        self._chunks.clear()
        if self._lingers is not None:
            self._end_linger()

    # ---- the task that answers it

    def started(self, task: asyncio.Task[None]) -> None:
        """`task` answers the request; it is cancelled when the client leaves or its deadline passes."""
        self._task = task

    @property
    def is_answerable(self) -> bool:
        """Whether a task can begin to answer it, and none has."""
        return self._task is None and (self._received or self.refusal is not None or self.gone)

    def expire_in(self, seconds: float) -> None:
        """Gives the response this long from now."""
        self._deadline = asyncio.get_running_loop().call_later(seconds, self._expire)

    def lost(self) -> None:
        """The connection ended."""
        if self._lingers is not None:
            self._end_linger()
        if not self.response_complete:
            self.gone = True
            if self._task is not None and (self.on_lost is None or not self.on_lost()):
                self._task.cancel()

    def _expire(self) -> None:
        if not self.response_complete and self._task is not None:
            self.expired = True
            self._task.cancel()

    def pause(self, paused: bool) -> None:
        """The client stopped reading, or reads again."""
        self.is_paused = paused
        if self.on_pause is not None:
            self.on_pause(paused)

    # ---- the response

    @property
    def is_started(self) -> bool:
        """Whether a head was sent."""
        return self.status != 0

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Sends the head of a body that comes in chunks, and its first part in the same write."""
        self._write_head(status, headers, None, b"%x\r\n%b\r\n" % (len(data), data) if data else b"")

    def write(self, data: bytes) -> None:
        """Sends a part of a body that comes in chunks."""
        # As `write_framed` does; a stream's tokens may all come through here.
        if not self.gone and not self._connection.write(b"%x\r\n%b\r\n" % (len(data), data)):
            self.gone = True

    def write_framed(self, data: bytes) -> None:
        """Sends a part of it that is chunks already."""
        if not self.gone and not self._connection.write(data):
            self.gone = True

    def end(self, data: bytes = b"") -> None:
        """Sends the last part."""
        if data:
            self.write_framed(b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data))
        else:
            self.write_framed(b"0\r\n\r\n")
        self._completed()

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete response."""
        self._write_head(status, headers, len(body), body)
        self._completed()

    def fail(self, error: ServingError, headers: Headers) -> None:
        """Sends an error as a complete response; when the body was not read, the connection ends after it."""
        status, own, body = error_response(error)
        if self.refusal is None:
            self.whole(status, own + headers, body)
            return
        self.keep_alive = False
        self._write_head(status, own + headers, len(body), body)
        self._lingers = asyncio.get_running_loop().call_later(LINGER_S, self._end_linger)
        if self._received:
            self._end_linger()

    def _end_linger(self) -> None:
        if self._lingers is not None:
            self._lingers.cancel()
            self._lingers = None
            self._completed()

    def _write_head(self, status: int, headers: Headers, length: int | None, body: bytes = b"") -> None:
        lines = b"".join(map(_AS_LINE, headers))
        if lines.count(b"\n") != len(headers) or lines.count(b"\r") != len(headers):
            raise ValueError("a header holds a line break")
        parts = [_STATUS_LINES[status], self._connection.default_head(), lines]
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        if length is None:
            parts.append(b"transfer-encoding: chunked\r\n\r\n")
        else:
            parts.append(b"content-length: %d\r\n\r\n" % length)
        parts.append(body)
        if not self.gone and self._connection.write(b"".join(parts)):
            self.status = status
        else:
            self.gone = True

    def _completed(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
        self.response_complete = True
        self.on_pause = self.on_lost = None
        if not self.gone:
            self._connection.on_exchange_complete(self)


def _too_large(max_bytes: int) -> BodyTooLarge:
    return BodyTooLarge(f"the request's body is over the limit of {max_bytes} bytes")
