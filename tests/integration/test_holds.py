"""Holding a replica through a real store, with a control plane that does nothing but show reservations."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import redis.asyncio

from serving.clock import ManualClock
from serving.core.state import Pool, Replica, ReplicaState, RoutingTable, Task
from serving.store.connection import connect
from serving.store.reservations import ReplicaReserved, reservations, reserve
from serving.store.server import StoreServer
from tests.measured import make_replica
from workbench.sweeps.cells import MeasuredReplica
from workbench.sweeps.holds import NotHeld, StoreHold, is_of_a_dead_process, owner_here

IDS = ("fake-model-cpu-0", "fake-model-cpu-1", "fake-model-cpu-2")


def table_of(states: dict[str, ReplicaState]) -> RoutingTable:
    replicas = tuple(Replica(name, "http://127.0.0.1:1", state) for name, state in states.items())
    pool = Pool("p", "fake-model", "1", Task.GENERATE, "cpu", 0.04, 2048, "e", "h", replicas)
    other = replace(pool, pool_id="q", version="2", replicas=(Replica("other", "http://x", ReplicaState.READY),))
    return RoutingTable(1, 0.0, (), (pool, other))


class Shown:
    """The table as a control plane would publish it: a reserved replica is RESERVED."""

    def __init__(self, store: redis.asyncio.Redis, *, is_alive: bool = True) -> None:
        self.store = store
        self.is_alive = is_alive

    async def read(self) -> RoutingTable:
        held = await reservations(self.store, IDS) if self.is_alive else {}
        return table_of({name: ReplicaState.RESERVED if name in held else ReplicaState.READY for name in IDS})


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[redis.asyncio.Redis]:
    server = StoreServer(tmp_path)
    await server.start()
    async with aclosing(connect(server.url)) as client:
        yield client
    await server.stop()


@pytest.fixture
def replica() -> MeasuredReplica:
    return make_replica("http://127.0.0.1:1")


def hold_of(store: redis.asyncio.Redis, replica: MeasuredReplica, *, is_alive: bool = True) -> StoreHold:
    clock = ManualClock()

    async def sleep(seconds: float) -> None:
        clock.advance(seconds)

    shown = Shown(store, is_alive=is_alive)
    return StoreHold(store, shown, replica, owner="a test", clock=clock, sleep=sleep)


async def test_the_replica_is_reserved_while_it_is_held_alone(
    store: redis.asyncio.Redis, replica: MeasuredReplica
) -> None:
    async with hold_of(store, replica).exclusive():
        assert await reservations(store, IDS) == {IDS[0]: "a test"}
        with pytest.raises(ReplicaReserved, match="reserved by a test"):
            async with hold_of(store, replica).exclusive():
                pass
    assert await reservations(store, IDS) == {}


async def test_behind_the_gateway_its_siblings_are_reserved(
    store: redis.asyncio.Redis, replica: MeasuredReplica
) -> None:
    async with hold_of(store, replica).behind_gateway():
        assert await reservations(store, [*IDS, "other"]) == {IDS[1]: "a test", IDS[2]: "a test"}
    assert await reservations(store, IDS) == {}


async def test_a_sibling_that_somebody_holds_frees_the_others(
    store: redis.asyncio.Redis, replica: MeasuredReplica
) -> None:
    async with await reserve(store, IDS[2], "somebody", 30.0):
        with pytest.raises(ReplicaReserved, match="somebody"):
            async with hold_of(store, replica).behind_gateway():
                pass
        assert await reservations(store, IDS) == {IDS[2]: "somebody"}


async def test_without_a_control_plane_nothing_is_held(store: redis.asyncio.Redis, replica: MeasuredReplica) -> None:
    with pytest.raises(NotHeld, match="is the control plane running"):
        async with hold_of(store, replica, is_alive=False).exclusive():
            pass
    assert await reservations(store, IDS) == {}


def pid_of_an_ended_process() -> int:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    return child.pid


async def test_what_a_dead_process_left_is_waited_for(store: redis.asyncio.Redis, replica: MeasuredReplica) -> None:
    pid = pid_of_an_ended_process()
    left = owner_here("a sweep").replace(f"pid {os.getpid()} ", f"pid {pid} ")
    await reserve(store, IDS[0], left, 0.02)
    async with hold_of(store, replica).exclusive():
        assert await reservations(store, IDS) == {IDS[0]: "a test"}
    assert is_of_a_dead_process(left) and not is_of_a_dead_process(owner_here("a sweep"))
    assert not is_of_a_dead_process(left + "-elsewhere)") and not is_of_a_dead_process("a test")
