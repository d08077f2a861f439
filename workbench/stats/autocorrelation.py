"""How long a series remembers: correlation of neighbours, and the length of blocks that are as good as independent."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from workbench.stats.samples import Floats, checked

MAX_CORRELATION = 0.97


def lag1_correlation(series: Sequence[float] | Floats) -> float:
    """Correlation of each value with the next; 0 where the series is constant or shorter than 3."""
    sample = checked(series)
    centred = sample - sample.mean()
    total = float(centred @ centred)
    if len(sample) < 3 or total == 0.0:
        return 0.0
    return float(centred[1:] @ centred[:-1]) / total


def block_length(series: Sequence[float] | Floats) -> int:
    """Length of the blocks of a circular block bootstrap of the mean of this series.

    Politis and White (2004, section 3) ask for (2 G² / D)^(1/3) n^(1/3); with the spectrum of an AR(1) of
    correlation r that is (√6 r / (1 - r²))^(2/3) n^(1/3).
    """
    r = unbiased_lag1(series)
    memory = math.sqrt(6.0) * r / (1.0 - r * r)
    return max(1, math.ceil(math.cbrt(memory * memory * len(series))))


def whitened(series: Sequence[float] | Floats, r: float) -> Floats:
    """What each value brings that its neighbour did not foretell: x[t] - r x[t-1]; the first less its share."""
    sample = checked(series)
    return np.concatenate([[sample[0] * (1.0 - r)], sample[1:] - r * sample[:-1]])


def unbiased_lag1(series: Sequence[float] | Floats, *, num_means: int = 1) -> float:
    """Lag-1 correlation within [0, 0.97], with what a short series hides of it put back.

    Each mean taken out of n values hides (1 + 3 r) / n (Kendall 1954).
    """
    seen = lag1_correlation(series)
    return min(max(seen + num_means * (1.0 + 3.0 * seen) / len(series), 0.0), MAX_CORRELATION)
