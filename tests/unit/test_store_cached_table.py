"""The cache a worker serves from: the newest of all sources, and the old one as long as there is no better."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.core.errors import StaleEpoch
from serving.core.state import RoutingTable
from serving.store.connection import StoreUnavailable
from serving.store.routing_table import CachedRoutingTable, FileRoutingTable, MemoryRoutingTable
from tests.unit.core_examples import a_table


class DeadSource:
    async def read(self) -> RoutingTable | None:
        raise StoreUnavailable("the store does not answer")


async def a_source(epoch: int) -> MemoryRoutingTable:
    source = MemoryRoutingTable()
    await source.publish(a_table(epoch=epoch))
    return source


async def test_the_newest_counts_wherever_it_is() -> None:
    taken: list[int] = []
    cache = CachedRoutingTable([await a_source(3), await a_source(5)], lambda table: taken.append(table.epoch))
    assert await cache.refresh()
    assert not await cache.refresh()
    assert taken == [5]


async def test_a_dead_source_is_no_obstacle_and_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    cache = CachedRoutingTable([DeadSource(), await a_source(2)], lambda table: None)
    assert await cache.refresh()
    await cache.refresh()
    assert cache.current is not None
    assert caplog.text.count("does not answer") == 1


async def test_an_older_table_never_replaces_a_newer_one() -> None:
    old, cache_of = await a_source(2), await a_source(9)
    cache = CachedRoutingTable([cache_of], lambda table: None)
    await cache.refresh()
    behind = CachedRoutingTable([old], lambda table: None)
    behind.current = cache.current
    assert not await behind.refresh()
    assert behind.current is not None
    assert behind.current.epoch == 9


async def test_a_refused_table_is_logged_once_and_the_next_best_taken(caplog: pytest.LogCaptureFixture) -> None:
    def only_below_five(table: RoutingTable) -> None:
        if table.epoch >= 5:
            raise ValueError("unknown scorer")

    cache = CachedRoutingTable([await a_source(6), await a_source(4)], only_below_five)
    assert await cache.refresh()
    await cache.refresh()
    assert cache.current is not None
    assert cache.current.epoch == 4
    assert caplog.text.count("epoch 6 refused: unknown scorer") == 1


async def test_a_broken_file_keeps_the_table_and_is_healed_by_the_next_publication(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "table.json"
    source = FileRoutingTable(path)
    cache = CachedRoutingTable([source], lambda table: None)
    await source.publish(a_table(epoch=3))
    await cache.refresh()
    path.write_bytes(path.read_bytes()[:40])
    assert not await cache.refresh()
    assert cache.current is not None
    assert str(path) in caplog.text
    await source.publish(a_table(epoch=4))
    assert await cache.refresh()
    with pytest.raises(StaleEpoch):
        await source.publish(a_table(epoch=4))
