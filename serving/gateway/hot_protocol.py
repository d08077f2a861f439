"""The worker's connections: requests on hot routes become exchanges, all others go uvicorn's way to FastAPI.

When the worker ends, clients hear it in the head of their next answer. A connection without a request stays open for
a short while: its client may just be sending one, and would find it closed in its face.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any, ClassVar, Protocol
from urllib.parse import unquote_to_bytes

from serving.core.errors import BadRequest
from serving.engine.known_head import MAX_MISSES, KnownHead, known_head
from serving.gateway.cors import CorsHeaders
from serving.gateway.exchange import Exchange
from serving.gateway.http_errors import Headers
from serving.gateway.http_protocol import NOTHING, StaysHttp11

logger = logging.getLogger(__name__)

MAX_PIPELINED = 8


class HotApp(Protocol):
    """The application that the server was given."""

    hot_paths: dict[bytes, str]
    max_body_bytes: int
    cors_headers: CorsHeaders

    async def answer(self, exchange: Exchange) -> None:
        """Answers, whatever happens; raises nothing but CancelledError."""
        ...


class HotProtocol(StaysHttp11):
    """One client's connection. `cycle` is the request that was read last, an Exchange or uvicorn's own.

    Attributes:
        write_timeout_s: how long a client may leave unread what was written before its connection is aborted.
        drain_grace_s: how long a connection without a request is kept when the worker ends.
    """

    write_timeout_s: ClassVar[float] = 60.0
    drain_grace_s: ClassVar[int] = 2

    cycle: Any
    pipeline: Any
    _running: Any = None
    _unread: asyncio.TimerHandle | None = None  # while the client does not read
    _is_ending = False
    _known: KnownHead | None = None  # of the exchange read last
    _known_path = ""
    _num_misses = 0
    _app: HotApp
    _date: ClassVar[tuple[Any, bytes]] = (None, b"")

    # ---- what an exchange needs

    def write(self, data: bytes) -> bool:
        """Sends data, or keeps it until the client reads; False when the client has left."""
        if self.transport.is_closing():
            return False
        self.transport.write(data)
        return True

    def default_head(self) -> bytes:
        """Header lines that every response has."""
        headers = self.server_state.default_headers  # a new list each second
        if HotProtocol._date[0] is not headers:
            HotProtocol._date = (headers, b"".join(name + b": " + value + b"\r\n" for name, value in headers))
        return HotProtocol._date[1]

    def on_exchange_complete(self, exchange: Exchange) -> None:
        """Begins the next request, waits for one, or ends the connection."""
        if not exchange.keep_alive:
            self.transport.close()
        self.on_response_complete()

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begins the connection."""
        app: Any = self.app
        self._app = app
        super().connection_made(transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Tells every request of this connection."""
        for exchange in {self.cycle, self._running, *(cycle for cycle, _ in self.pipeline)}:
            if isinstance(exchange, Exchange):
                exchange.lost()
                self._answer_if_ready(exchange)  # so that one whose body did not come is counted too
        if isinstance(self.cycle, Exchange):
            self.cycle = None
        if isinstance(self._running, Exchange):
            self._running = None
        if self._unread is not None:
            self._unread.cancel()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client does not read."""
        super().pause_writing()
        self._unread = self.loop.call_later(self.write_timeout_s, self._give_up)
        if isinstance(self._running, Exchange):
            self._running.pause(True)

    def resume_writing(self) -> None:
        """The client reads again."""
        super().resume_writing()
        if self._unread is not None:
            self._unread.cancel()
            self._unread = None
        if isinstance(self._running, Exchange):
            self._running.pause(False)

    def data_received(self, data: bytes) -> None:
        """Answers a request whose head is that of the last one; everything else is the parser's."""
        before = self.cycle
        if (
            self._reading != NOTHING
            or self._is_ending
            or self._refusal is not None
            or (before is not None and not (before.response_complete and before.keep_alive))
        ):
            super().data_received(data)  # the parser holds a part of a request, or an answer is awaited
            return
        known = self._known
        body = None if known is None else known.body_in(data)
        if known is None or body is None or len(body) > self._app.max_body_bytes:
            super().data_received(data)
            self._learn(data, before)
        else:
            self._num_misses = 0
            exchange = Exchange(self, self._known_path, known.fields, keep_alive=True, body=body)
            self.cycle = self._running = exchange
            self._answer(exchange)

    # ---- called by the server

    def shutdown(self) -> None:
        """The worker ends: this connection does, after the answer that runs and one that its client may be asking for.

        An answer whose head is not sent says so in it. Its client may reuse a connection whose head said nothing, so
        that one is kept for a while after its answer.
        """
        if self._is_ending:
            return
        self._is_ending = True
        self.timeout_keep_alive = self.drain_grace_s
        cycle = self.cycle
        if self._is_answering:
            if not (cycle.is_started if isinstance(cycle, Exchange) else cycle.response_started):
                cycle.keep_alive = False
        elif self._reading == NOTHING and self._refusal is None:
            self.keep_idle()

    # ---- called by the parser

    def _begin(self) -> None:
        """Begins an exchange on a hot route, else uvicorn's cycle."""
        path = self._hot_path() if self.parser.get_method() == b"POST" else None
        if path is None:
            super()._begin()
        else:
            self._begin_exchange(path)
        if self._is_ending:
            self.cycle.keep_alive = False

    def on_body(self, body: bytes) -> None:
        """A piece of the body of the request that was read last."""
        exchange = self.cycle
        if not isinstance(exchange, Exchange):
            super().on_body(body)
            return
        if self._num_framing_bytes:
            self.count_body(body)
        exchange.take(body, self._app.max_body_bytes)
        if exchange.refusal is not None:
            self._answer_if_ready(exchange)

    def on_message_complete(self) -> None:
        """The request was read to its end."""
        exchange = self.cycle
        if isinstance(exchange, Exchange) and self._held_head is None:
            self._reading, self._due_s = NOTHING, None
            exchange.body_complete()
            self._answer_if_ready(exchange)
        else:
            super().on_message_complete()

    # ----

    def _give_up(self) -> None:
        logger.info("a client left its answer unread for %g s: its connection is aborted", self.write_timeout_s)
        self.transport.abort()

    def _hot_path(self) -> str | None:
        hot = self._app.hot_paths
        url: bytes = self.url
        path = hot.get(url)
        if path is None and (b"?" in url or b"%" in url or not url.startswith(b"/")):
            path = hot.get(unquote_to_bytes(self.target_path()))
        return path

    def _learn(self, data: bytes, before: Any) -> None:
        """Keeps the head of the exchange that `data` was, if it was one: whole, plain, and the only one in it."""
        exchange = self.cycle
        if (
            exchange is not before
            and isinstance(exchange, Exchange)
            and self._reading == NOTHING
            and not self.pipeline
            and exchange.keep_alive
            and exchange.refusal is None
            and not self.expect_100_continue
        ):
            self._num_misses += 1
            self._known = known_head(data, dict(reversed(self.headers))) if self._num_misses <= MAX_MISSES else None
            self._known_path = exchange.path

    def _begin_exchange(self, path: str) -> None:
        parser = self.parser
        exchange = Exchange(
            self,
            path,
            dict(reversed(self.headers)),
            keep_alive=parser.should_keep_alive() and parser.get_http_version() != "1.0",
        )
        exchange.announced(self._app.max_body_bytes, expects_continue=self.expect_100_continue)
        before, self.cycle = self.cycle, exchange
        if before is None or before.response_complete:
            self._running = exchange  # what can be answered before its body came is refused
            if exchange.refusal is not None:
                self._answer_if_ready(exchange)
        else:
            if len(self.pipeline) >= MAX_PIPELINED:  # from here on its leaving is noticed late
                self.flow.pause_reading()
            self.pipeline.appendleft((exchange, self.app))

    def refusal_headers(self) -> Headers:
        """A page must be able to read why it was refused."""
        origin = next((value for name, value in self.headers or () if name == b"origin"), None)
        return self._app.cors_headers(origin)

    def _refuse_body(self, error: BadRequest) -> None:
        exchange = self.cycle
        if isinstance(exchange, Exchange) and not exchange.response_complete:
            exchange.refusal = exchange.refusal or error
            self._answer_if_ready(exchange)
        else:
            super()._refuse_body(error)

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        if isinstance(cycle, Exchange):
            self._running = cycle
            self._answer_if_ready(cycle)
        else:
            super()._start_asgi_task(cycle, app)

    def _answer_if_ready(self, exchange: Exchange) -> None:
        if exchange is self._running and exchange.is_answerable:
            self._answer(exchange)

    def _answer(self, exchange: Exchange) -> None:
        task = self.loop.create_task(self._app.answer(exchange))
        exchange.started(task)
        self.tasks.add(task)
        task.add_done_callback(self.tasks.discard)
