"""Counts of the hot path, kept in plain numbers and added to the shared metrics a few times a second.

A counter that several processes share costs a lock and a write to mapped memory each time; a request has ten of them.
A worker that is killed loses what it had not added yet.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from typing import Protocol

from prometheus_client import Counter, Histogram


class Tally(Protocol):
    """Something counted here."""

    def flush(self) -> None:
        """Adds it to the metric."""
        ...


class CountTally:
    """Stands in for a counter.

    Attributes:
        amount: what was counted since the last flush; whoever counts adds to it.
    """

    __slots__ = ("_counter", "amount")

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self.amount: float = 0

    def flush(self) -> None:
        """Adds what was counted."""
        if self.amount:
            self._counter.inc(self.amount)
            self.amount = 0


class SpreadTally:
    """Stands in for a histogram."""

    __slots__ = ("_bounds", "_histogram", "_numbers", "_sum")

    def __init__(self, histogram: Histogram) -> None:
        self._histogram = histogram
        self._bounds: list[float] = list(histogram._upper_bounds)
        self._numbers = [0] * len(self._bounds)
        self._sum = 0.0

    def observe(self, value: float) -> None:
        """Counts a value."""
        self._numbers[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def flush(self) -> None:
        """Adds what was counted: to the buckets themselves, for `observe` takes one value at a time."""
        if not any(self._numbers):
            return
        for bucket, number in zip(self._histogram._buckets, self._numbers, strict=True):
            if number:
                bucket.inc(number)
        self._histogram._sum.inc(self._sum)
        self._numbers = [0] * len(self._bounds)
        self._sum = 0.0


class TalliesBy:
    """Counts under labels that vary: each is made when first used, by `make`."""

    __slots__ = ("_make", "_tallies")

    def __init__(self, make: Callable[..., Counter]) -> None:
        self._make = make
        self._tallies: dict[tuple[str, ...], CountTally] = {}

    def __call__(self, *labels: str) -> CountTally:
        """The one of these labels."""
        found = self._tallies.get(labels)
        if found is None:
            found = self._tallies[labels] = CountTally(self._make(*labels))
        return found

    def flush(self) -> None:
        """Adds what was counted."""
        for tally in self._tallies.values():
            tally.flush()
