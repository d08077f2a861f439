"""How many tokens an answer is expected to have: learned per tenant and model, capped by what the client allows.

A histogram over the logarithm of the length, four bins an octave, in which old answers fade: the mean of the capped
length needs the shape and not only a mean. A tenant with few answers borrows from the model's.
"""

from __future__ import annotations

import math
from collections import OrderedDict

BINS_PER_OCTAVE = 4
NUM_BINS = 17 * BINS_PER_OCTAVE + 1
MIDDLES: tuple[float, ...] = tuple(2.0 ** (number / BINS_PER_OCTAVE) for number in range(NUM_BINS))
LARGEST_WEIGHT = 1e9
FADE = 0.995
"""What an answer counts after the next one: the last 200 or so matter."""
ENOUGH = 20.0
"""Answers of a tenant that weigh as much as its model's together."""
MAX_TENANTS = 4096
UNKNOWN_TOKENS = 256
"""Before any answer."""


class LengthSketch:
    """Lengths seen, the latest counting most: each new one weighs more than the last, which is as if those faded."""

    __slots__ = ("_kept", "_newest", "_sum", "_total", "_weights")

    def __init__(self) -> None:
        self._weights = [0.0] * NUM_BINS
        self._newest = 1.0
        self._total = self._sum = 0.0
        self._kept: dict[int, float] = {}

    @property
    def total(self) -> float:
        """How many answers this rests on, faded ones counting less."""
        return self._total / self._newest

    def add(self, num_tokens: int) -> None:
        """One more answer."""
        self._newest /= FADE
        if self._newest > LARGEST_WEIGHT:
            self._weights = [weight / self._newest for weight in self._weights]
            self._total, self._sum, self._newest = self._total / self._newest, self._sum / self._newest, 1.0
        number = _bin(num_tokens)
        self._weights[number] += self._newest
        self._total += self._newest
        self._sum += self._newest * MIDDLES[number]
        self._kept.clear()

    def mean(self, most: int | None) -> float:
        """Of the lengths, each cut off at `most`; NaN before the first."""
        if not self._total:
            return math.nan
        if most is None:
            return self._sum / self._total
        found = self._kept.get(most)
        if found is None:
            lengths = (weight * min(middle, most) for weight, middle in zip(self._weights, MIDDLES, strict=True))
            found = self._kept[most] = sum(lengths) / self._total
        return found

    def quantile(self, share: float) -> float:
        """The length that this share of answers does not exceed; NaN before the first."""
        below = 0.0
        for weight, middle in zip(self._weights, MIDDLES, strict=True):
            below += weight
            if weight and below >= share * self._total * (1.0 - 1e-9):
                return middle
        return math.nan


class OutputLengths:
    """What each tenant's answers from each model have been."""

    def __init__(self) -> None:
        self._models: dict[str, LengthSketch] = {}
        self._tenants: OrderedDict[tuple[str, str], LengthSketch] = OrderedDict()

    def add(self, tenant: str, model: str, num_output_tokens: int) -> None:
        """An answer ended by itself. One that was broken off says nothing."""
        self._models.setdefault(model, LengthSketch()).add(num_output_tokens)
        key = (tenant, model)
        sketch = self._tenants.setdefault(key, LengthSketch())
        self._tenants.move_to_end(key)
        sketch.add(num_output_tokens)
        if len(self._tenants) > MAX_TENANTS:
            self._tenants.popitem(last=False)

    def expected(self, tenant: str, model: str, max_tokens: int | None) -> int:
        """Tokens to expect, at least one, never above `max_tokens`."""
        whole = self._models.get(model)
        if whole is None:
            return UNKNOWN_TOKENS if max_tokens is None else max(min(UNKNOWN_TOKENS, max_tokens), 1)
        mean = whole.mean(max_tokens)
        own = self._tenants.get((tenant, model))
        if own is not None:
            share = own.total / (own.total + ENOUGH)
            mean += share * (own.mean(max_tokens) - mean)
        return max(round(mean), 1)


def _bin(num_tokens: int) -> int:
    return min(round(math.log2(max(num_tokens, 1)) * BINS_PER_OCTAVE), NUM_BINS - 1)
