"""Wilcoxon's signed-rank statistic: an exact test and interval of the centre of paired differences.

When a coin decides which of a pair runs first, and A and B do not differ, each difference is as likely to have
the other sign, whatever drift, bursts and memory the machine has. The test rests on those coins alone, so its
rate of false alarms holds on a noisy machine; and an outlier counts by its rank, not by its size.

The interval is made of Walsh averages, the means of all pairs of differences (Hollander, Wolfe and Chicken,
Nonparametric Statistical Methods, 3rd ed., section 3.3): it excludes 0 exactly when the test rejects.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from workbench.stats.samples import CONFIDENCE, Floats, Interval, checked


@lru_cache(maxsize=512)
def cumulated(size: int) -> Floats:
    """P(W <= w) for w = 0 … n (n + 1) / 2 when every sign is a fair coin."""
    counts = np.ones(1)
    for rank in range(1, size + 1):
        counts = np.concatenate([counts, np.zeros(rank)]) + np.concatenate([np.zeros(rank), counts])
        counts = counts / 2.0
    return np.cumsum(counts)


def min_pairs(confidence: float = CONFIDENCE) -> int:
    """Fewest pairs that can reject at this confidence: with all of one sign, 2 / 2^n <= 1 - confidence."""
    return math.ceil(math.log2(2.0 / (1.0 - confidence)) - 1e-9)


@dataclass(frozen=True, slots=True)
class Shift:
    """The centre of paired differences (Hodges and Lehmann's) and its two-sided p against 0."""

    centre: float
    p: float
    averages: Floats

    @property
    def size(self) -> int:
        """Number of pairs."""
        return int((math.sqrt(8 * len(self.averages) + 1) - 1) / 2)

    def interval(self, confidence: float = CONFIDENCE) -> Interval | None:
        """Interval of the centre, or None when the pairs are fewer than `min_pairs`."""
        rank = end_rank(self.size, confidence)
        return None if rank is None else (float(self.averages[rank]), float(self.averages[-1 - rank]))


def shift(differences: Sequence[float] | Floats) -> Shift:
    """The centre of the differences. A pair that is 0 speaks for no difference."""
    averages = walsh_averages(checked(differences)[None, :])[0]
    num_against = int(min((averages <= 0.0).sum(), (averages >= 0.0).sum()))
    p = min(1.0, 2.0 * float(cumulated(len(differences))[num_against]))
    return Shift(float(np.median(averages)), p, averages)


def end_rank(size: int, confidence: float) -> int | None:
    """How many of the ordered Walsh averages lie outside each end of the interval."""
    rank = int(np.searchsorted(cumulated(size), (1.0 - confidence) / 2.0 + 1e-12, side="right")) - 1
    return rank if rank >= 0 else None


def walsh_averages(rows: Floats) -> Floats:
    """Means of all pairs of values of each row, a value with itself too, in order."""
    first, second = np.triu_indices(rows.shape[1])
    averages: Floats = np.sort((rows[:, first] + rows[:, second]) / 2.0, axis=1)
    return averages
