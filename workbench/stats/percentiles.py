"""Percentiles and their intervals: of independent values by order statistics, of streams by a bootstrap of streams."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

from workbench.stats.samples import CONFIDENCE, Interval, Reason, Refusal, central, checked, checked_share

MEDIAN = 0.5


@dataclass(frozen=True, slots=True)
class Percentile:
    """A quantile that its sample carries: a value that was seen, between the ends of its interval."""

    q: float
    value: float
    low: float
    high: float
    num_values: int


def percentile(values: Sequence[float], q: float, *, confidence: float = CONFIDENCE) -> Percentile | Refusal:
    """The quantile with its interval, or the reason why so few values cannot carry one."""
    interval = quantile_interval(values, q, confidence=confidence)
    if interval is None:
        return _too_few_values(len(values), q, confidence)
    return Percentile(q, quantile(values, q), *interval, len(values))


def clustered_percentile(
    clusters: Sequence[Sequence[float]], q: float, rng: np.random.Generator, *, confidence: float = CONFIDENCE
) -> Percentile | Refusal:
    """As `percentile`, of values that come in clusters, such as the token gaps of one request each."""
    values = [value for cluster in clusters for value in cluster]
    interval = clustered_quantile_interval(clusters, q, rng, confidence=confidence)
    if interval is not None:
        return Percentile(q, quantile(values, q), *interval, len(values))
    num_filled, needed = sum(1 for cluster in clusters if len(cluster)), min_sample(MEDIAN, confidence)
    if num_filled < needed:
        text = f"{num_filled} streams cannot carry an interval: it takes {needed}, for the gaps of one are alike"
        return Refusal(Reason.TOO_FEW_CLUSTERS, text, num_filled, needed)
    return _too_few_values(len(values), q, confidence)


def _too_few_values(found: int, q: float, confidence: float) -> Refusal:
    needed = min_sample(q, confidence)
    text = f"{found} values cannot carry a p{100 * q:g} with an interval of {100 * confidence:g} %: it takes {needed}"
    return Refusal(Reason.TOO_FEW_VALUES, text, found, needed)


def quantile(values: Sequence[float], q: float) -> float:
    """The smallest value that at least a share `q` of the sample does not exceed (inverse of the sample's CDF).

    Always a value that was seen: no interpolation invents a tail. A p99 of fewer than 100 values is the largest.

    Raises:
        ValueError: no values, a value that is not finite, or `q` outside (0, 1).
    """
    return float(np.quantile(checked(values), checked_share(q), method="inverted_cdf"))


def quantile_interval(values: Sequence[float], q: float, *, confidence: float = CONFIDENCE) -> Interval | None:
    """Distribution-free interval of the true quantile from order statistics of independent values.

    The number of values below the true quantile is Binomial(n, q); the ends are the values whose ranks
    bound it (Conover, Practical Nonparametric Statistics, 3rd ed., section 3.2).

    Returns:
        The interval, or None when the sample is too small to have both ends: at 95 % a median needs
        6 values, a p90 36, a p99 368.
    """
    ordered = np.sort(checked(values))
    tail = (1.0 - confidence) / 2.0
    low_rank = int(distributions.binom.ppf(tail, len(ordered), checked_share(q)))
    high_rank = int(distributions.binom.ppf(1.0 - tail, len(ordered), q)) + 1
    if low_rank < 1 or high_rank > len(ordered):
        return None
    return float(ordered[low_rank - 1]), float(ordered[high_rank - 1])


def clustered_quantile_interval(
    clusters: Sequence[Sequence[float]],
    q: float,
    rng: np.random.Generator,
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = 400,
) -> Interval | None:
    """Bootstrap interval of a quantile of values that come in clusters (gaps of one stream): clusters are drawn.

    Returns:
        The interval, or None when the clusters or the values are too few by `quantile_interval`'s rule.
    """
    filled = [cluster for cluster in clusters if len(cluster)]
    values = checked([value for cluster in filled for value in cluster])
    if len(filled) < min_sample(MEDIAN, confidence) or len(values) < min_sample(q, confidence):
        return None
    owner = np.repeat(np.arange(len(filled)), [len(cluster) for cluster in filled])
    order = np.argsort(values, kind="stable")
    values, owner = values[order], owner[order]
    estimates = np.empty(num_resamples)
    for index in range(num_resamples):
        times_drawn = np.bincount(rng.integers(len(filled), size=len(filled)), minlength=len(filled))
        cumulated = np.cumsum(times_drawn[owner])
        estimates[index] = values[np.searchsorted(cumulated, q * cumulated[-1])]
    return central(estimates, confidence)


def min_sample(q: float, confidence: float = CONFIDENCE) -> int:
    """Least number of values at which `quantile_interval` of `q` has both ends."""
    tail = (1.0 - confidence) / 2.0
    rarer = max(checked_share(q), 1.0 - q)
    return math.ceil(math.log(tail) / math.log(rarer))
