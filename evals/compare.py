"""Champion against challenger on the same items: is the challenger worse, and by how much at most.

    no drop      rejected (a fail) by flipping the signs of sources: where a source has one yes-or-no item this is
                 McNemar's exact test; where it has several, they count as one piece of evidence
    drop of the  rejected (a pass) by a bootstrap over sources, to which one source is added that lost everything:
    tolerance    without it, items that all agree would prove anything (the rule of succession; with no
                 disagreement the bound is that of the rule of three)

Neither rejected is inconclusive: "no significant difference" is no pass. The noise floor is the same comparison of the
champion with itself, run twice at the same load.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats as distributions

from serving.core.sequential import Verdict

ALPHA = 0.05
POWER = 0.8
TOLERANCE = 0.02
NUM_RESAMPLES = 4000
# Resamples drawn at once: bounds the memory of many sources.
CHUNK = 250

Floats = NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class PairedItem:
    """One item, scored under both.

    Attributes:
        item_id: names it in reports.
        source: what it was made from; items of one source speak for one another.
        champion: score in [0, 1].
        challenger: score in [0, 1].
    """

    item_id: str
    source: str
    champion: float
    challenger: float


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """What paired items say of a challenger.

    Attributes:
        effect: challenger less champion, of the mean score over items; negative is worse.
        interval: of the effect, at 1 - alpha, by the bootstrap over sources.
        p_drop: the chance of a drop like this one if there were none.
        p_within: the chance of an effect like this one if the drop were the tolerance.
        smallest_seen: the drop that would have been found with a chance of 80 %.
        discordant_frac: share of items on which the two differ.
        worst: ids of the items that lost most, the worst first.
    """

    verdict: Verdict
    champion_mean: float
    challenger_mean: float
    effect: float
    interval: tuple[float, float]
    p_drop: float
    p_within: float
    smallest_seen: float
    discordant_frac: float
    num_items: int
    num_sources: int
    tolerance: float
    worst: tuple[str, ...]

    def __str__(self) -> str:
        low, high = (100.0 * end for end in self.interval)
        return (
            f"{self.verdict}: {100 * self.champion_mean:.1f} → {100 * self.challenger_mean:.1f} %, "
            f"{100 * self.effect:+.1f} points [{low:+.1f}, {high:+.1f}], {self.num_items} items of "
            f"{self.num_sources} sources; tolerance {100 * self.tolerance:.1f}, smallest drop that would have been "
            f"seen {100 * self.smallest_seen:.1f}"
        )


def compare_paired(
    items: Sequence[PairedItem], *, tolerance: float = TOLERANCE, alpha: float = ALPHA, seed: int = 0
) -> PairedComparison:
    """Judges a challenger by the items that both answered.

    Args:
        items: each item once.
        tolerance: the drop of the mean score that is not to pass.
        alpha: the chance of a false fail, and of a false pass.
        seed: of the bootstrap.

    Raises:
        ValueError: no items, an item twice, or a score outside [0, 1].
    """
    _check(items, tolerance)
    sums, sizes = _by_source(items)
    effect = float(sums.sum() / sizes.sum())
    rng = np.random.default_rng(seed)
    p_drop = sign_flip_p(sums, rng)
    resampled = _resampled(sums, sizes, rng)
    low, high = np.quantile(resampled, [alpha / 2, 1 - alpha / 2])
    lost = float(sizes.mean())
    wary = _resampled(np.append(sums, -lost), np.append(sizes, lost), rng)
    p_within = float((1 + np.count_nonzero(wary <= -tolerance)) / (1 + len(wary)))
    return PairedComparison(
        verdict=_verdict(p_drop, p_within, alpha),
        champion_mean=float(np.mean([item.champion for item in items])),
        challenger_mean=float(np.mean([item.challenger for item in items])),
        effect=effect,
        interval=(float(low), float(high)),
        p_drop=p_drop,
        p_within=p_within,
        smallest_seen=_smallest_seen(sums, sizes, alpha),
        discordant_frac=sum(item.champion != item.challenger for item in items) / len(items),
        num_items=len(items),
        num_sources=len(sums),
        tolerance=tolerance,
        worst=_worst(items),
    )


def sign_flip_p(sums: Floats, rng: np.random.Generator) -> float:
    """One-sided p-value of "no drop": how often as large a loss comes when each source's sign is a coin's.

    Exact for whole numbers, such as counts of items lost and won; otherwise from resamples, never 0.

    Args:
        sums: challenger less champion, summed over each source's items.
        rng: for sums that are no whole numbers.
    """
    moved = np.abs(sums[sums != 0.0])
    observed = float(sums.sum())
    if not len(moved):
        return 1.0
    if np.all(moved == np.round(moved)):
        return _exact_flips(moved.astype(int), round(observed))
    hits, drawn = 0, 0
    while drawn < NUM_RESAMPLES:
        signs = rng.integers(0, 2, size=(CHUNK, len(moved))) * 2 - 1
        hits += int(np.count_nonzero(signs @ moved <= observed + 1e-9))
        drawn += CHUNK
    return (1 + hits) / (1 + drawn)


def _exact_flips(steps: NDArray[np.int_], observed: int) -> float:
    """P(sum of ± steps <= observed): the distribution grows by one step at a time."""
    total = int(steps.sum())
    chances = np.zeros(2 * total + 1)
    chances[total] = 1.0
    for step in steps:
        grown = np.zeros_like(chances)
        grown[step:] += chances[: len(chances) - step] / 2.0
        grown[: len(chances) - step] += chances[step:] / 2.0
        chances = grown
    return min(1.0, float(chances[: total + observed + 1].sum()))


def _check(items: Sequence[PairedItem], tolerance: float) -> None:
    if not items:
        raise ValueError("nothing to compare: no item was answered by both")
    if not 0.0 < tolerance < 1.0:
        raise ValueError(f"a tolerance is a drop of the mean score between 0 and 1; got {tolerance}")
    seen: set[str] = set()
    for item in items:
        if item.item_id in seen:
            raise ValueError(f"item {item.item_id!r} is there twice; each item counts once")
        seen.add(item.item_id)
        for side, score in (("champion", item.champion), ("challenger", item.challenger)):
            if not 0.0 <= score <= 1.0:
                raise ValueError(f"item {item.item_id!r}: a score lies from 0 to 1, the {side}'s is {score}")


def _by_source(items: Sequence[PairedItem]) -> tuple[Floats, Floats]:
    """Of each source: its items' differences summed, and how many they are."""
    sums: defaultdict[str, list[float]] = defaultdict(list)
    for item in items:
        sums[item.source].append(item.challenger - item.champion)
    return (
        np.array([math.fsum(of_source) for of_source in sums.values()]),
        np.array([float(len(of_source)) for of_source in sums.values()]),
    )


