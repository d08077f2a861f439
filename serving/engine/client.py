"""The HTTP/1.1 client to engines, used by the gateway's relay and by the load generator.

It is small and close to the socket because both need the time at which data came, thousands of streams at once,
and an `abort` that the engine notices. Connections are kept alive in a pool per base URL. Nothing is queued here:
beyond `max_connections` a request fails at once, for the queues that bound waiting are the gateway's.
"""

from __future__ import annotations

import asyncio
import ssl as ssl_module
from collections.abc import Sequence
from time import perf_counter
from typing import Any
from urllib.parse import urlsplit

import orjson

from serving.core.errors import UpstreamError
from serving.engine.connection import Connection
from serving.engine.errors import ConnectFailed, ConnectionLost, UnexpectedStatus
from serving.engine.response import EngineResponse

__all__ = ["ConnectFailed", "ConnectionLost", "EngineClient", "EngineResponse", "UnexpectedStatus"]

# vLLM's server closes idle connections after 5 s: leave before it does, so that no request meets a closing one.
IDLE_LIMIT_S = 4.0
JSON_TIMEOUT_S = 10.0
MAX_KEPT_STARTS = 64
_FRAMING_HEADERS = frozenset({b"host", b"content-length", b"transfer-encoding", b"connection", b"expect"})
_METHODS_WITH_BODY = frozenset({"POST", "PUT", "PATCH"})


