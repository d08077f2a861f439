"""Holding a replica alone: a benchmark reserves it, the control plane then shows it as RESERVED.

A reservation ends by itself after its time to live, so a benchmark that dies gives its replica back.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Sequence
from types import TracebackType

import redis.asyncio

from serving.core.errors import ServingError, StaleEpoch
from serving.store.connection import KEY_PREFIX, store_errors, text

logger = logging.getLogger(__name__)

_RENEW = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('PEXPIRE', KEYS[1], ARGV[2]) end return 0"
_RELEASE = "if redis.call('GET', KEYS[1]) == ARGV[1] then return redis.call('DEL', KEYS[1]) end return 0"


class ReplicaReserved(ServingError):
    """Somebody else holds the replica; the message names who."""

    status = 409


class ReservationLost(StaleEpoch):
    """The reservation ran out or was taken away; what was measured since may have had company."""


class Reservation:
    """A replica held by `owner`. As `async with` it renews itself and is released at the end.

    Attributes:
        lost: True once a renewal found that the reservation was no longer ours.
    """

    def __init__(self, client: redis.asyncio.Redis, replica_id: str, owner: str, value: str, ttl_s: float) -> None:
        self._client = client
        self._value = value
        self._ttl_s = ttl_s
        self._renewing: asyncio.Task[None] | None = None
        self.replica_id = replica_id
        self.owner = owner
        self.lost = False

    async def renew(self) -> None:
        """Holds on for another time to live. Raises ReservationLost, StoreUnavailable."""
        with store_errors("renew a reservation"):
            kept = await self._client.eval(_RENEW, 1, _key(self.replica_id), self._value, int(self._ttl_s * 1000))
        if not kept:
            self.lost = True
            raise ReservationLost(f"the reservation of {self.replica_id} by {self.owner} ran out")

    async def release(self) -> None:
        """Gives the replica back; nothing happens when it is no longer ours. Raises StoreUnavailable."""
        with store_errors("release a reservation"):
            await self._client.eval(_RELEASE, 1, _key(self.replica_id), self._value)

    async def __aenter__(self) -> Reservation:
        self._renewing = asyncio.create_task(self._keep_renewing())
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._renewing is not None:
            self._renewing.cancel()
            await asyncio.gather(self._renewing, return_exceptions=True)
        await self.release()

    async def _keep_renewing(self) -> None:
        while not self.lost:
            await asyncio.sleep(self._ttl_s / 3)
            try:
                await self.renew()
            except ServingError as error:
                logger.warning("%s", error.message)


async def reserve(client: redis.asyncio.Redis, replica_id: str, owner: str, ttl_s: float) -> Reservation:
    """Takes the replica for `owner` for `ttl_s` seconds, atomically.

    Raises:
        ReplicaReserved: somebody holds it.
        StoreUnavailable: the store does not answer.
    """
    value = f"{owner}\n{secrets.token_hex(8)}"
    with store_errors("reserve a replica"):
        taken = await client.set(_key(replica_id), value, nx=True, px=int(ttl_s * 1000))
    if not taken:
        holder = (await reservations(client, [replica_id])).get(replica_id, "somebody who just let it go")
        raise ReplicaReserved(f"replica {replica_id} is reserved by {holder}; wait until it is released")
    return Reservation(client, replica_id, owner, value, ttl_s)


async def reservations(client: redis.asyncio.Redis, replica_ids: Sequence[str]) -> dict[str, str]:
    """Which of `replica_ids` are reserved, and by whom, in one round trip. Raises StoreUnavailable."""
    if not replica_ids:
        return {}
    with store_errors("read the reservations"):
        found = await client.mget([_key(replica_id) for replica_id in replica_ids])
    pairs = zip(replica_ids, found, strict=True)
    return {replica_id: text(value).split("\n")[0] for replica_id, value in pairs if value is not None}


def _key(replica_id: str) -> str:
    return f"{KEY_PREFIX}reservation:{replica_id}"
