"""The routing table as a published document: in the store, in a file, in memory, and the cache a worker routes by."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import redis.asyncio

from serving.core.ports import RoutingTableSource
from serving.core.state import ROUTING_TABLE_SCHEMA, RoutingTable
from serving.store.connection import KEY_PREFIX
from serving.store.documents import Codec
from serving.store.published import (
    CachedDocument,
    DocumentKind,
    FileDocument,
    Listener,
    MemoryDocument,
    StoreDocument,
)

TABLE_KEY = f"{KEY_PREFIX}routing-table"

ROUTING_TABLE = DocumentKind(
    what="routing table",
    key=TABLE_KEY,
    field="table",
    codec=Codec(RoutingTable, "routing table", schema=ROUTING_TABLE_SCHEMA),
    summary=lambda table: f"{len(table.pools)} pools",
)


def encode(table: RoutingTable) -> bytes:
    """The table as published: one JSON object. Raises BrokenDocument for what readers would refuse."""
    return ROUTING_TABLE.codec.encode(table)


def decode(data: bytes | str) -> RoutingTable:
    """The table in `data`. Raises BrokenDocument when it is broken or of another schema."""
    return ROUTING_TABLE.codec.decode(data)


class StoreRoutingTable(StoreDocument[RoutingTable]):
    """The table in the store: source and sink."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        super().__init__(client, ROUTING_TABLE)


class FileRoutingTable(FileDocument[RoutingTable]):
    """The table in a file that is replaced in one step: source and sink."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, ROUTING_TABLE)


class MemoryRoutingTable(MemoryDocument[RoutingTable]):
    """The table in this process, for tests and the simulator: source and sink."""

    def __init__(self) -> None:
        super().__init__(ROUTING_TABLE)


class CachedRoutingTable(CachedDocument[RoutingTable]):
    """The newest table that any source had and the listener took; polled, never asked on the hot path."""

    def __init__(
        self, sources: Sequence[RoutingTableSource], on_change: Listener[RoutingTable], *, poll_s: float = 0.5
    ) -> None:
        """`sources` in the order in which they are asked; `on_change` is called for each newer table."""
        super().__init__(sources, on_change, ROUTING_TABLE, poll_s=poll_s)
