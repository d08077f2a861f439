"""What every statistic here starts from: a finite sample, chance with a name, and a reason where there is no figure."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import numpy.typing as npt

Interval = tuple[float, float]
Floats = npt.NDArray[np.float64]
CONFIDENCE = 0.95
POWER = 0.8


class Reason(StrEnum):
    """Why a sample gives no figure."""

    TOO_FEW_VALUES = "too_few_values"
    TOO_FEW_CLUSTERS = "too_few_clusters"  # streams, when values come in streams
    TOO_FEW_BLOCKS = "too_few_blocks"  # pieces long enough to be independent of each other
    TOO_FEW_PAIRS = "too_few_pairs"
    NOT_SETTLED = "not_settled"  # still on its way where the steady part would have to begin
    NOT_POSITIVE = "not_positive"  # no ratio to a value that is not above 0
    WEAK_PERCENTILE = "weak_percentile"  # the runs themselves could not carry it
    ABSENT = "absent"  # some of the runs do not have it


@dataclass(frozen=True, slots=True)
class Refusal:
    """No figure, and why: `found` of `needed` where it is a matter of number. It reads as a sentence."""

    reason: Reason
    text: str
    found: int = 0
    needed: int = 0

    def __str__(self) -> str:
        return self.text


def named_rng(seed: int, name: str) -> np.random.Generator:
    """A random generator that depends on `seed` and `name` alone: one stream a purpose."""
    digest = hashlib.sha256(f"{seed}/{name}".encode()).digest()
    return np.random.default_rng(int.from_bytes(digest[:16], "big"))


def checked(values: Sequence[float] | Floats) -> Floats:
    """The values as an array.

    Raises:
        ValueError: there are none, or one is NaN or infinite.
    """
    sample = np.asarray(values, dtype=np.float64)
    if sample.size == 0:
        raise ValueError("no values: there is no figure without a sample")
    if not np.isfinite(sample).all():
        raise ValueError("the sample holds NaN or infinity")
    return sample


def checked_positive(values: Sequence[float] | Floats) -> Floats:
    """The values of one side of a ratio.

    Raises:
        ValueError: fewer than 2, or one that is not above 0.
    """
    sample = checked(values)
    if sample.size < 2 or sample.min() <= 0.0:
        raise ValueError("a ratio needs at least 2 values above 0 on each side")
    return sample


def checked_share(q: float) -> float:
    """A share strictly between 0 and 1. Raises ValueError."""
    if not 0.0 < q < 1.0:
        raise ValueError(f"a quantile lies between 0 and 1, not at {q}")
    return q


def central(estimates: Floats, confidence: float) -> Interval:
    """The middle `confidence` of resampled estimates."""
    low, high = np.quantile(estimates, [(1.0 - confidence) / 2.0, (1.0 + confidence) / 2.0])
    return float(low), float(high)
