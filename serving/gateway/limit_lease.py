"""A worker's lease on what it has reserved, and bringing the store up to date after it was away.

The lease is renewed by a heartbeat. It is valid only while the store is known to have it, so that nothing is reserved
that nobody would give back. Whenever the store failed, the lease ends here, and has to be renewed first: that is when
the store learns of what it missed, before anything else is reserved.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

from serving.core.policies.limits import Scope
from serving.core.ports import Clock
from serving.store.connection import StoreUnavailable
from serving.store.limits import Elsewhere, StoreLimits
from serving.store.resp import Reply

logger = logging.getLogger(__name__)

MAX_UNSETTLED = 100_000
_BEATS_PER_LEASE = 3


@dataclass(slots=True)
class _Carry:
    """What was let through of a scope on a day while the store was away."""

    num_requests: int = 0
    num_tokens: int = 0
    nano_usd: int = 0


class Lease:
    """Keeps one worker's lease.

    Args:
        store: the worker's calls.
        clock: durations.
        lease_s: how long the store keeps what a silent worker has reserved.
        on_leased: called with the number of workers whenever the store has the lease and is up to date.
    """

    def __init__(self, store: StoreLimits, clock: Clock, lease_s: float, on_leased: Callable[[int], None]) -> None:
        self.store = store
        self._monotonic_s = clock.monotonic_s
        self._lease_s = lease_s
        self._on_leased = on_leased
        self._until_s = -math.inf
        self._has_begun = False
        self._unsettled: deque[bytes] = deque(maxlen=MAX_UNSETTLED)
        self._carried: dict[tuple[Scope, int], _Carry] = {}
        self._adding: tuple[int, list[Elsewhere]] | None = None
        self._renewing: asyncio.Task[bool] | None = None
        self._loop: asyncio.Task[None] | None = None

    @property
    def is_valid(self) -> bool:
        """Whether what is reserved now is given back should this worker die, as far as is known."""
        return self._monotonic_s() < self._until_s and self.store.is_up

    async def take(self) -> bool:
        """Whether something can be reserved in the store now; renews a lease that ran out."""
        if not self.store.is_up and self._has_begun and self._renewing is None:
            self._until_s = -math.inf  # what is counted here meanwhile has to be told first
            return False
        return self.is_valid or await self.renew()

    async def start(self) -> None:
        """Takes the lease and keeps it; a store that is away does not stop it."""
        await self.renew()
        self._loop = asyncio.create_task(self._keep_renewing())
        self._loop.add_done_callback(_report_failure)

    async def stop(self) -> None:
        """Ends the heartbeat; what is still reserved expires with the lease."""
        tasks = [task for task in (self._loop, self._renewing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def renew(self) -> bool:
        """A heartbeat: renews the lease, tells what the store missed, gives back what dead workers held.

        Returns:
            Whether the store did it. Who comes while one is on its way shares it.
        """
        self._has_begun = True
        if self._renewing is None:
            self._renewing = asyncio.create_task(self._beat())
            self._renewing.add_done_callback(self._on_done)
        return await asyncio.shield(self._renewing)

    def post(self, command: bytes) -> None:
        """Sends a settlement or release; what does not get through is sent again with a heartbeat."""

        def on_reply(reply: Reply | StoreUnavailable) -> None:
            if isinstance(reply, StoreUnavailable):
                self._unsettled.append(command)

        self.store.post(command, on_reply)

    def undo(self, number: int) -> None:
        """Undoes a reservation for which nobody waits any more."""
        self.post(self.store.release(number))

    def undo_later(self, number: int) -> None:
        """Undoes a reservation that the store did not answer: with the next heartbeat, which has to come first."""
        self._unsettled.append(self.store.release(number))
        self._until_s = -math.inf

    def carry(self, scope: Scope, day: int, num_tokens: int, nano_usd: int) -> None:
        """Keeps for the store what one request came to that was counted here."""
        carried = self._carried.setdefault((scope, day), _Carry())
        carried.num_requests += 1
        carried.num_tokens += num_tokens
        carried.nano_usd += nano_usd

    async def _keep_renewing(self) -> None:
        while True:
            await asyncio.sleep(self._lease_s / _BEATS_PER_LEASE)
            await self.renew()

    async def _beat(self) -> bool:
        began_s = self._monotonic_s()
        try:
            beat = await self.store.beat()
            await self._catch_up()
            while beat.has_more:
                beat = await self.store.beat()
        except StoreUnavailable:
            self._until_s = -math.inf
            return False
        self._until_s = began_s + self._lease_s
        self._on_leased(max(beat.num_workers, 1))
        return True

    async def _catch_up(self) -> None:
        """Sends what could not be settled, and adds what was counted here. Raises StoreUnavailable."""
        if self._unsettled:
            await self.store.load()  # a store that was away may have lost its scripts
            unsettled, self._unsettled = self._unsettled, deque(maxlen=MAX_UNSETTLED)
            for command in unsettled:
                self.post(command)
        if self._adding is None and self._carried:
            carried, self._carried = self._carried, {}
            amounts = [
                Elsewhere(scope, day, carry.num_requests, carry.num_tokens, carry.nano_usd)
                for (scope, day), carry in carried.items()
            ]
            self._adding = self.store.next_number(), amounts
        if self._adding is not None:
            await self.store.add(*self._adding)
            self._adding = None

    def _on_done(self, task: asyncio.Task[bool]) -> None:
        self._renewing = None


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the worker no longer renews its lease on limits", exc_info=task.exception())
