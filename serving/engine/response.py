"""An engine's response as it is read: what has come of it, and who waits for more."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Mapping
from types import TracebackType
from typing import TYPE_CHECKING

from serving.core.errors import ErrorCode
from serving.engine.errors import ConnectionLost

if TYPE_CHECKING:
    from serving.engine.connection import Connection

RESUME_BELOW_BYTES = 256 * 1024


class EngineResponse:
    """A response whose head has come; the body is read by `chunks()` or `read()`, by one reader, once.

    Whoever holds it reads it to its end or calls `abort()`; `async with` does the latter by itself. A response
    left alone keeps its connection.

    Attributes:
        status: HTTP status.
        headers: names in lower case; repeated headers are joined by a comma. The content-length may be left out.
        sent_at_s: time.perf_counter() right before the request was written.
        head_at_s: time.perf_counter() when the data that completed the response's head came.
        is_between_chunks: whether what comes next begins a chunk and is offered to `forward`'s splice as it comes.
    """

    __slots__ = (
        "_buffered_bytes",
        "_chunks",
        "_complete",
        "_connection",
        "_due_s",
        "_error",
        "_on_end",
        "_piece",
        "_received_any",
        "_sink",
        "_splice",
        "_waiter",
        "head_at_s",
        "headers",
        "is_between_chunks",
        "sent_at_s",
        "status",
    )

    def __init__(self, connection: Connection) -> None:
        self.status = 0
        self.headers: Mapping[bytes, bytes] = {}
        self.sent_at_s = 0.0
        self.head_at_s = 0.0
        self._connection: Connection | None = connection
        self._chunks: deque[tuple[float, bytes]] = deque()
        self._buffered_bytes = 0
        self._complete = False
        self.is_between_chunks = False
        self._error: ConnectionLost | None = None
        self._received_any = False
        self._sink: Callable[[float, bytes], None] | None = None
        self._splice: Callable[[bytes], bool] | None = None
        self._on_end: Callable[[ConnectionLost | None], None] | None = None
        self._piece = b""  # for the sink, until all that came at a time is taken apart
        self._due_s: float | None = None  # by the loop's clock
        self._waiter: asyncio.Future[None] | None = None

    @property
    def is_complete(self) -> bool:
        """Whether the whole body has come from the engine (it may still be unread)."""
        return self._complete

    async def chunks(self) -> AsyncIterator[tuple[float, bytes]]:
        """Body data as it came from the socket, with HTTP chunk framing removed.

        Yields:
            `(received_at_s, data)`; `received_at_s` is time.perf_counter() at the socket callback.

        Raises:
            ConnectionLost: after the data that had come before the loss.
        """
        buffered = self._chunks
        while True:
            while buffered:
                chunk = buffered.popleft()
                self._taken(len(chunk[1]))
                yield chunk
            if self._error is not None:
                raise self._error
            if self._complete:
                return
            await self._wait()

    async def read(self) -> bytes:
        """The whole body.

        Raises:
            ConnectionLost: it did not come to its end.
        """
        # Not by way of `chunks()`: most answers have come whole by now, and an asynchronous iterator is slow to begin.
        while not self._complete:
            if self._error is not None:
                raise self._error
            self._buffered_bytes = 0
            self.resume()
            await self._wait()
        chunks = self._chunks
        if len(chunks) == 1:
            return chunks.popleft()[1]
        body = b"".join([data for _, data in chunks])
        chunks.clear()
        return body

    def forward(
        self,
        sink: Callable[[float, bytes], None],
        on_end: Callable[[ConnectionLost | None], None],
        splice: Callable[[bytes], bool] | None = None,
    ) -> None:
        """Hands the body to `sink` right in the socket's callback, instead of to `chunks()`; what has come first.

        Args:
            sink: takes `(received_at_s, data)`: all that came at a time in one piece.
            on_end: called once after the last data, with what was lost if it did not come to its end.
            splice: offered what came as it came, framing included, where a chunk begins. When it says True, that was
                whole chunks, it is done with, and neither parser nor sink sees it.
        """
        while self._chunks:
            sink(*self._chunks.popleft())
        self._buffered_bytes = 0
        if self._complete or self._error is not None:
            on_end(self._error)
        else:
            self._sink, self._on_end, self._splice = sink, on_end, splice
            self.resume()

    async def ended(self) -> None:
        """Returns when the whole body has come and was handed to `forward`'s sink.

        Raises:
            ConnectionLost: it did not come to its end.
        """
        while not self._complete:
            if self._error is not None:
                raise self._error
            await self._wait()

    def pause(self) -> None:
        """Reads no more from the engine until `resume()`."""
        if self._connection is not None:
            self._connection.pause()

    def resume(self) -> None:
        """Reads on."""
        if self._connection is not None:
            self._connection.resume()

    def abort(self) -> None:
        """Closes the socket, by which the engine learns to stop the work. Does nothing once complete."""
        if self._connection is not None:
            self._fail("the request was aborted by this side")

    async def __aenter__(self) -> EngineResponse:
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.abort()

    def head_or_failure(self) -> asyncio.Future[None]:
        """Done with the next thing that happens, while `head_at_s` is 0.

        Raises:
            ConnectionLost: the head did not come.
        """
        if self._error is not None:
            raise self._error
        return self._wait()

    def _on_head(self, status: int, headers: Mapping[bytes, bytes], at_s: float) -> None:
        self.status = status
        self.headers = headers
        self.head_at_s = at_s

    def _wait(self) -> asyncio.Future[None]:
        """Done with the next thing that happens."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        return waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # whoever waited may have been cancelled
            waiter.set_result(None)

    def _taken(self, num_bytes: int) -> None:
        self._buffered_bytes -= num_bytes
        if self._buffered_bytes < RESUME_BELOW_BYTES and self._connection is not None:
            self._connection.resume()

    def _splices(self, data: bytes) -> bool:
        """Whether `data`, which came at a time, was one chunk and so the next data begins one.

        It was if it is what frames the piece that the parser gave of it, and nothing of the piece could be framing.
        """
        piece = self._piece
        return (
            self._splice is not None
            and piece.endswith(b"\n\n")
            and not piece.endswith(b"\n\n\n")
            and b"\r" not in piece
            and data == b"%x\r\n%b\r\n" % (len(piece), piece)
        )

    def _hand_over(self) -> None:
        piece, self._piece = self._piece, b""
        if self._sink is not None and self._connection is not None:
            self._sink(self._connection.received_at_s, piece)

    def _finish(self) -> None:
        self._complete = True
        self._detach()

    def _fail(self, message: str, code: ErrorCode | None = None) -> None:
        """Ends the response with an error and closes its socket."""
        connection = self._connection
        self._error = ConnectionLost(message, received_any=self._received_any, code=code)
        self._detach()
        if connection is not None:
            connection.drop()

    def _detach(self) -> None:
        if self._piece:
            self._hand_over()
        self._connection = None
        self._sink = self._splice = None
        self.is_between_chunks = False
        self._wake()
        if self._on_end is not None:
            on_end, self._on_end = self._on_end, None
            on_end(self._error)
