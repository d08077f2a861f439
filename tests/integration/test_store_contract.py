"""One contract for every place a routing table can be published to, and the rest of the store on a real valkey."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Protocol

import pytest
import redis.asyncio

from serving.core.errors import StaleEpoch
from serving.core.state import RoutingTable
from serving.store.connection import BrokenDocument, StoreUnavailable
from serving.store.cost_table import FileCostTable, PublishedCostTable, StoreCostTable
from serving.store.replicas import REPORTS_KEY, ReplicaReport, ReplicaReports
from serving.store.reservations import ReplicaReserved, ReservationLost, reservations, reserve
from serving.store.routing_table import FileRoutingTable, MemoryRoutingTable, StoreRoutingTable
from serving.store.server import StoreServer
from tests.unit.core_examples import a_pool, a_replica, a_row, a_snapshot, a_table


class Place(Protocol):
    async def read(self) -> RoutingTable | None: ...
    async def publish(self, table: RoutingTable) -> None: ...


@pytest.fixture(params=["store", "file", "memory"])
def place(request: pytest.FixtureRequest, client: redis.asyncio.Redis, tmp_path: Path) -> Place:
    kinds: dict[str, Callable[[], Place]] = {
        "store": lambda: StoreRoutingTable(client),
        "file": lambda: FileRoutingTable(tmp_path / "tables" / "table.json"),
        "memory": MemoryRoutingTable,
    }
    return kinds[request.param]()


async def test_nothing_was_published(place: Place) -> None:
    assert await place.read() is None


async def test_what_is_published_is_read(place: Place) -> None:
    table = a_table(a_pool("p", a_replica("r1")), rows=(a_row(),))
    await place.publish(table)
    assert await place.read() == table
    await place.publish(replace(table, epoch=2, cost_rows=()))
    assert await place.read() == replace(table, epoch=2, cost_rows=())


@pytest.mark.parametrize("epoch", [1, 4, 5])
async def test_an_epoch_that_is_not_newer_is_refused(place: Place, epoch: int) -> None:
    await place.publish(a_table(epoch=5))
    with pytest.raises(StaleEpoch):
        await place.publish(a_table(epoch=epoch))
    table = await place.read()
    assert table is not None
    assert table.epoch == 5


async def test_what_cannot_be_read_is_not_published(place: Place) -> None:
    with pytest.raises(BrokenDocument):
        await place.publish(a_table(a_pool("p", usd_per_hour=float("nan"))))
    assert await place.read() is None


async def test_of_many_publishers_of_one_epoch_one_wins(place: Place) -> None:
    outcomes = await asyncio.gather(*(place.publish(a_table(epoch=1)) for _ in range(8)), return_exceptions=True)
    assert [outcome for outcome in outcomes if not isinstance(outcome, StaleEpoch)] == [None]


async def test_a_dead_store_is_said_at_once_and_keeps_its_data(
    server: StoreServer, client: redis.asyncio.Redis
) -> None:
    place = StoreRoutingTable(client)
    await place.publish(a_table(epoch=3))
    await server.stop()
    with pytest.raises(StoreUnavailable, match="cannot read the routing table"):
        await place.read()
    with pytest.raises(StoreUnavailable, match="cannot publish the routing table"):
        await place.publish(a_table(epoch=4))
    await server.start()
    table = await place.read()
    assert table is not None
    assert table.epoch == 3


async def test_a_second_store_in_the_same_folder_is_refused(server: StoreServer) -> None:
    with pytest.raises(StoreUnavailable, match=f"pid {server.pid}"):
        await StoreServer(server.data_dir).start()
    assert server.is_alive


async def test_a_killed_store_starts_again_in_its_folder(server: StoreServer, client: redis.asyncio.Redis) -> None:
    await StoreRoutingTable(client).publish(a_table(epoch=3))
    assert server.pid is not None
    os.kill(server.pid, signal.SIGKILL)
    await server.stop()
    await server.start()
    assert await StoreRoutingTable(client).read() is not None


async def test_a_socket_path_that_is_too_long_is_named(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable, match="longer than 107 bytes"):
        await StoreServer(tmp_path / ("x" * 120)).start()


async def test_reports_and_pools(client: redis.asyncio.Redis, caplog: pytest.LogCaptureFixture) -> None:
    reports = ReplicaReports(client)
    report = ReplicaReport("p", a_replica("r1"), a_snapshot("r1"), 1.5, phases_s={"load": 2.0})
    await reports.publish(report)
    await reports.publish(replace(report, error="died", snapshot=None))
    await reports.publish(replace(report, replica=a_replica("r2")))
    await client.hset(REPORTS_KEY, "r3", b"broken")
    assert await reports.all() == {
        "r1": replace(report, error="died", snapshot=None),
        "r2": replace(report, replica=a_replica("r2")),
    }
    assert "r3 ignored" in caplog.text
    await reports.remove("r1")
    assert list(await reports.all()) == ["r2"]
    await reports.publish_pool(a_pool("p", a_replica("r1")))
    assert await reports.pools() == {"p": a_pool("p")}
    await reports.remove_pool("p")
    assert await reports.pools() == {}


async def test_a_replica_is_held_by_one(client: redis.asyncio.Redis) -> None:
    held = await reserve(client, "r1", "sweep-1", ttl_s=30.0)
    with pytest.raises(ReplicaReserved, match="sweep-1"):
        await reserve(client, "r1", "sweep-2", ttl_s=30.0)
    assert await reservations(client, ["r1", "r2"]) == {"r1": "sweep-1"}
    await held.renew()
    await held.release()
    async with await reserve(client, "r1", "sweep-2", ttl_s=30.0):
        await held.release()  # no longer ours: changes nothing
        assert await reservations(client, ["r1"]) == {"r1": "sweep-2"}
        with pytest.raises(ReservationLost):
            await held.renew()
    assert await reservations(client, ["r1"]) == {}


async def test_a_reservation_renews_itself_and_ends_with_its_holder(client: redis.asyncio.Redis) -> None:
    async with await reserve(client, "r1", "sweep", ttl_s=0.3) as held:
        await asyncio.sleep(0.6)
        assert await reservations(client, ["r1"]) == {"r1": "sweep"}
        assert not held.lost
    abandoned = await reserve(client, "r2", "sweep", ttl_s=0.1)
    await asyncio.sleep(0.2)
    assert await reservations(client, ["r2"]) == {}
    with pytest.raises(ReservationLost):
        await abandoned.renew()


@pytest.mark.parametrize("kind", ["store", "file"])
async def test_the_cost_table(client: redis.asyncio.Redis, tmp_path: Path, kind: str) -> None:
    place = StoreCostTable(client) if kind == "store" else FileCostTable(tmp_path / "cost.json")
    assert await place.read() is None
    table = PublishedCostTable("run", (a_row(), a_row(concurrency=8)), 12.5)
    await place.publish(table)
    assert await place.read() == table
