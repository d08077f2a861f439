"""Time, from the system or from a test's hand: the two implementations of `core.ports.Clock`."""

from __future__ import annotations

import time


class SystemClock:
    """The machine's time.

    `monotonic_s` is time.perf_counter(), so that it compares with the stamps of the engine client; on Linux it is
    CLOCK_MONOTONIC, equal in all processes of a machine. Both are the functions themselves: a request asks nine times.
    """

    now_s = staticmethod(time.time)
    monotonic_s = staticmethod(time.perf_counter)


class ManualClock:
    """Time that stands still until told to go on.

    Args:
        now_s: the first answer of `now_s()`.
    """

    def __init__(self, now_s: float = 1_700_000_000.0) -> None:
        self._now_s = now_s
        self._monotonic_s = 0.0

    def now_s(self) -> float:
        """Seconds since the Unix epoch, as set and advanced."""
        return self._now_s

    def monotonic_s(self) -> float:
        """Seconds advanced so far."""
        return self._monotonic_s

    def advance(self, seconds: float) -> None:
        """Moves both times on.

        Raises:
            ValueError: `seconds` is negative.
        """
        if not seconds >= 0:
            raise ValueError(f"time does not go back: {seconds}")
        self._now_s += seconds
        self._monotonic_s += seconds
