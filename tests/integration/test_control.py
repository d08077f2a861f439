"""The control plane against a real store: what it publishes, and what it does while a source is dead."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import redis.asyncio

from serving.clock import ManualClock
from serving.control.app import ControlPlane, control_health
from serving.control.compose import Registered
from serving.control.registry_watch import RegistryWatch
from serving.core.errors import Unavailable
from serving.core.state import Pool, Replica, ReplicaState, RoutingPolicy, RoutingTable, Task
from serving.settings import ControlSettings
from serving.store.connection import connect
from serving.store.cost_table import FileCostTable, PublishedCostTable, StoreCostTable
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.reservations import reserve
from serving.store.routing_table import FileRoutingTable, StoreRoutingTable
from serving.store.server import StoreServer

POOL = Pool(
    pool_id="a",
    model="smollm2-135m",
    version="1",
    task=Task.GENERATE,
    hardware_class="cpu",
    usd_per_hour=0.04,
    max_model_len=2048,
    engine_fingerprint="e1",
    hardware_fingerprint="h1",
    replicas=(),
)


@dataclass
class Stand:
    """A store, a control plane that steps when told, and what a supervisor would do."""

    server: StoreServer
    client: redis.asyncio.Redis
    folder: Path
    clock: ManualClock = field(default_factory=ManualClock)
    registry: RegistryWatch | None = None

    @property
    def settings(self) -> ControlSettings:
        return ControlSettings(
            redis_url=self.server.url,
            routing_table_path=self.folder / "table.json",
            cost_table_path=self.folder / "cost.json",
        )

    def plane(self) -> ControlPlane:
        return ControlPlane(
            self.settings, self.client, registry=self.registry, tokens_per_byte={"smollm2-135m": 0.4}, clock=self.clock
        )

    async def report(self, replica_id: str = "a-1", state: ReplicaState = ReplicaState.READY) -> None:
        reports = ReplicaReports(self.client)
        await reports.publish_pool(POOL)
        replica = Replica(replica_id, f"http://127.0.0.1:1/{replica_id}", state)
        await reports.publish(ReplicaReport(POOL.pool_id, replica, None, self.clock.now_s()))

    async def in_store(self) -> RoutingTable | None:
        return await StoreRoutingTable(self.client).read()

    async def in_file(self) -> RoutingTable | None:
        return await FileRoutingTable(self.folder / "table.json").read()


@pytest.fixture
async def stand() -> AsyncIterator[Stand]:
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        server = StoreServer(Path(name) / "store")
        await server.start()
        client = connect(server.url)
        try:
            yield Stand(server, client, Path(name))
        finally:
            await client.aclose()
            await server.stop()


def states(table: RoutingTable | None) -> dict[str, str]:
    assert table is not None
    return {replica.replica_id: replica.state.value for pool in table.pools for replica in pool.replicas}


async def test_the_same_table_goes_to_store_and_file_and_only_when_something_changed(stand: Stand) -> None:
    await stand.report()
    plane = stand.plane()
    table = await plane.step()
    assert table is not None and table.epoch == 1
    assert await stand.in_store() == await stand.in_file() == table
    assert table.models[0].champion == "1"

    stand.clock.advance(1)
    assert (await plane.step()) == table
    health = await control_health(stand.client)
    assert health is not None and (health.epoch, health.registry_ok) == (1, None)


async def test_a_restarted_control_plane_goes_on_with_the_epochs(stand: Stand) -> None:
    await stand.report()
    await stand.plane().step()
    await stand.report(state=ReplicaState.DRAINING)
    table = await stand.plane().step()
    assert table is not None and table.epoch == 2
    await stand.client.flushall()
    await stand.report("a-2")
    table = await stand.plane().step()
    assert table is not None and table.epoch == 3


async def test_a_silent_replica_is_down_and_a_reserved_one_takes_no_requests(stand: Stand) -> None:
    await stand.report("a-1")
    await stand.report("a-2")
    plane = stand.plane()
    held = await reserve(stand.client, "a-2", "sweep", ttl_s=60)
    assert states(await plane.step()) == {"a-1": "ready", "a-2": "reserved"}
    await held.release()
    stand.clock.advance(6)
    await stand.report("a-2")
    assert states(await plane.step()) == {"a-1": "down", "a-2": "ready"}


async def test_a_published_cost_table_is_taken_up_from_whichever_is_newer(stand: Stand) -> None:
    await stand.report()
    plane = stand.plane()
    await StoreCostTable(stand.client).publish(PublishedCostTable("run1", (), 1.0))
    table = await plane.step()
    assert table is not None and table.cost_table_run_id == "run1"
    await FileCostTable(stand.folder / "cost.json").publish(PublishedCostTable("run2", (), 2.0))
    table = await plane.step()
    assert table is not None and table.cost_table_run_id == "run2"


async def test_with_the_store_dead_the_fleet_stands_and_the_file_goes_on(stand: Stand) -> None:
    await stand.report()
    plane = stand.plane()
    await plane.step()
    await stand.server.stop()
    stand.clock.advance(60)
    await FileCostTable(stand.folder / "cost.json").publish(PublishedCostTable("run2", (), 2.0))
    await plane.step()
    table = await stand.in_file()
    assert table is not None and (table.epoch, table.cost_table_run_id) == (2, "run2")
    assert states(table) == {"a-1": "ready"}

    await stand.server.start()
    assert await plane.step() == table
    assert await stand.in_store() == table, "the store gets what it missed, and old reports have time to be renewed"
    stand.clock.advance(6)
    assert states(await plane.step()) == {"a-1": "down"}


async def test_with_the_registry_dead_the_last_known_champion_stands(stand: Stand) -> None:
    answers: list[Registered | Unavailable] = [Registered({"smollm2-135m": "1"}, {"smollm2-135m": ("1", "2")})]

    def read(names: frozenset[str]) -> Registered:
        answer = answers[-1]
        if isinstance(answer, Unavailable):
            raise answer
        return answer

    stand.registry = RegistryWatch(read, poll_s=5.0)
    stand.registry.look()
    await stand.report()
    plane = stand.plane()
    first = await plane.step()
    assert first is not None and (first.models[0].champion, first.models[0].versions) == ("1", ("1", "2"))

    answers.append(Unavailable("MLflow does not answer"))
    stand.registry.look()
    assert await plane.step() == first
    health = await control_health(stand.client)
    assert health is not None and health.registry_ok is False
    # Started anew while the registry is still dead: the published table is the last known word.
    stand.registry = RegistryWatch(read, poll_s=5.0)
    assert await stand.plane().step() == first


async def test_champions_outlive_the_pools_and_the_control_plane(tmp_path: Path) -> None:
    path, known = tmp_path / "registry.json", Registered({"smollm2-135m": "1"}, {"smollm2-135m": ("1", "2")})
    uri = "http://user:secret@mlflow:5000"
    RegistryWatch(lambda names: known, 5.0, path, uri=uri).look()
    assert "secret" not in path.read_text()

    def dead(names: frozenset[str]) -> Registered:
        raise Unavailable("MLflow does not answer")

    anew = RegistryWatch(dead, 5.0, path, uri=uri)
    anew.look()
    assert (anew.last, anew.is_answering) == (known, False)
    assert RegistryWatch(dead, 5.0, path, uri="http://another:5000").last is None
    path.write_text("{")
    assert RegistryWatch(dead, 5.0, path, uri=uri).last is None


async def test_another_writers_epoch_is_read_again_not_overwritten(stand: Stand) -> None:
    await stand.report()
    plane = stand.plane()
    first = await plane.step()
    assert first is not None
    other = replace(first, epoch=7, policy=RoutingPolicy(weights={"cost": 1.0}))
    await StoreRoutingTable(stand.client).publish(other)
    table = await plane.step()
    assert table is not None and table.epoch == 8
    assert await stand.in_store() == await stand.in_file() == table


async def until_found(ask: Callable[[], Awaitable[object]], timeout_s: float) -> None:
    async with asyncio.timeout(timeout_s):
        while await ask() is None:  # noqa: ASYNC110 - another process changes it
            await asyncio.sleep(0.05)


async def start_process(stand: Stand, **env: str) -> asyncio.subprocess.Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "serving.control", env={**os.environ, **env}, stderr=asyncio.subprocess.PIPE
    )  # fmt: skip


async def test_the_process_publishes_within_two_seconds_and_ends_cleanly_on_sigterm(stand: Stand) -> None:
    process = await start_process(
        stand,
        WORKBENCH_CONTROL_REDIS_URL=stand.server.url,
        WORKBENCH_CONTROL_ROUTING_TABLE_PATH=str(stand.folder / "table.json"),
    )
    try:
        await until_found(lambda: control_health(stand.client), 20)
        await stand.report()
        await until_found(stand.in_file, 2)
    finally:
        process.send_signal(signal.SIGTERM)
        _, log = await asyncio.wait_for(process.communicate(), 10)
    assert process.returncode == 0
    assert b"epoch 1" in log and b"stopped" in log


@pytest.mark.parametrize(
    ("env", "says"),
    [
        ({}, b"WORKBENCH_CONTROL_REDIS_URL"),
        ({"WORKBENCH_CONTROL_REDIS_URI": "x"}, b"did you mean WORKBENCH_CONTROL_REDIS_URL?"),
    ],
)
async def test_settings_that_cannot_work_are_named(stand: Stand, env: dict[str, str], says: bytes) -> None:
    process = await start_process(stand, **env)
    _, log = await asyncio.wait_for(process.communicate(), 20)
    assert process.returncode == 2
    assert says in log and b"Traceback" not in log
