"""Events in order of time, on a clock that only they move.

Equal times go by the order in which they were scheduled, so that a run depends on its seed alone.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Kernel:
    """A heap of (time, sequence, action). `now_s` is the time of the event that runs."""

    __slots__ = ("_events", "_sequence", "now_s")

    def __init__(self) -> None:
        self.now_s = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._sequence = itertools.count()

    def at(self, at_s: float, action: Callable[[], None]) -> None:
        """Runs `action` at that time.

        Raises:
            ValueError: the time has passed, or is no number: nothing may change the past.
        """
        if not at_s >= self.now_s:
            raise ValueError(f"an event at {at_s} s cannot be scheduled at {self.now_s} s")
        heapq.heappush(self._events, (at_s, next(self._sequence), action))

    def run(self) -> None:
        """Runs events until there are none left."""
        events = self._events
        while events:
            self.now_s, _, action = heapq.heappop(events)
            action()
