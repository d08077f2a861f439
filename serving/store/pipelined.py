"""The store on the hot path: one connection a worker, calls pipelined, one write a turn of the event loop.

    send / post ──▶ queue ── end of this turn ──▶ one write ──▶ store ──▶ replies in the same order ──▶ waiters

redis-py takes a connection of a pool, a lock and a timer for each call; here a call is a future, an append and a share
of one write and one read. Off the hot path redis-py stays (`connection.py`).

Lost connections come back by themselves. Until then a call fails at once: whoever calls has something else to do. What
was sent and not answered fails too, and may have been done: make calls that can be repeated, or find out later.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha1
from typing import Any, cast
from urllib.parse import urlsplit

from redis.asyncio.connection import SSLConnection, parse_url

from serving.store.connection import StoreUnavailable
from serving.store.resp import BrokenReply, Part, Reply, ReplyParser, StoreRefused, encode

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 0.05
LONGEST_PAUSE_S = 1.0
# A store this far behind answers nobody in time.
MAX_PENDING = 20_000

OnReply = Callable[[Reply | StoreUnavailable], None]
_Waiter = asyncio.Future[Reply] | OnReply


@dataclass(frozen=True, slots=True)
class Script:
    """A Lua script that the store runs as one step, called by its digest."""

    text: str
    sha: bytes = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "sha", sha1(self.text.encode(), usedforsecurity=False).hexdigest().encode())

    def command(self, keys: Sequence[Part], args: Sequence[Part]) -> bytes:
        """The call as bytes."""
        return encode((b"EVALSHA", self.sha, len(keys), *keys, *args))

    def head(self, keys: Sequence[Part], args: Sequence[Part], num_more: int) -> bytes:
        """The call's beginning, to be kept; `num_more` arguments as `bulk()` makes them complete it."""
        _, _, rest = self.command(keys, args).partition(b"\r\n")
        return b"*%d\r\n" % (3 + len(keys) + len(args) + num_more) + rest