def _resampled(sums: Floats, sizes: Floats, rng: np.random.Generator) -> Floats:
    """Mean differences of samples of as many sources, drawn with replacement; equal ones at once."""
    kinds, counts = np.unique(np.column_stack([sums, sizes]), axis=0, return_counts=True)
    found = []
    for _ in range(0, NUM_RESAMPLES, CHUNK):
        times = rng.multinomial(len(sums), counts / len(sums), size=CHUNK)
        found.append((times @ kinds[:, 0]) / (times @ kinds[:, 1]))
    return np.concatenate(found)


def _smallest_seen(sums: Floats, sizes: Floats, alpha: float) -> float:
    """(z of alpha + z of the power) standard errors of a ratio of sums over sources."""
    if len(sums) < 2:
        return math.inf
    residuals = sums - sizes * (sums.sum() / sizes.sum())
    se = math.sqrt(len(sums) / (len(sums) - 1) * float(np.square(residuals).sum())) / float(sizes.sum())
    reach = distributions.norm.ppf(1.0 - alpha) + distributions.norm.ppf(POWER)
    # Where nothing differed the error is unknown, not zero: the rule of three bounds it.
    return max(float(reach) * se, 1.0 - alpha ** (1.0 / len(sums)))


def _verdict(p_drop: float, p_within: float, alpha: float) -> Verdict:
    if p_within < alpha:
        return Verdict.PASS
    return Verdict.FAIL if p_drop < alpha else Verdict.INCONCLUSIVE


def _worst(items: Sequence[PairedItem], num: int = 20) -> tuple[str, ...]:
    lost = sorted((item.challenger - item.champion, item.item_id) for item in items)
    return tuple(item_id for change, item_id in lost[:num] if change < 0.0)
