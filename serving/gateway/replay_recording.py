"""What goes to a client is stored on the side: gathered, sealed, and appended by one call after the other.

The client never waits for the store. When the store does not answer, what there is waits for it, up to a bound; a call
is repeated until it was answered, for only then is it known what a retry will find.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, TypeVar

from serving.core.policies.idempotency import ReplaySettings
from serving.gateway.replay_seal import Sealer
from serving.store.connection import StoreUnavailable
from serving.store.idempotency import Place, ReplayStore, RunState

logger = logging.getLogger(__name__)

T = TypeVar("T")
Spawn = Callable[[Coroutine[Any, Any, None]], None]

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 1.0
# More than this is compressed beside the event loop, not in it: 64 KB take a millisecond.
MAX_INLINE_BYTES = 64 * 1024


async def until_answered(call: Callable[[], Awaitable[T]]) -> T:
    """Repeats a store call until the store answers it."""
    pause_s = FIRST_PAUSE_S
    while True:
        try:
            return await call()
        except StoreUnavailable:
            await asyncio.sleep(pause_s)
            pause_s = min(2 * pause_s, LONGEST_PAUSE_S)


class Recording:
    """One run's answer on its way into the store.

    Attributes:
        keeps: whether a retry will find the answer; once False it stays so.
    """

    def __init__(
        self,
        store: ReplayStore,
        place: Place,
        run: bytes,
        sealer: Sealer,
        settings: ReplaySettings,
        spawn: Spawn,
        on_dropped: Callable[[], None],
    ) -> None:
        """`spawn` runs what is not waited for; `on_dropped` is called when `keeps` becomes False."""
        self.keeps = True
        self._store = store
        self._place = place
        self._run = run
        self._sealer = sealer
        self._settings = settings
        self._spawn = spawn
        self._on_dropped = on_dropped
        self._gathered: list[bytes] = []
        self._num_bytes = 0
        self._ended = False
        self._is_storing = False
        self._timer: asyncio.TimerHandle | None = None

    def add(self, data: bytes) -> None:
        """Takes the next piece."""
        if not self.keeps:
            return
        self._gathered.append(data)
        self._num_bytes += len(data)
        if self._is_storing:
            if self._num_bytes > self._settings.max_answer_bytes:  # the store has not answered for long
                self._drop()
                self._spawn(self._mark_dropped())
        elif self._num_bytes >= self._settings.flush_bytes:
            self._begin()
        elif self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._settings.flush_s, self._begin)

    def end(self, data: bytes) -> None:
        """Takes the last piece: the answer is complete."""
        self._ended = True
        if not self.keeps:
            return
        self._gathered.append(data)
        if not self._is_storing:
            self._begin()

    def stop(self) -> None:
        """Nothing more is stored."""
        self.keeps = False
        self._gathered.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _begin(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._is_storing = True
        self._spawn(self._store_gathered())

    async def _store_gathered(self) -> None:
        while self.keeps:
            data, last = b"".join(self._gathered), self._ended
            self._gathered.clear()
            self._num_bytes = 0
            state = await self._append(data, last)
            if state not in (RunState.RUNNING, RunState.FINISHED):
                if state is RunState.GONE:
                    logger.warning("a request's idempotency key was taken over while it ran: its lease had run out")
                if self.keeps:
                    self._drop()
            if last:
                return
            if not self._ended and self._num_bytes < self._settings.flush_bytes:
                break
        self._is_storing = False
        if self.keeps and self._gathered:
            self._timer = asyncio.get_running_loop().call_later(self._settings.flush_s, self._begin)

    async def _append(self, data: bytes, last: bool) -> RunState:
        index, part = self._sealer.num_parts, b""
        if len(data) > MAX_INLINE_BYTES:
            part = await asyncio.to_thread(self._sealer.part, data)
        elif data:
            part = self._sealer.part(data)
        bounds = self._settings
        return await until_answered(
            lambda: self._store.append(
                self._place,
                self._run,
                index,
                part,
                last=last,
                max_bytes=bounds.max_answer_bytes,
                max_tenant_bytes=bounds.max_tenant_bytes,
            )
        )

    def _drop(self) -> None:
        self.stop()
        self._on_dropped()

    async def _mark_dropped(self) -> None:
        await until_answered(lambda: self._store.close(self._place, self._run, drop=True))
