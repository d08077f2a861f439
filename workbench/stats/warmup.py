"""The steady part of a run's timeline: what is still warming up and what is already running out is cut at both ends.

Two signs, and the later one counts at each end: requests in flight (below what the load came to: the ramp), and the
series itself (MSER-5: White 1997; White, Cobb and Spratt 2000), which sees warm-up under a load that is already full.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from workbench.stats.samples import Floats, Reason, Refusal, checked

BATCH = 5
MIN_BATCHES = 10
FULL_FRAC = 0.9
NEARLY = 1.5
STANDS_OUT = 2.5  # standard deviations
DRIFTS = 1.4  # standard deviations


@dataclass(frozen=True, slots=True)
class Steady:
    """Values `first` up to, not including, `end` are steady; the rest was cut and `cuts` says why."""

    first: int
    end: int
    cuts: tuple[str, ...]

    @property
    def size(self) -> int:
        """How many values are left."""
        return self.end - self.first


def steady(series: Sequence[float], in_flight: Sequence[float] | None = None) -> Steady | Refusal:
    """The steady part of an evenly spaced series, such as tokens a second.

    Args:
        series: one value a slot of time.
        in_flight: requests in flight in the same slots; without it only the series itself is looked at.

    Returns:
        The part, or a refusal when it is too short to judge or the series never settles.
    """
    values = checked(series)
    first, end, cuts = 0, len(values), []
    if in_flight is not None:
        first, end = ramps(in_flight)
        cuts += [f"{first} slots of ramp up"] if first else []
        cuts += [f"{len(values) - end} slots of running out"] if end < len(values) else []
    inside = values[first:end]
    if len(inside) < BATCH * MIN_BATCHES:
        text = f"{len(inside)} slots under full load are too few to see warm-up in: it takes {BATCH * MIN_BATCHES}"
        return Refusal(Reason.TOO_FEW_VALUES, text, len(inside), BATCH * MIN_BATCHES)
    ends = mser(inside)
    if ends is None or _drifts(inside[ends[0] : len(inside) - ends[1]]):
        text = "the series does not settle: it is still changing in its middle"
        return Refusal(Reason.NOT_SETTLED, text, len(inside))
    warm, cool = ends
    cuts += [f"{warm} slots of warm-up"] if warm else []
    cuts += [f"{cool} slots of cool-down"] if cool else []
    return Steady(first + warm, end - cool, tuple(cuts))


def ramps(in_flight: Sequence[float]) -> tuple[int, int]:
    """First slot with 90 % of the usual load, and the slot after the last one. The usual load: the median slot."""
    load = checked(in_flight)
    full = np.flatnonzero(load >= FULL_FRAC * np.median(load[load > 0])) if (load > 0).any() else np.arange(len(load))
    return int(full[0]), int(full[-1]) + 1


def mser(series: Sequence[float] | Floats) -> tuple[int, int] | None:
    """How many values to cut from the start and from the end: those without which the mean of the rest is surest.

    MSER-5 looks for the start with the least Σ(batch - mean)² / n² of what is left; here both ends are sought at once,
    for a run that runs out would hide its warm-up. The score is flat about its least: of the cuts that are nearly as
    good, the one that leaves most. Noise alone can make a short cut look good, so an end counts only when what it
    cuts lies beyond 2.5 standard deviations of the batches left.

    Returns:
        Multiples of 5, or None when one end would lose a third or both half of the series: it has not settled.
    """
    batches = _batch_means(checked(series))
    size = len(batches)
    sums, squares = (np.concatenate([[0.0], np.cumsum(part)]) for part in (batches, batches**2))
    start, end = np.arange(size // 2 + 1)[:, None], np.arange(size - size // 2, size + 1)[None, :]
    left = np.maximum(end - start, 1)
    deviations = np.maximum(squares[end] - squares[start] - (sums[end] - sums[start]) ** 2 / left, 0.0)
    scores = np.where(end - start >= size - size // 2, deviations / left**2, np.inf)
    nearly = np.where(scores <= NEARLY * scores.min(), left, 0)
    best = np.unravel_index(int(nearly.argmax()), nearly.shape)
    first, last = int(start[best[0], 0]), int(end[0, best[1]])
    rest = batches[first:last]
    warm = first if _stands_out(batches[:first], rest) else 0
    cool = size - last if _stands_out(batches[last:], rest) else 0
    return None if max(warm, cool) > size // 3 or warm + cool >= size // 2 else (warm * BATCH, cool * BATCH)


def _drifts(values: Floats) -> bool:
    """Whether the halves lie further apart than noise puts them: a straight line's are 1.7 of its deviations."""
    batches = _batch_means(values)
    early, late = np.array_split(batches, 2)
    return abs(float(late.mean() - early.mean())) > DRIFTS * float(batches.std())


def _stands_out(cut: Floats, rest: Floats) -> bool:
    return len(cut) > 0 and abs(float(cut.mean() - rest.mean())) > STANDS_OUT * float(rest.std())


def _batch_means(values: Floats) -> Floats:
    size = len(values) // BATCH * BATCH
    means: Floats = values[:size].reshape(-1, BATCH).mean(axis=1)
    return means
