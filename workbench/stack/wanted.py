"""What other commands ask of the running stack: pools to run or to end, parts to replace; it looks every second."""

from __future__ import annotations

import json
import secrets
from dataclasses import asdict, dataclass, replace
from typing import cast

import redis.asyncio

from serving.store.connection import KEY_PREFIX, store_errors, text
from serving.store.wanted_pools import WANTED_KEY

RESTARTS_KEY = f"{KEY_PREFIX}restarts-wanted"
# How long a command may look after a restart that is over.
TOLD_FOR_S = 600


async def forget(client: redis.asyncio.Redis) -> None:
    """Begins without wishes: a stack starts as its configuration says. Raises StoreUnavailable."""
    with store_errors("forget which pools were wanted"):
        await client.delete(WANTED_KEY, RESTARTS_KEY)


@dataclass(frozen=True, slots=True)
class Replaced:
    """A process that another took the place of; `seconds` from the successor's start to the old one's end."""

    name: str
    old_pid: int
    new_pid: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Restart:
    """A restart as far as it has come.

    Attributes:
        restart_id: of the request.
        steps: what happened, as (part, what).
        replaced: who took whose place.
        is_over: nothing follows.
        error: why it did not come to its end.
    """

    restart_id: str
    steps: tuple[tuple[str, str], ...] = ()
    replaced: tuple[Replaced, ...] = ()
    is_over: bool = False
    error: str | None = None

    def with_step(self, part: str, what: str) -> Restart:
        """The same with one step more."""
        return replace(self, steps=(*self.steps, (part, what)))


async def ask_restart(client: redis.asyncio.Redis) -> str:
    """Asks for the gateway's workers to be replaced; the id under which it is told. Raises StoreUnavailable."""
    restart_id = secrets.token_hex(8)
    with store_errors("ask for a restart"):
        await client.rpush(RESTARTS_KEY, restart_id)
    return restart_id


async def withdraw_restart(client: redis.asyncio.Redis, restart_id: str) -> bool:
    """Takes a request back; False when it was taken up before. Raises StoreUnavailable."""
    with store_errors("take a request for a restart back"):
        return bool(await client.lrem(RESTARTS_KEY, 0, restart_id))


async def next_restart(client: redis.asyncio.Redis) -> str | None:
    """Takes up the oldest request, if there is one. Raises StoreUnavailable."""
    with store_errors("read which restarts are wanted"):
        found = await client.lpop(RESTARTS_KEY)
    return None if found is None else text(cast("bytes | str", found))


async def tell_restart(client: redis.asyncio.Redis, restart: Restart) -> None:
    """Tells how far a restart has come. Raises StoreUnavailable."""
    with store_errors("tell how far a restart has come"):
        await client.set(_told_key(restart.restart_id), json.dumps(asdict(restart)), ex=TOLD_FOR_S)


async def restart_told(client: redis.asyncio.Redis, restart_id: str) -> Restart | None:
    """How far a restart has come; None before it was taken up. Raises StoreUnavailable."""
    with store_errors("read how far a restart has come"):
        found = await client.get(_told_key(restart_id))
    if found is None:
        return None
    data = json.loads(found)
    return Restart(
        data["restart_id"],
        tuple((part, what) for part, what in data["steps"]),
        tuple(Replaced(**one) for one in data["replaced"]),
        data["is_over"],
        data["error"],
    )


def _told_key(restart_id: str) -> str:
    return f"{KEY_PREFIX}restart:{restart_id}"
