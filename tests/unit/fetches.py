"""An issuer's address that answers what the test says."""

from __future__ import annotations

import random
from collections.abc import Callable

from serving.clock import ManualClock
from serving.core.errors import ServingError
from serving.gateway.key_sets import KeySets
from serving.store.connection import StoreUnavailable


class Issuing:
    """Answers `answer`, or raises it; remembers who was asked."""

    def __init__(self) -> None:
        self.answer: str | ServingError = StoreUnavailable("nothing answers there")
        self.asked: list[str] = []

    async def fetch(self, url: str) -> str:
        self.asked.append(url)
        if isinstance(self.answer, ServingError):
            raise self.answer
        return self.answer


def make_key_sets(clock: ManualClock, issuing: Issuing, on_change: Callable[[], None]) -> KeySets:
    """Key sets of a worker whose fetches go to `issuing`."""
    return KeySets(clock, random.Random(1), on_change, fetch=issuing.fetch)
