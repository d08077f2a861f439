"""A connection to the store, and the one error that its absence becomes."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit

import redis.asyncio
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError

from serving.core.errors import ServingError, Unavailable

KEY_PREFIX = "workbench:"


class StoreUnavailable(Unavailable):
    """The store did not answer in time or refused; whoever can goes on from its cache or file."""


class BrokenDocument(ServingError):
    """What was published cannot be read: not JSON, another schema, a field missing or of a wrong type."""


def connect(url: str, *, timeout_s: float = 0.5, max_connections: int = 64) -> redis.asyncio.Redis:
    """A client of the store at `url`; connects when first used and fails fast.

    Args:
        url: `unix:///path/to/socket`, `redis://host:port[/db]` or `rediss://…`.
        timeout_s: bound on connecting and on each answer. Calls are not retried: callers poll anyway.
        max_connections: bound on the client's pool.

    Raises:
        ValueError: the URL's scheme is none of those.
    """
    scheme = urlsplit(url).scheme
    if scheme not in ("unix", "redis", "rediss"):
        raise ValueError(f"store URL {url!r}: the scheme is unix://, redis:// or rediss://, not {scheme!r}")
    return redis.asyncio.Redis.from_url(
        url,
        socket_timeout=timeout_s,
        socket_connect_timeout=timeout_s,
        max_connections=max_connections,
        retry=Retry(NoBackoff(), 0),
    )


def text(value: bytes | str) -> str:
    """What the store answered, as text; the client's types allow both."""
    return value if isinstance(value, str) else value.decode(errors="replace")


@contextmanager
def store_errors(doing: str) -> Iterator[None]:
    """Turns whatever the client raises inside the block into StoreUnavailable.

    The client can lose a cancellation that comes while it waits for an answer (redis-py 8.1: one in six); the
    task's own count still knows of it, so that a loop over store calls ends when it is told to.

    Args:
        doing: what was tried, for the message: "read the routing table".
    """
    task = _current_task()
    num_cancels = task.cancelling() if task is not None else 0
    try:
        yield
    except (RedisError, OSError) as error:
        raise StoreUnavailable(
            f"cannot {doing}: the store does not answer ({error or type(error).__name__})"
        ) from error
    if task is not None and task.cancelling() > num_cancels:
        raise asyncio.CancelledError


def _current_task() -> asyncio.Task[object] | None:
    try:
        return asyncio.current_task()
    except RuntimeError:  # no loop runs here
        return None
