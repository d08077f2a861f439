"""Taking away stored answers, for a purge command: all of a tenant, or those over an age. Keys go on protecting.

The parts are deleted and the record says that the answer was not kept. To shred a tenant's, its salt is deleted too:
what backups and the append-only file still hold can't be read without it.
"""

from __future__ import annotations

import contextlib

import redis.asyncio
from redis.exceptions import ResponseError

from serving.store.connection import store_errors, text
from serving.store.idempotency import PURGE, REPLAYS, Place


async def purge_answers(client: redis.asyncio.Redis, tenant_id: str | None = None, *, older_than_s: float = 0.0) -> int:
    """Deletes stored answers whose key was claimed `older_than_s` ago or earlier; returns how many.

    Args:
        client: of the store.
        tenant_id: whose; None is everybody's.
        older_than_s: their least age.

    Raises:
        StoreUnavailable: the store did not answer; what was purged until then stays so.
    """
    purge = client.register_script(PURGE)
    number = 0
    with store_errors("purge stored answers"):
        async for found in client.scan_iter(match=f"{REPLAYS}{tenant_id or '*'}:record:*", count=500):
            owner, _, name = text(found).removeprefix(REPLAYS).split(":")
            place = Place.of(owner, name)
            keys = [place.record, place.parts, place.quota]
            number += await purge(keys=keys, args=[int(older_than_s * 1000)])
    return number


async def shred_answers(client: redis.asyncio.Redis, tenant_id: str) -> int:
    """Deletes all stored answers of a tenant and what their key was derived from; returns how many answers.

    Raises:
        StoreUnavailable: the store did not answer; try again.
    """
    with store_errors("shred stored answers"):
        await client.delete(Place.of(tenant_id, "").salt)
    number = await purge_answers(client, tenant_id)
    # A managed store refuses and does it when it wants to; so does one that is at it.
    with store_errors("rewrite the store's file"), contextlib.suppress(ResponseError):
        await client.bgrewriteaof()
    return number
