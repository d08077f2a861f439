"""Keeps others off a replica while it is measured, through reservations in the store.

    exclusive        the replica is RESERVED in the routing table: no gateway worker sends to it
    behind gateway   its siblings are RESERVED: the gateway serves the model version by this replica alone

A reservation renews itself and runs out soon after its holder dies; one of a dead process of this machine is waited
for. That workers have taken the table up is waited for too; what slips through nevertheless shows in the engine's
counters.
"""

from __future__ import annotations

import asyncio
import os
import re
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager

import psutil
import redis.asyncio

from serving.core.ports import Clock, RoutingTableSource
from serving.core.state import ReplicaState, RoutingTable
from serving.store.reservations import ReplicaReserved, Reservation, reservations, reserve
from workbench.sweeps.cells import MeasuredReplica

RESERVATION_TTL_S = 30.0
TABLE_TIMEOUT_S = 10.0
# Workers look for a new table at least once a second.
TAKE_UP_S = 1.2
POLL_S = 0.1
_PROCESS = re.compile(r"\(pid (\d+) on (.+)\)$")


class NotHeld(Exception):
    """The routing table does not show what was reserved; the message says what to look at."""


class StoreHold:
    """Holds `replica` for `owner` through the store that the control plane reads.

    Args:
        store: the store.
        tables: the published routing table.
        replica: the one to be measured.
        owner: who measures, for those who find it taken.
        clock: time.
        sleep: waits; tests hand in their own.
    """

    def __init__(
        self,
        store: redis.asyncio.Redis,
        tables: RoutingTableSource,
        replica: MeasuredReplica,
        *,
        owner: str,
        clock: Clock,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._store = store
        self._tables = tables
        self._replica = replica
        self._owner = owner
        self._clock = clock
        self._sleep = sleep

    @asynccontextmanager
    async def exclusive(self) -> AsyncIterator[None]:
        """Nobody is routed to the replica.

        Raises:
            ReplicaReserved: somebody else holds it.
            StoreUnavailable: the store does not answer.
            NotHeld: the control plane did not show it as reserved.
        """
        async with self._reserved([self._replica.replica_id]):
            await self._until(lambda states: states.get(self._replica.replica_id) is not ReplicaState.READY)
            yield

    @asynccontextmanager
    async def behind_gateway(self) -> AsyncIterator[None]:
        """The gateway serves the model version by this replica alone.

        Raises:
            ReplicaReserved, StoreUnavailable, NotHeld: as `exclusive`.
        """
        own = self._replica.replica_id
        siblings = sorted(name for name in await self._states() if name != own)
        async with self._reserved(siblings):
            await self._until(
                lambda states: (
                    states.get(own) is ReplicaState.READY
                    and all(states.get(name) is not ReplicaState.READY for name in siblings)
                )
            )
            yield

    @asynccontextmanager
    async def _reserved(self, replica_ids: list[str]) -> AsyncIterator[None]:
        async with AsyncExitStack() as stack:
            for replica_id in replica_ids:
                await stack.enter_async_context(await self._take(replica_id))
            yield

    async def _take(self, replica_id: str) -> Reservation:
        """Waits for what a dead holder left to run out; a living one is not waited for."""
        deadline_s = self._clock.monotonic_s() + RESERVATION_TTL_S + TAKE_UP_S
        while True:
            try:
                return await reserve(self._store, replica_id, self._owner, RESERVATION_TTL_S)
            except ReplicaReserved:
                holder = (await reservations(self._store, [replica_id])).get(replica_id)
                lives = holder is not None and not is_of_a_dead_process(holder)
                if lives or self._clock.monotonic_s() >= deadline_s:
                    raise
            await self._sleep(POLL_S)

    async def _until(self, holds: Callable[[dict[str, ReplicaState]], bool]) -> None:
        deadline_s = self._clock.monotonic_s() + TABLE_TIMEOUT_S
        while not holds(await self._states()):
            if self._clock.monotonic_s() >= deadline_s:
                raise NotHeld(
                    f"the routing table did not follow the reservation of {self._replica.replica_id} within "
                    f"{TABLE_TIMEOUT_S:g} s: is the control plane running? (workbench status)"
                )
            await self._sleep(POLL_S)
        await self._sleep(TAKE_UP_S)

    async def _states(self) -> dict[str, ReplicaState]:
        """State by id of every replica of the model version, in all pools."""
        table = await self._tables.read()
        return {} if table is None else states_of(table, self._replica)


def owner_here(what: str) -> str:
    """Who measures, for those who find a replica taken: what it does, and which process it is."""
    return f"{what} (pid {os.getpid()} on {socket.gethostname()})"


def is_of_a_dead_process(owner: str) -> bool:
    """Whether `owner` names a process of this machine that is no more."""
    found = _PROCESS.search(owner)
    return found is not None and found[2] == socket.gethostname() and not psutil.pid_exists(int(found[1]))


def states_of(table: RoutingTable, replica: MeasuredReplica) -> dict[str, ReplicaState]:
    """State by id of every replica that serves what `replica` serves."""
    return {
        other.replica_id: other.state
        for pool in table.pools
        if (pool.model, pool.version) == (replica.model, replica.version)
        for other in pool.replicas
    }
