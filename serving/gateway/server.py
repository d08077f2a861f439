"""A worker's server: it takes connections once it can serve them, and when it is told to end it loses none.

    start ─▶ a routing table ─▶ listens, says so ─▶ serves ─ SIGTERM ─▶ listens no more ─▶ streams end ─▶ ends
                                                                └── at most drain_timeout_s, then cancelled

A supervisor that replaces workers keeps their listening socket: connections that wait in it are the successor's.
Without one the worker listens at once on a socket of its own, and /health tells when it can serve.
"""

from __future__ import annotations

import asyncio
import gc
import logging
import os
import socket
import sys
from types import FrameType
from typing import Any

import uvicorn
from starlette.types import Receive, Scope, Send
from uvicorn.config import STARTUP_FAILURE

from serving.core.errors import Unavailable
from serving.gateway.app import Gateway
from serving.gateway.http_errors import error_response
from serving.gateway.sockets import BACKLOG

logger = logging.getLogger("serving.gateway")

# How often the date of responses is set anew.
TICK_S = 1.0
LOOK_S = 0.1
# What runs when the drain ends is cancelled, and then counted: its usage must not be lost.
CANCEL_S = 1.0
GC_THRESHOLDS = (20_000, 20, 50)


class Worker:
    """The gateway as one worker serves it; once the worker ends, /health says so.

    Attributes:
        is_ending: SIGTERM came. Whoever still has a connection hears it, and asks another worker.
    """

    def __init__(self, gateway: Gateway) -> None:
        self.gateway = gateway
        self.hot_paths = gateway.hot_paths
        self.max_body_bytes = gateway.max_body_bytes
        self.answer = gateway.answer
        self.cors_headers = gateway.cors_headers
        self.is_ending = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for all but the hot routes."""
        if self.is_ending and scope["type"] == "http" and scope["path"] == "/health":
            status, headers, body = error_response(Unavailable("this worker ends", retry_after_s=1.0))
            length = (b"content-length", b"%d" % len(body))
            await send({"type": "http.response.start", "status": status, "headers": [*headers, length]})
            await send({"type": "http.response.body", "body": body})
        else:
            await self.gateway(scope, receive, send)


class WorkerServer(uvicorn.Server):
    """uvicorn's server with a start and an end of its own.

    Args:
        config: the server's; its application is `worker`.
        worker: what it serves.
        drain_timeout_s: how long requests in flight may take to finish after SIGTERM.
        waits_for_table: listen only with a routing table: a predecessor serves until then.
        ready_fd: a pipe that hears when this worker serves.
    """

    def __init__(
        self,
        config: uvicorn.Config,
        worker: Worker,
        *,
        drain_timeout_s: float,
        waits_for_table: bool = False,
        ready_fd: int | None = None,
    ) -> None:
        super().__init__(config)
        self._worker = worker
        self._drain_timeout_s = drain_timeout_s
        self._waits_for_table = waits_for_table
        self._ready_fd = ready_fd
        self._loop: asyncio.AbstractEventLoop | None = None
        self._told_to_end = asyncio.Event()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """A signal came: the end begins at once, and not at the next tick."""
        super().handle_exit(sig, frame)
        self._worker.is_ending = True
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._told_to_end.set)

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Starts the application, then takes connections."""
        self._loop = asyncio.get_running_loop()
        await self.lifespan.startup()
        if self.lifespan.should_exit:
            sys.exit(STARTUP_FAILURE)
        while self._waits_for_table and self._worker.gateway.fleet.table is None and not self.should_exit:
            await self._sleep(LOOK_S)
        if self.should_exit:
            await self.lifespan.shutdown()
            return
        self.servers = [
            await self._loop.create_server(self._connection, sock=listener, backlog=BACKLOG)
            for listener in sockets or ()
        ]
        self.started = True
        _settle_memory()
        self._say_ready()

    async def main_loop(self) -> None:
        """Sets the date of responses each second until the worker is told to end."""
        while not await self.on_tick(0):
            await self._sleep(TICK_S)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        """Takes no more connections, lets what runs finish, cancels what takes too long."""
        state = self.server_state
        logger.info("ends: %d connections, %d requests in flight", len(state.connections), len(state.tasks))
        for server in self.servers:
            server.close()
        for listener in sockets or ():
            listener.close()
        deadline_s = asyncio.get_running_loop().time() + self._drain_timeout_s
        while (state.connections or state.tasks) and not self.force_exit:
            # Each time anew: a connection that was accepted just before may have been made only now.
            for connection in list(state.connections):
                connection.shutdown()
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(LOOK_S)
        await self._cancel_rest()
        if not self.force_exit:
            await self.lifespan.shutdown()

    # ----

    def _connection(self, _loop: asyncio.AbstractEventLoop | None = None) -> asyncio.Protocol:
        make: Any = self.config.http_protocol_class
        protocol: asyncio.Protocol = make(
            config=self.config, server_state=self.server_state, app_state=self.lifespan.state, _loop=_loop
        )
        return protocol

    async def _sleep(self, seconds: float) -> None:
        """Sleeps, unless the worker is told to end."""
        try:
            await asyncio.wait_for(self._told_to_end.wait(), seconds)
        except TimeoutError:
            return

    async def _cancel_rest(self) -> None:
        rest = list(self.server_state.tasks)
        if not rest:
            return
        logger.error("cancels %d requests that did not finish within %g s", len(rest), self._drain_timeout_s)
        for task in rest:
            task.cancel()
        await asyncio.wait(rest, timeout=CANCEL_S)

    def _say_ready(self) -> None:
        if self._ready_fd is None:
            return
        fd, self._ready_fd = self._ready_fd, None
        try:
            os.write(fd, b"ready\n")
        except OSError:
            logger.warning("nobody waits any more to hear that this worker serves")
        finally:
            os.close(fd)


def _settle_memory() -> None:
    """What the start has made stays, and need not be looked at again: collections took a tenth of a worker's time."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
