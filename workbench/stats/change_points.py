"""Where a timeline changes its level: a throttled clock, a neighbour that came, an engine that fell behind.

Binary segmentation (Scott and Knott 1974). A split is kept when chance hardly makes one as clear: the ranks of the
series, freed of what each value foretells of the next, are shuffled and split as well as they can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

from workbench.stats.autocorrelation import unbiased_lag1, whitened
from workbench.stats.samples import Floats, checked, named_rng

MIN_SEGMENT = 8
LEVEL = 0.01
NUM_SHUFFLES = 400
NUM_STEPS_OUT = 2
NUM_MEANS_OUT = 4  # the steps are where they take out most, which hides more memory than their three means


@dataclass(frozen=True, slots=True)
class ChangePoint:
    """The series has another level from `index` on; medians of the stretches before and after."""

    index: int
    before: float
    after: float
    p: float


def change_points(series: Sequence[float], *, level: float = LEVEL, seed: int = 0) -> list[ChangePoint]:
    """Changes of level of an evenly spaced series, in order. A series under 16 values has none that could be seen.

    Args:
        series: one value a slot of time.
        level: chance of finding one in a stretch that has none.
        seed: of the shuffles.
    """
    values = checked(series)
    found: dict[int, float] = {}
    stretches = [(0, len(values))]
    while stretches:
        start, end = stretches.pop()
        split = _split(values[start:end], level, named_rng(seed, f"change/{start}/{end}"))
        if split is not None:
            at, p = start + split[0], split[1]
            found[at] = p
            stretches += [(start, at), (at, end)]
    edges = [0, *sorted(found), len(values)]
    return [
        ChangePoint(at, float(np.median(values[before:at])), float(np.median(values[at:after])), found[at])
        for before, at, after in zip(edges, edges[1:-1], edges[2:], strict=False)
    ]


def _split(values: Floats, level: float, rng: np.random.Generator) -> tuple[int, float] | None:
    """The clearest split of a stretch and its p, when chance makes one as clear in less than `level` of cases."""
    if len(values) < 2 * MIN_SEGMENT or np.ptp(values) == 0.0:
        return None
    ranks = distributions.rankdata(whitened(values, _memory(values)))
    clarity, at = _clearest(ranks[None, :])
    shuffled, _ = _clearest(rng.permuted(np.tile(ranks, (NUM_SHUFFLES, 1)), axis=1))
    p = (1.0 + float((shuffled >= clarity[0]).sum())) / (1.0 + NUM_SHUFFLES)
    return (int(at[0]), p) if p <= level else None


def _memory(values: Floats) -> float:
    """Lag-1 correlation of what is left when the clearest steps are taken out, real or not: a step is no memory."""
    stretches = [values]
    for _ in range(NUM_STEPS_OUT):
        long = [number for number, part in enumerate(stretches) if len(part) >= 2 * MIN_SEGMENT]
        if not long:
            break
        clearest = {number: _clearest(distributions.rankdata(stretches[number])[None, :]) for number in long}
        number = max(long, key=lambda number: float(clearest[number][0][0]) / len(stretches[number]) ** 0.5)
        stretches[number : number + 1] = np.split(stretches[number], [int(clearest[number][1][0])])
    residuals = np.concatenate([part - part.mean() for part in stretches])
    return unbiased_lag1(residuals, num_means=NUM_MEANS_OUT)


def _clearest(rows: Floats) -> tuple[Floats, Floats]:
    """Of each row the largest |difference of the two sides' means| in its own standard errors, and where."""
    size = rows.shape[1]
    at = np.arange(MIN_SEGMENT, size - MIN_SEGMENT + 1)
    sums = np.cumsum(rows - rows.mean(axis=1, keepdims=True), axis=1)[:, at - 1]
    clarity = np.abs(sums) / np.sqrt(at * (size - at) / size)
    best = clarity.argmax(axis=1)
    return clarity[np.arange(len(rows)), best], at[best].astype(np.float64)
