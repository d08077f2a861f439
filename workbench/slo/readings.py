"""How far a load is from its SLO, as figures that a search can weigh: a score and its standard error. Pure.

    p99 <= limit        score = ln(p99 / limit)
    good share >= g     score = (ln odds of a bad request - ln odds that g allows) / 8

The odds of a tail move about eight times as fast as the latency behind them (5 times for an exponential tail, 50 for
a normal one of 5 %), so that one prior of how fast scores grow with load serves both. Below 0 the limit is kept.

Requests that follow each other share the same queue, so a sample of them holds fewer independent values than it
counts: standard errors grow by the design effect. It is the larger of two: the variance of the shares of consecutive
blocks over what independent requests would show (batch means: Law, Simulation Modeling and Analysis, 5th ed., section
9.5.3), and (1 + r) / (1 - r) with r the correlation of neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

from workbench import stats

NUM_BLOCKS = 10
LOG_ODDS_SCALE = 1 / 8
FLOOR_SE = 0.01
"""What differs between two measurements of the same load that neither can see in itself: clocks, neighbours."""
Z_95 = 1.959964
P99 = 0.99
TAIL = 0.97
"""Bursts are counted by requests beyond this quantile: beyond the P99 itself there are too few to see a pattern."""


@dataclass(frozen=True, slots=True)
class Reading:
    """One limit of an SLO at one load: `score` below 0 is kept, and the more, the further below."""

    name: str
    score: float
    se: float

    def __post_init__(self) -> None:
        if not (math.isfinite(self.score) and math.isfinite(self.se) and self.se > 0):
            raise ValueError(f"reading {self.name}: score {self.score} ± {self.se} is no figure to weigh")

    @property
    def p_kept(self) -> float:
        """Chance that the limit is kept at this load."""
        return float(distributions.norm.cdf(-self.score / self.se))


def p99_reading(name: str, values: Sequence[float], limit: float) -> Reading | None:
    """Whether the P99 of `values` (in the order of the requests) keeps `limit`.

    Returns:
        None when there are fewer values than a P99 needs for an interval (368).

    Raises:
        ValueError: a limit that is not above 0.
    """
    if not limit > 0:
        raise ValueError(f"{name}: the limit is {limit}; it must be above 0")
    interval = stats.quantile_interval(values, P99) if values else None
    if interval is None:
        return None
    p99 = stats.quantile(values, P99)
    if p99 <= 0 or interval[0] <= 0:
        return None
    independent_se = math.log(interval[1] / interval[0]) / (2 * Z_95)
    worst = stats.quantile(values, TAIL)
    deff = design_effect([value >= worst for value in values])
    return Reading(name, math.log(p99 / limit), math.hypot(independent_se * math.sqrt(deff), FLOOR_SE))


def p99_reading_of(name: str, p99: float, interval: tuple[float, float] | None, limit: float) -> Reading | None:
    """The same from a finished cell, which keeps the interval and no requests; None without an interval."""
    if interval is None or min(p99, limit, *interval) <= 0:
        return None
    se = math.log(interval[1] / interval[0]) / (2 * Z_95)
    return Reading(name, math.log(p99 / limit), math.hypot(se, FLOOR_SE))


def share_reading(name: str, is_good: Sequence[bool], min_share: float) -> Reading:
    """Whether the share of good requests (in their order) is at least `min_share`.

    The chance is that of Jeffreys' posterior, Beta(bad + 1/2, good + 1/2), on a sample shrunk by the design effect.

    Raises:
        ValueError: no requests, or a share outside (0, 1).
    """
    if not is_good:
        raise ValueError(f"{name}: no requests")
    if not 0.0 < min_share < 1.0:
        raise ValueError(f"{name}: a share of good requests lies between 0 and 1, not at {min_share}")
    deff = design_effect([not good for good in is_good])
    num_bad = sum(not good for good in is_good) / deff
    num_good = len(is_good) / deff - num_bad
    se = math.sqrt(1 / (num_bad + 0.5) + 1 / (num_good + 0.5))
    p_kept = float(distributions.beta.cdf(1 - min_share, num_bad + 0.5, num_good + 0.5))
    z = -float(distributions.norm.ppf(min(max(p_kept, 1e-9), 1 - 1e-9)))
    se *= LOG_ODDS_SCALE
    return Reading(name, z * se, se)


def readings_of_metrics(
    metrics: Mapping[str, float],
    intervals: Mapping[str, tuple[float, float]],
    num_requests: int,
    limits: Mapping[str, float],
    min_good_frac: float | None,
) -> tuple[Reading, ...]:
    """What a finished cell says of `limits` by metric, such as `ttft_s/p99`; those that it cannot carry are absent."""
    found = [
        p99_reading_of(name, metrics[name], intervals.get(name), limit)
        for name, limit in limits.items()
        if name in metrics
    ]
    readings = [reading for reading in found if reading is not None]
    share = metrics.get("slo_good_frac")
    if min_good_frac is not None and share is not None and num_requests > 0:
        num_good = round(share * num_requests)
        # Spread evenly: the order is gone, and with it the design effect.
        is_good = np.zeros(num_requests, dtype=bool)
        is_good[np.linspace(0, num_requests - 1, num_good).round().astype(int)] = True
        readings.append(share_reading("slo_good_frac", is_good.tolist(), min_good_frac))
    return tuple(readings)


def design_effect(flags: Sequence[bool]) -> float:
    """How many requests stand for one independent request, at least 1, at most a block's length.

    Args:
        flags: in the order of the requests; fewer than two of a kind carry no figure, which is 1.
    """
    count, num_set = len(flags), sum(flags)
    if count < 4 * NUM_BLOCKS or not 1 < num_set < count - 1:
        return 1.0
    size = count // NUM_BLOCKS
    values = np.asarray(flags, dtype=float)
    shares = values[: size * NUM_BLOCKS].reshape(NUM_BLOCKS, size).mean(axis=1)
    share = float(shares.mean())
    independent = share * (1 - share) / size
    by_blocks = float(shares.var(ddof=1)) / independent if independent > 0 else 1.0
    r = stats.lag1_correlation(values)
    by_memory = (1 + r) / (1 - r) if r < 1 else float(size)
    return min(max(by_blocks, by_memory, 1.0), float(size))