class EngineClient:
    """Speaks HTTP/1.1 to one base URL; belongs to the event loop that it is first used on.

    Args:
        base_url: `http://host:port` or `https://…`, with an optional path that is put before every path.
        max_connections: open connections at most; each carries one request at a time.
        connect_timeout_s: bound on connecting, TLS handshake included.
        ssl: TLS context for https; the system's defaults when None.

    Raises:
        ValueError: `base_url` is no http(s) URL with a host.
    """

    def __init__(
        self,
        base_url: str,
        *,
        max_connections: int = 4096,
        connect_timeout_s: float = 2.0,
        ssl: ssl_module.SSLContext | None = None,
    ) -> None:
        parts = urlsplit(base_url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"base_url must be http://host:port or https://host:port, not {base_url!r}")
        is_tls = parts.scheme == "https"
        self.base_url = base_url
        self._host = parts.hostname
        self._port = parts.port or (443 if is_tls else 80)
        self._path_prefix = parts.path.rstrip("/")
        self._ssl = (ssl or ssl_module.create_default_context()) if is_tls else None
        self._host_header = parts.netloc.rpartition("@")[2].encode("ascii")
        self._max_connections = max_connections
        self._connect_timeout_s = connect_timeout_s
        self._idle: list[Connection] = []  # the most recently used is last, and used first
        self._open: set[Connection] = set()
        self._num_connecting = 0
        self._closed = False
        self._starts: dict[tuple[str, str], bytes] = {}

    async def request(
        self,
        method: str,
        path: str,
        *,
        headers: Sequence[tuple[bytes, bytes]] = (),
        body: bytes = b"",
        timeout_s: float | None = None,
    ) -> EngineResponse:
        """Sends a request and returns when the response's head has come.

        Args:
            method: any but HEAD.
            path: with the query, percent-encoded.
            headers: without those that frame the message (host, content-length, …): they are set here.
            body: the whole body.
            timeout_s: seconds from sending until the response must be complete; None waits without bound.

        Raises:
            ConnectFailed: nothing was sent.
            ConnectionLost: the response's head did not come.
            ValueError: a header or the method is not one that can be sent.
        """
        message = self._encode(method, path, headers, body)
        connection = self._take_idle() or await self._connect()
        response = connection.send(message, timeout_s)
        try:
            while response.head_at_s == 0.0:
                await response.head_or_failure()
        except asyncio.CancelledError:
            response.abort()
            raise
        return response

    async def get_json(self, path: str, *, timeout_s: float = JSON_TIMEOUT_S) -> Any:
        """The JSON at `path`.

        Raises:
            UpstreamError: not reached, status other than 2xx (`UnexpectedStatus`), or no JSON.
        """
        return await self._json("GET", path, b"", timeout_s)

    async def post_json(self, path: str, obj: Any, *, timeout_s: float = JSON_TIMEOUT_S) -> Any:
        """The JSON answer to `obj` posted as JSON; None when the answer is empty.

        Raises:
            UpstreamError: as `get_json`.
        """
        return await self._json("POST", path, orjson.dumps(obj), timeout_s)

    async def close(self) -> None:
        """Closes every connection; requests in flight end with `ConnectionLost`."""
        self._closed = True
        self._idle.clear()
        for connection in list(self._open):
            connection.close()
        await asyncio.sleep(0)  # lets the transports report their end

    async def __aenter__(self) -> EngineClient:
        return self

    async def __aexit__(self, *exc_info: object) -> None:
        await self.close()

    async def _json(self, method: str, path: str, body: bytes, timeout_s: float) -> Any:
        headers = [(b"content-type", b"application/json")] if body else []
        async with await self.request(method, path, headers=headers, body=body, timeout_s=timeout_s) as response:
            answer = await response.read()
        where = f"{method} {self.base_url}{path}"
        if not 200 <= response.status < 300:
            text = answer[:300].decode("utf-8", "replace")
            raise UnexpectedStatus(
                f"{where} answered {response.status}: {text}", engine_status=response.status, body=answer
            )
        if not answer:
            return None
        try:
            return orjson.loads(answer)
        except orjson.JSONDecodeError as error:
            raise UpstreamError(f"{where} answered {response.status} with what is no JSON: {error}") from error

    def _encode(self, method: str, path: str, headers: Sequence[tuple[bytes, bytes]], body: bytes) -> bytes:
        start = self._starts.get((method, path)) or self._start_of(method, path)
        lines = [start]
        for name, value in headers:
            if name.lower() in _FRAMING_HEADERS:
                raise ValueError(f"the client sets {name!r} itself")
            lines.append(name + b": " + value)
        if body or method in _METHODS_WITH_BODY:
            lines.append(b"content-length: %d" % len(body))
        head = b"\r\n".join(lines)
        num_breaks = len(lines)  # one in `start`, the others between the lines
        if head.count(b"\n") != num_breaks or head.count(b"\r") != num_breaks:
            raise ValueError(f"line break inside the request's head: {head!r}")
        return head + b"\r\n\r\n" + body

    def _start_of(self, method: str, path: str) -> bytes:
        """The request line and the host, two lines of the head; kept for the paths that come again and again."""
        if method == "HEAD":
            raise ValueError("HEAD is not supported: its answer announces a body that never comes")
        target = self._path_prefix.encode("ascii") + path.encode("ascii")
        start = b"%b %b HTTP/1.1\r\nhost: %b" % (method.encode("ascii"), target, self._host_header)
        if len(self._starts) < MAX_KEPT_STARTS:
            self._starts[method, path] = start
        return start

    def _take_idle(self) -> Connection | None:
        oldest_s = perf_counter() - IDLE_LIMIT_S
        while self._idle:
            connection = self._idle.pop()
            if connection.idle_since_s >= oldest_s and connection.is_usable():
                return connection
            connection.close()
        return None

    async def _connect(self) -> Connection:
        if self._closed:
            raise ConnectFailed(f"the client of {self.base_url} is closed")
        if len(self._open) + self._num_connecting >= self._max_connections:
            raise ConnectFailed(f"all {self._max_connections} connections to {self.base_url} are in use")
        loop = asyncio.get_running_loop()
        self._num_connecting += 1
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self.base_url, self._idle.append, self._on_closed),
                    self._host,
                    self._port,
                    ssl=self._ssl,
                )
        except TimeoutError as error:
            raise ConnectFailed(f"{self.base_url} did not accept within {self._connect_timeout_s:g} s") from error
        except OSError as error:
            raise ConnectFailed(f"cannot connect to {self.base_url}: {error}") from error
        finally:
            self._num_connecting -= 1
        if connection.is_closing():
            raise ConnectFailed(f"{self.base_url} accepted a connection and closed it at once")
        self._open.add(connection)
        return connection

    def _on_closed(self, connection: Connection) -> None:
        self._open.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)
