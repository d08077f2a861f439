"""A decision's own stream of chance: begun for each decision from its seed, so that the decision can be made again."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15


class Chance:
    """SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014).

    `random.Random` takes longer to begin than a routing decision to be made.
    """

    __slots__ = ("_state",)

    def __init__(self, seed: int) -> None:
        self._state = seed & _MASK

    def bits(self) -> int:
        """64 random bits."""
        self._state = z = (self._state + _GAMMA) & _MASK
        z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _MASK
        return z ^ (z >> 31)

    def below(self, bound: int) -> int:
        """A whole number in [0, bound); its bias is below bound / 2^64."""
        return (self.bits() * bound) >> 64

    def sample(self, items: Sequence[T], num: int) -> list[T]:
        """`num` different items, in the order drawn; `num` is small (Floyd's algorithm, 1987)."""
        chosen: list[int] = []
        for last in range(len(items) - num, len(items)):
            index = self.below(last + 1)
            chosen.append(last if index in chosen else index)
        return [items[index] for index in chosen]
