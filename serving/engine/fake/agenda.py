"""What the fake engine has to do at which time: a few things in a turn of the loop, so that requests are read between.

asyncio runs all timers that are due in one turn. With 2,000 streams in step a request then lies in the socket for a
millisecond before it is read, and the log would begin its wait too late.
"""

from __future__ import annotations

import asyncio
import heapq
from collections.abc import Callable
from itertools import count

MAX_IN_A_TURN = 2


class Entry:
    """Something to do once, unless it is cancelled."""

    __slots__ = ("_work",)

    def __init__(self, work: Callable[[], None]) -> None:
        self._work: Callable[[], None] | None = work

    def cancel(self) -> None:
        """It is not to be done; nothing happens when it was done already."""
        self._work = None

    def run(self) -> None:
        """Does it."""
        work, self._work = self._work, None
        if work is not None:
            work()


class Agenda:
    """Does things in the order of their times, on the running event loop's clock."""

    def __init__(self) -> None:
        self._entries: list[tuple[float, int, Entry]] = []
        self._numbers = count()
        self._wake: asyncio.Handle | None = None
        self._wakes_at_s = 0.0

    def at(self, due_s: float, work: Callable[[], None]) -> Entry:
        """Calls `work` at `due_s` of `loop.time()`, or as soon after it as its turn comes."""
        entry = Entry(work)
        heapq.heappush(self._entries, (due_s, next(self._numbers), entry))
        if self._wake is None or due_s < self._wakes_at_s:
            self._plan()
        return entry

    def _plan(self) -> None:
        """Wakes for the first entry; in the next turn, after what has come was read, if it is due."""
        loop = asyncio.get_running_loop()
        if self._wake is not None:
            self._wake.cancel()
        self._wakes_at_s = self._entries[0][0]
        is_due = self._wakes_at_s <= loop.time()
        self._wake = loop.call_soon(self._run) if is_due else loop.call_at(self._wakes_at_s, self._run)

    def _run(self) -> None:
        now_s = asyncio.get_running_loop().time()
        for _ in range(MAX_IN_A_TURN):
            if not self._entries or self._entries[0][0] > now_s:
                break
            heapq.heappop(self._entries)[2].run()
        self._wake = None
        if self._entries:
            self._plan()
