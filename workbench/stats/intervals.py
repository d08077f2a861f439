"""Intervals of means, shares and ratios of independent values, and of any statistic of a series that remembers."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np
from scipy import stats as distributions

from workbench.stats.autocorrelation import block_length
from workbench.stats.samples import (
    CONFIDENCE,
    POWER,
    Floats,
    Interval,
    Reason,
    Refusal,
    central,
    checked,
    checked_positive,
)

MIN_BLOCKS = 6


class ShareMethod(StrEnum):
    """WILSON covers as often as it says on average, EXACT (Clopper and Pearson 1934) never less often."""

    WILSON = "wilson"
    EXACT = "exact"


def mean_interval(values: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval | None:
    """Student's interval of the mean of independent values, such as the rates of consecutive blocks of a run.

    Blocks must be long against what correlates inside them (batch means: Law, Simulation Modeling and
    Analysis, 5th ed., section 9.5.3).

    Returns:
        The interval, or None for fewer than 2 values.
    """
    sample = checked(values)
    if len(sample) < 2:
        return None
    centre = float(sample.mean())
    half = t_quantile(confidence, len(sample) - 1) * float(sample.std(ddof=1)) / math.sqrt(len(sample))
    return centre - half, centre + half


def share_interval(
    num_hits: int, num_trials: int, *, confidence: float = CONFIDENCE, method: ShareMethod = ShareMethod.WILSON
) -> Interval:
    """Interval of a share of independent trials, such as the requests that met their SLO (Wilson 1927).

    Raises:
        ValueError: no trials, or more hits than trials.
    """
    found = distributions.binomtest(num_hits, num_trials).proportion_ci(confidence, method=method.value)
    return float(found.low), float(found.high)


def bootstrap_interval(
    values: Sequence[float],
    statistic: Callable[[Floats], float],
    rng: np.random.Generator,
    *,
    confidence: float = CONFIDENCE,
    num_resamples: int = 2000,
) -> Interval:
    """Percentile bootstrap of any statistic of independent values (Efron and Tibshirani 1993, chapter 13)."""
    sample = checked(values)
    drawn = (sample[rng.integers(len(sample), size=len(sample))] for _ in range(num_resamples))
    return central(np.array([statistic(resample) for resample in drawn]), confidence)


def block_bootstrap_interval(
    series: Sequence[float],
    statistic: Callable[[Floats], float],
    rng: np.random.Generator,
    *,
    length: int | None = None,
    confidence: float = CONFIDENCE,
    num_resamples: int = 1000,
) -> Interval | Refusal:
    """Interval of a statistic of an evenly spaced series whose neighbours are alike, such as throughput a second.

    Whole blocks are drawn, circularly, so that what correlates stays together (Politis and Romano 1992). The
    spread of the resamples is short by the share that one block is of the series; it is put back, and the
    quantile is Student's for as many values as there are blocks.

    Args:
        series: evenly spaced in time.
        statistic: of the whole series, such as its mean.
        rng: draws the blocks.
        length: of a block; by default as long as the series' own memory asks for.
        confidence: of the interval.
        num_resamples: series drawn.

    Returns:
        The interval, or a refusal when the series has fewer than 6 blocks.
    """
    sample = checked(series)
    size = len(sample)
    length = block_length(sample) if length is None else length
    if size < MIN_BLOCKS * length:
        text = f"{size} values in blocks of {length} make fewer than {MIN_BLOCKS} blocks: measure longer"
        return Refusal(Reason.TOO_FEW_BLOCKS, text, size // length, MIN_BLOCKS)
    num_blocks = -(-size // length)
    offsets = np.arange(length)
    estimates = np.empty(num_resamples)
    for index in range(num_resamples):
        starts = rng.integers(size, size=num_blocks)
        estimates[index] = statistic(sample[((starts[:, None] + offsets).ravel()[:size]) % size])
    half = t_quantile(confidence, size / length - 1) * float(estimates.std(ddof=1)) * math.sqrt(size / (size - length))
    centre = float(statistic(sample))
    return centre - half, centre + half


@dataclass(frozen=True, slots=True)
class Ratio:
    """One figure over another, such as the candidate's mean over the baseline's, with its interval."""

    value: float
    low: float
    high: float


def mean_ratio(baseline: Sequence[float], candidate: Sequence[float], *, confidence: float = CONFIDENCE) -> Ratio:
    """Ratio of two means of independent positive values, its interval by the delta method on logarithms.

    Degrees of freedom by Welch and Satterthwaite, so that the two may differ in spread and in number.

    Raises:
        ValueError: fewer than 2 values on a side, or a value that is not above 0.
    """
    sides = [checked_positive(baseline), checked_positive(candidate)]
    means = [float(side.mean()) for side in sides]
    variances = [float(side.var(ddof=1)) / len(side) / mean**2 for side, mean in zip(sides, means, strict=True)]
    value, variance = means[1] / means[0], sum(variances)
    if variance == 0.0:
        return Ratio(value, value, value)
    freedom = variance**2 / sum(part**2 / (len(side) - 1) for part, side in zip(variances, sides, strict=True))
    half = t_quantile(confidence, freedom) * math.sqrt(variance)
    return Ratio(value, value * math.exp(-half), value * math.exp(half))


def ratio_of_sums(
    numerators: Sequence[float], denominators: Sequence[float], *, confidence: float = CONFIDENCE
) -> Ratio:
    """Sum over sum of independent pieces that bring both, such as joules a token over the blocks of a run.

    The delta method of survey ratios (Cochran, Sampling Techniques, 3rd ed., chapter 6), on logarithms.

    Raises:
        ValueError: fewer than 2 pieces, other numbers of them, or sums that are not above 0.
    """
    over, under = checked(numerators), checked(denominators)
    if len(over) != len(under) or len(over) < 2 or min(over.sum(), under.sum()) <= 0.0:
        raise ValueError("a ratio of sums needs at least 2 pieces, each with both parts, and sums above 0")
    value = float(over.sum() / under.sum())
    residuals = over / over.mean() - under / under.mean()
    half = t_quantile(confidence, len(over) - 1) * float(residuals.std(ddof=1)) / math.sqrt(len(over))
    return Ratio(value, value * math.exp(-half), value * math.exp(half))


def smallest_detectable_effect(
    values: Sequence[float], *, num_values: int | None = None, power: float = POWER, confidence: float = CONFIDENCE
) -> float:
    """Least relative change of the mean that an A/B of `num_values` on each side finds with `power`.

    `values` are independent runs of one side (an A/A); `num_values` defaults to their number. Runs that were
    interleaved are planned by `detectable_effect` instead.

    Returns:
        A fraction: 0.05 means that changes under 5 % are likely to be missed.

    Raises:
        ValueError: fewer than 2 values, or a value that is not above 0.
    """
    sample = checked_positive(values)
    count = len(sample) if num_values is None else num_values
    if count < 2:
        raise ValueError(f"an A/B needs at least 2 values a side, not {count}")
    freedom = 2 * (count - 1)
    spread = float(sample.std(ddof=1)) / float(sample.mean())
    reach = t_quantile(confidence, freedom) + float(distributions.t.ppf(power, freedom))
    return reach * spread * math.sqrt(2.0 / count)


def t_quantile(confidence: float, freedom: float) -> float:
    """Student's quantile that a two-sided interval reaches to, in standard errors."""
    return float(distributions.t.ppf(0.5 + confidence / 2.0, freedom))
