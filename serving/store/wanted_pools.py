"""Which pools are to run or to end beyond what the configuration says; the running stack looks every second."""

from __future__ import annotations

import redis.asyncio

from serving.store.connection import KEY_PREFIX, store_errors, text

WANTED_KEY = f"{KEY_PREFIX}pools-wanted"


async def ask(client: redis.asyncio.Redis, pool_id: str, run: bool) -> None:
    """Asks for a pool to run or to end. Raises StoreUnavailable."""
    with store_errors("ask for a pool"):
        await client.hset(WANTED_KEY, pool_id, "run" if run else "end")


async def asked(client: redis.asyncio.Redis) -> dict[str, bool]:
    """What was asked for: True to run, False to end. Raises StoreUnavailable."""
    with store_errors("read which pools are wanted"):
        found = await client.hgetall(WANTED_KEY)
    return {text(pool_id): text(wish) == "run" for pool_id, wish in found.items()}