class StorePipe:
    """A pipelined connection to the store; belongs to the event loop that it is first used on.

    Args:
        url: as `connection.connect()` takes it: `unix://…`, `redis://…`, `rediss://…`, with user, password, database.
        timeout_s: bound on connecting and on an answer (the latter is noticed within half of it more).
        scripts: loaded on each new connection; others are loaded when they are first missed.
        rng: jitter of the pauses between attempts to connect.

    Raises:
        ValueError: the URL's scheme is none of those.
    """

    def __init__(
        self, url: str, *, timeout_s: float = 0.5, scripts: Sequence[Script] = (), rng: random.Random | None = None
    ) -> None:
        scheme = urlsplit(url).scheme
        if scheme not in ("unix", "redis", "rediss"):
            raise ValueError(f"store URL: the scheme is unix://, redis:// or rediss://, not {scheme!r}")
        self._options: dict[str, Any] = dict(parse_url(url))
        self._timeout_s = timeout_s
        self._scripts = dict.fromkeys(scripts)
        self._rng = rng or random.Random()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._link: _Link | None = None
        self._first: list[tuple[bytes, _Waiter]] = []  # what came before the first connection stood or failed
        self._connecting: asyncio.Task[None] | None = None
        self._pause: asyncio.TimerHandle | None = None
        self._num_failures = 0
        self._closed = False

    @property
    def is_up(self) -> bool:
        """Whether a connection stands; False also before the first call."""
        return self._link is not None

    async def call(self, *parts: Part) -> Reply:
        """One command's reply. Raises StoreUnavailable, of which StoreRefused is an error that the store answered."""
        return await self.send(encode(parts))

    async def script(self, script: Script, keys: Sequence[Part], args: Sequence[Part]) -> Reply:
        """What the script returns; loads it when the store does not know it. Raises StoreUnavailable."""
        self.register(script)
        try:
            return await self.send(script.command(keys, args))
        except StoreRefused as refused:
            if refused.reason != "NOSCRIPT":
                raise
        await self.load(script)
        return await self.send(script.command(keys, args))

    def register(self, *scripts: Script) -> None:
        """Scripts that each new connection brings along, so that the hot path does not miss them."""
        self._scripts.update(dict.fromkeys(scripts))

    async def load(self, *scripts: Script) -> None:
        """Brings scripts to a store that has forgotten them. Raises StoreUnavailable."""
        self.register(*scripts)
        await asyncio.gather(*(self.call(b"SCRIPT", b"LOAD", script.text) for script in scripts))

    def send(self, command: bytes) -> asyncio.Future[Reply]:
        """Sends what `encode()` or a Script made; awaiting it raises StoreUnavailable."""
        loop = self._loop
        if loop is None:
            loop = self._loop = asyncio.get_running_loop()
        waiter: asyncio.Future[Reply] = loop.create_future()
        if self._link is not None:
            self._link.put(command, waiter)
        else:
            self._put_off(command, waiter)
        return waiter

    def post(self, command: bytes, on_reply: OnReply) -> None:
        """As `send` for who does not wait: `on_reply` gets the reply or what came instead of it, and must not raise."""
        if self._link is not None:
            self._link.put(command, on_reply)
            return
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
        self._put_off(command, on_reply)

    async def close(self) -> None:
        """Ends the connection; calls in progress fail."""
        self._closed = True
        if self._pause is not None:
            self._pause.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
            await asyncio.gather(self._connecting, return_exceptions=True)
        if self._link is not None:
            self._link.close("the pipe to the store is closed")

    # ---- connecting

    def _put_off(self, command: bytes, waiter: _Waiter) -> None:
        """Waits for the very first connection; after a loss it fails at once."""
        if self._closed or self._num_failures or len(self._first) >= MAX_PENDING:
            _settle(waiter, StoreUnavailable("the store does not answer; its connection is being made again"))
            return
        self._first.append((command, waiter))
        self._begin()

    def _begin(self) -> None:
        self._pause = None
        if self._connecting is None and not self._closed:
            assert self._loop is not None  # set by the first call
            self._connecting = self._loop.create_task(self._connect())

    async def _connect(self) -> None:
        link = _Link(self._timeout_s, self._on_lost)
        try:
            async with asyncio.timeout(self._timeout_s):
                await self._open(link)
                await self._greet(link)
        except (OSError, StoreUnavailable, TimeoutError) as error:
            link.close("the connection was not made")
            self._on_failure(error)
        except asyncio.CancelledError:
            link.close("the pipe to the store is closed")
            raise
        else:
            self._on_up(link)
        finally:
            self._connecting = None

    async def _open(self, link: _Link) -> None:
        assert self._loop is not None
        options = self._options
        path = options.get("path")
        if path is not None:
            await self._loop.create_unix_connection(lambda: link, path)
            return
        host, port = options.get("host", "localhost"), options.get("port", 6379)
        tls = None
        if options.get("connection_class") is SSLConnection:
            tls = SSLConnection(**{name: value for name, value in options.items() if name.startswith("ssl_")})
        await self._loop.create_connection(lambda: link, host, port, ssl=None if tls is None else tls.ssl_context.get())

    async def _greet(self, link: _Link) -> None:
        """Who we are, which database, and our scripts. Raises StoreRefused."""
        options = self._options
        commands: list[tuple[Part, ...]] = []
        if options.get("password") is not None:
            user = () if options.get("username") is None else (options["username"],)
            commands.append(("AUTH", *user, options["password"]))
        if options.get("db"):
            commands.append(("SELECT", options["db"]))
        # PING last: a store that still loads its data, or wants a password, refuses it.
        commands += [*(("SCRIPT", "LOAD", script.text) for script in self._scripts), ("PING",)]
        waiters: list[asyncio.Future[Reply]] = []
        for command in commands:
            assert self._loop is not None
            waiters.append(self._loop.create_future())
            link.put(encode(command), waiters[-1])
        await asyncio.gather(*waiters)

    def _on_up(self, link: _Link) -> None:
        if link.is_closed:
            self._on_failure(StoreUnavailable("the store closed the connection at once"))
            return
        if self._num_failures:
            logger.info("the store answers again")
        self._num_failures = 0
        self._link = link
        first, self._first = self._first, []
        for command, waiter in first:
            link.put(command, waiter)

    def _on_lost(self, link: _Link, error: StoreUnavailable) -> None:
        if link is self._link:
            self._link = None
            self._on_failure(error)

    def _on_failure(self, error: Exception) -> None:
        if self._closed:
            return
        if not self._num_failures:
            reason = error.message if isinstance(error, StoreUnavailable) else error or type(error).__name__
            logger.warning("the store is out of reach: %s", reason)
        first, self._first = self._first, []
        self._num_failures += 1
        for _, waiter in first:
            _settle(waiter, StoreUnavailable(f"the store does not answer ({error or type(error).__name__})"))
        pause_s = min(FIRST_PAUSE_S * 2.0 ** min(self._num_failures - 1, 16), LONGEST_PAUSE_S)
        assert self._loop is not None
        self._pause = self._loop.call_later(pause_s * self._rng.uniform(0.8, 1.2), self._begin)


