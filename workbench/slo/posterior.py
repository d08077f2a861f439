"""Where an SLO breaks, as a distribution over loads, from all cells and their errors. Pure.

Near the load c where a limit breaks, its score is two lines that meet at 0: slope s below c, slope t >= s above (a
queue bends upwards, a knee sharply). A cell further from c than a factor of `WINDOW` says only on which side it is.
Cells inside say more the nearer they are, for the lines are wrong by a share of what they say; with a
chance of 15 % it too says its side alone, for some limits break by a jump. Likelihoods are of
Student's t, so that one cell whose own error was too optimistic cannot outvote the rest. Prior: c log-uniform between
the loads that bracket it, s and t log-normal around 2. Several limits: the lowest c of all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from scipy import stats as distributions

from workbench.slo.readings import Reading

Floats = npt.NDArray[np.float64]

GRID_STEP = 0.007
MAX_GRID = 700
SLOPES = np.geomspace(0.25, 60.0, 11)
USUAL_SLOPE = 2.0
SLOPE_SPREAD = 1.5
WINDOW = math.log(1.5)
FAR_SPAN = 3.0
FREEDOM = 4
JUMP = 0.15
CENTRAL = 0.95
Point = tuple[float, Reading]


@dataclass(frozen=True, slots=True)
class Posterior:
    """Of the load at which the SLO breaks: its median and central 95 % interval, and the limit that breaks first."""

    load: float
    low: float
    high: float
    limit: str


def posterior(points: Sequence[Point], lowest: float, highest: float) -> Posterior:
    """The distribution between two loads, from (load, reading) pairs of any number of limits.

    Raises:
        ValueError: no readings, or `lowest` is not below `highest`.
    """
    if not points or not 0 < lowest < highest:
        raise ValueError(f"{len(points)} readings between loads {lowest} and {highest} say nothing of a capacity")
    count = min(MAX_GRID, max(50, math.ceil(math.log(highest / lowest) / GRID_STEP)))
    grid = np.linspace(math.log(lowest), math.log(highest), count)
    by_limit: dict[str, list[tuple[float, float, float]]] = {}
    for load, reading in points:
        by_limit.setdefault(reading.name, []).append((math.log(load), reading.score, reading.se))
    weights = {name: _weights(grid, np.array(cells)) for name, cells in by_limit.items()}
    return _lowest_of(grid, weights)


def _weights(grid: Floats, cells: Floats) -> Floats:
    """Probability of each c of one limit; the sum is 1 less the chance that it breaks above the grid."""
    x, score, se = cells.T
    distance = x[:, None] - grid[None, :]
    far = _far(distance, (score / se)[:, None])
    near = np.logaddexp(
        math.log(1 - JUMP) + _near(distance, score[:, None, None], se[:, None, None]),
        math.log(JUMP) + far[:, None, :],
    )
    inside = np.abs(distance) <= WINDOW
    is_below = distance < 0
    base = np.where(inside, 0.0, far).sum(axis=0)
    lower = np.where((inside & is_below)[:, None, :], near, 0.0).sum(axis=0)
    upper = np.where((inside & ~is_below)[:, None, :], near, 0.0).sum(axis=0)
    log_joint = lower[:, None, :] + upper[None, :, :] + _log_prior()[:, :, None]
    # Limits that no cell has broken may break beyond the grid: then every reading is a far one below.
    beyond = (
        float((distributions.t.logcdf(-score / se, FREEDOM) - math.log(FAR_SPAN)).sum())
        if (score / se).max() < 2
        else -np.inf
    )
    log_c = base + np.logaddexp.reduce(log_joint.reshape(-1, len(grid)), axis=0)
    top = max(float(log_c.max()), beyond)
    mass = np.exp(log_c - top)
    total = float(mass.sum()) + len(grid) * math.exp(beyond - top)
    shares: Floats = mass / total
    return shares


def _log_prior() -> Floats:
    """Of the slope below and above: each log-normal around 2, the one above at least as steep; sums to 1."""
    one = -0.5 * (np.log(SLOPES / USUAL_SLOPE) / SLOPE_SPREAD) ** 2
    both = one[:, None] + one[None, :]
    both[np.tril_indices(len(SLOPES), -1)] = -np.inf
    return np.asarray(both - np.logaddexp.reduce(both.ravel()))


def _far(distance: Floats, z: Floats) -> Floats:
    """The side alone: below c the score is under 0, above it over 0, and anywhere within `FAR_SPAN` of it."""
    side = np.where(distance < 0, distributions.t.logcdf(-z, FREEDOM), distributions.t.logcdf(z, FREEDOM))
    return side - math.log(FAR_SPAN)


def _near(distance: Floats, score: Floats, se: Floats) -> Floats:
    """Log-likelihood of each cell by slope and c: an array (cells, slopes, grid)."""
    line = distance[:, None, :] * SLOPES[None, :, None]
    wrong = np.abs(line) * (0.1 + 1.5 * np.abs(distance[:, None, :]))
    sd = np.hypot(se, wrong)
    return np.asarray(distributions.t.logpdf((score - line) / sd, FREEDOM) - np.log(sd))


def _lowest_of(grid: Floats, weights: Mapping[str, Floats]) -> Posterior:
    """Distribution of the lowest c, limits taken as independent."""
    survival = np.ones(len(grid))
    for mass in weights.values():
        survival *= np.clip(1.0 - np.cumsum(mass), 0.0, 1.0)
    cdf = 1.0 - survival
    cdf = cdf / max(float(cdf[-1]), 1e-12)
    tail = (1 - CENTRAL) / 2
    low, middle, high = (float(np.interp(q, cdf, grid)) for q in (tail, 0.5, 1 - tail))
    at = int(np.searchsorted(grid, middle).clip(0, len(grid) - 1))
    limit = max(weights, key=lambda name: float(np.cumsum(weights[name])[at]))
    return Posterior(math.exp(middle), math.exp(low), math.exp(high), limit)
