"""What supervisors publish: the pools they run and, a few times a second, the state of each replica.

A report that stops being renewed is not deleted: `updated_at_s` says how old it is and readers decide.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field, replace
from typing import TypeVar

import redis.asyncio

from serving.core.state import Pool, Replica, ReplicaSnapshot
from serving.store.connection import KEY_PREFIX, BrokenDocument, store_errors, text
from serving.store.documents import Codec

logger = logging.getLogger(__name__)

REPORTS_KEY = f"{KEY_PREFIX}replica-reports"
POOLS_KEY = f"{KEY_PREFIX}pools"

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class ReplicaReport:
    """One replica as its supervisor sees it at `updated_at_s` (Unix seconds).

    `snapshot` is its last scrape; `error` says why it is not ready; `phases_s` are the seconds of its cold start.
    """

    pool_id: str
    replica: Replica
    snapshot: ReplicaSnapshot | None
    updated_at_s: float
    error: str | None = None
    phases_s: dict[str, float] = field(default_factory=dict)


_REPORT = Codec(ReplicaReport, "replica report")
_POOL = Codec(Pool, "pool")


class ReplicaReports:
    """Reports and pools in the store. Every method raises StoreUnavailable when it does not answer."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client
        self._complaints: dict[str, str] = {}

    async def publish(self, report: ReplicaReport) -> None:
        """Replaces the replica's last report."""
        data = _REPORT.encode(report)
        with store_errors("publish a replica report"):
            await self._client.hset(REPORTS_KEY, report.replica.replica_id, data)

    async def all(self) -> dict[str, ReplicaReport]:
        """The last report of each replica by its id, in one round trip. An unreadable one is logged and left out."""
        with store_errors("read the replica reports"):
            found = await self._client.hgetall(REPORTS_KEY)
        return self._readable(found, _REPORT)

    async def remove(self, replica_id: str) -> None:
        """Forgets a replica that is no more; nothing happens when it is unknown."""
        with store_errors("remove a replica report"):
            await self._client.hdel(REPORTS_KEY, replica_id)

    async def publish_pool(self, pool: Pool) -> None:
        """Replaces the pool's description; its replicas come from the reports and are not stored here."""
        data = _POOL.encode(replace(pool, replicas=()))
        with store_errors("publish a pool"):
            await self._client.hset(POOLS_KEY, pool.pool_id, data)

    async def pools(self) -> dict[str, Pool]:
        """Each pool by its id, without replicas. An unreadable one is logged and left out."""
        with store_errors("read the pools"):
            found = await self._client.hgetall(POOLS_KEY)
        return self._readable(found, _POOL)

    async def remove_pool(self, pool_id: str) -> None:
        """Forgets a pool; nothing happens when it is unknown."""
        with store_errors("remove a pool"):
            await self._client.hdel(POOLS_KEY, pool_id)

    def _readable(self, found: dict[bytes | str, bytes | str], codec: Codec[T]) -> dict[str, T]:
        readable = {}
        for key, data in found.items():
            name = text(key)
            try:
                readable[name] = codec.decode(data)
            except BrokenDocument as error:
                if self._complaints.get(name) != error.message:  # read several times a second: said once
                    logger.warning("%s ignored: %s", name, error.message)
                self._complaints[name] = error.message
        return readable