class _Link(asyncio.Protocol):
    """One connection: what is to be written this turn, and who waits for which reply."""

    def __init__(self, timeout_s: float, on_lost: Callable[[_Link, StoreUnavailable], None]) -> None:
        self.is_closed = False
        self._timeout_s = timeout_s
        self._on_lost = on_lost
        self._loop = asyncio.get_running_loop()
        self._transport: asyncio.Transport | None = None
        self._parser = ReplyParser()
        self._waiters: deque[_Waiter] = deque()
        self._out: list[bytes] = []
        self._num_put = 0
        self._marks = (0, 0)  # `_num_put` at the last two looks
        self._watch: asyncio.TimerHandle | None = None

    def put(self, command: bytes, waiter: _Waiter) -> None:
        """Writes `command` with all others of this turn."""
        if len(self._waiters) >= MAX_PENDING:
            _settle(waiter, StoreUnavailable(f"{MAX_PENDING} calls wait for the store already"))
            return
        if not self._out:
            self._loop.call_soon(self._flush)
        self._out.append(command)
        self._waiters.append(waiter)
        self._num_put += 1

    def close(self, reason: str) -> None:
        """Ends it; whoever waits is told why."""
        if self.is_closed:
            return
        self.is_closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._transport is not None:
            self._transport.abort()
        error = StoreUnavailable(reason)
        waiters, self._waiters = self._waiters, deque()
        self._on_lost(self, error)  # first, so that a waiter that calls again is not put on this link
        for waiter in waiters:
            _settle(waiter, error)

    def _flush(self) -> None:
        out = self._out
        if self._transport is not None and not self.is_closed:
            self._transport.write(out[0] if len(out) == 1 else b"".join(out))
        out.clear()
        if self._watch is None and not self.is_closed:
            self._marks = (0, self._num_put)
            self._watch = self._loop.call_later(self._timeout_s / 2, self._look)

    def _look(self) -> None:
        """Runs twice a timeout while somebody waits: a call that two looks have seen is too old."""
        self._watch = None
        num_answered = self._num_put - len(self._waiters)
        if num_answered < self._marks[0]:
            self.close(f"the store did not answer within {self._timeout_s:g} s")
        elif self._waiters:
            self._marks = (self._marks[1], self._num_put)
            self._watch = self._loop.call_later(self._timeout_s / 2, self._look)

    # ---- called by the event loop

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """The socket is connected."""
        self._transport = cast("asyncio.Transport", transport)
        if self.is_closed:
            self._transport.abort()

    def data_received(self, data: bytes) -> None:
        """Hands each reply to the one that waits for it."""
        try:
            replies = self._parser.feed(data)
        except BrokenReply as broken:
            self.close(broken.message)
            return
        waiters = self._waiters
        for reply in replies:
            if not waiters:
                self.close("the store answered what nobody asked")
                return
            _settle(waiters.popleft(), reply)

    def connection_lost(self, exc: Exception | None) -> None:
        """The store went away."""
        self.close(f"the store closed the connection ({exc or 'EOF'})")


def _settle(waiter: _Waiter, reply: Reply | StoreUnavailable) -> None:
    if not isinstance(waiter, asyncio.Future):
        waiter(reply)
    elif not waiter.done():  # whoever waited may have been cancelled
        if isinstance(reply, StoreUnavailable):
            waiter.set_exception(reply)
        else:
            waiter.set_result(reply)
