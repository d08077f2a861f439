"""The cost table as published for routing: the rows the router needs, in the store and in a file."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from pathlib import Path

import redis.asyncio

from serving.core.state import CostRow
from serving.store.connection import KEY_PREFIX, store_errors
from serving.store.documents import Codec, read_file, write_file

COST_TABLE_KEY = f"{KEY_PREFIX}cost-table"
COST_TABLE_SCHEMA = 1


@dataclass(frozen=True, slots=True)
class PublishedCostTable:
    """Rows of one MLflow run of experiment `cost-tables`, published at `published_at_s` (Unix seconds)."""

    run_id: str
    rows: tuple[CostRow, ...]
    published_at_s: float
    schema: int = COST_TABLE_SCHEMA


_CODEC = Codec(PublishedCostTable, "cost table", schema=COST_TABLE_SCHEMA)


class StoreCostTable:
    """The published cost table in the store; the last one published counts."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        self._client = client

    async def publish(self, table: PublishedCostTable) -> None:
        """Replaces the table. Raises StoreUnavailable, BrokenDocument."""
        data = _CODEC.encode(table)
        with store_errors("publish the cost table"):
            await self._client.set(COST_TABLE_KEY, data)

    async def read(self) -> PublishedCostTable | None:
        """The table, or None when none was published. Raises StoreUnavailable, BrokenDocument."""
        with store_errors("read the cost table"):
            data = await self._client.get(COST_TABLE_KEY)
        return None if data is None else _CODEC.decode(data)


class FileCostTable:
    """The published cost table in a file, for when the store is down."""

    def __init__(self, path: Path) -> None:
        self._path = path

    async def publish(self, table: PublishedCostTable) -> None:
        """Replaces the file in one step. Raises StoreUnavailable, BrokenDocument."""
        await asyncio.to_thread(write_file, self._path, _CODEC.encode(table))

    async def read(self) -> PublishedCostTable | None:
        """The table, or None without a file. Raises StoreUnavailable, BrokenDocument."""
        data = await asyncio.to_thread(read_file, self._path)
        return None if data is None else _CODEC.decode(data)
