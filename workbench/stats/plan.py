"""Before an A/B: in which order its runs go, and how small an effect so many pairs will find (from an A/A)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from workbench.stats.autocorrelation import lag1_correlation
from workbench.stats.samples import CONFIDENCE, POWER, Floats, Reason, Refusal, checked, checked_positive, named_rng
from workbench.stats.signed_rank import end_rank, min_pairs, walsh_averages

NUM_PAIRS = (6, 8, 12, 16, 24, 32, 48)
MAX_PAIRS = 96
NUM_RESAMPLES = 1000
MIN_REPEATS = 6


class Side(StrEnum):
    """Which of the two a run measures."""

    BASELINE = "A"
    CANDIDATE = "B"


def pair_orders(num_pairs: int, rng: np.random.Generator) -> list[tuple[Side, Side]]:
    """The order of runs in each pair, a fair coin each: what makes the signed-rank test right on any machine.

    A fixed A B A B gives what drifts within a pair to B.
    """
    order = (Side.BASELINE, Side.CANDIDATE)
    return [order if rng.random() < 0.5 else order[::-1] for _ in range(num_pairs)]


@dataclass(frozen=True, slots=True)
class Planned:
    """With so many pairs, a change of this size is found with the plan's power."""

    num_pairs: int
    effect_frac: float


@dataclass(frozen=True, slots=True)
class Plan:
    """What an A/A says about A/Bs to come.

    Attributes:
        num_repeats: identical runs that it rests on.
        spread_frac: standard deviation of the runs' logarithms.
        pair_spread_frac: that of the difference of neighbours, over √2: what pairing leaves of it.
        memory: correlation of a run with the next; above 0, pairing helps.
        rows: smallest detectable effect by number of pairs.
    """

    num_repeats: int
    spread_frac: float
    pair_spread_frac: float
    memory: float
    confidence: float
    power: float
    rows: tuple[Planned, ...]

    def pairs_for(self, effect_frac: float) -> int | None:
        """Fewest of the planned numbers of pairs that find this effect; None when none does."""
        return next((row.num_pairs for row in self.rows if row.effect_frac <= effect_frac), None)


def plan(
    repeats: Sequence[float],
    *,
    num_pairs: Sequence[int] = NUM_PAIRS,
    num_metrics: int = 1,
    power: float = POWER,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> Plan | Refusal:
    """The plan of an A/B on a machine that gave these figures in identical runs, in their order.

    Args:
        repeats: one figure a run, all above 0.
        num_pairs: for which the effect is computed; those too few for a verdict are left out.
        num_metrics: compared together; Holm's correction is planned for at its first, hardest step.
        power: with which the effect is found.
        confidence: of the verdict.
        seed: of the resampling.

    Raises:
        ValueError: a value that is not above 0.
    """
    if len(repeats) < MIN_REPEATS:
        text = f"{len(repeats)} identical runs say too little of the spread between runs: it takes {MIN_REPEATS}"
        return Refusal(Reason.TOO_FEW_VALUES, text, len(repeats), MIN_REPEATS)
    logs = np.log(checked_positive(repeats))
    differences = np.diff(logs)
    hardest = 1.0 - (1.0 - confidence) / num_metrics
    rows = []
    for count in num_pairs:
        effect = detectable_effect(differences, count, power=power, confidence=hardest, seed=seed)
        if not isinstance(effect, Refusal):
            rows.append(Planned(count, effect))
    return Plan(
        num_repeats=len(repeats),
        spread_frac=float(logs.std(ddof=1)),
        pair_spread_frac=float(np.sqrt(np.mean(differences**2) / 2.0)),
        memory=lag1_correlation(logs),
        confidence=confidence,
        power=power,
        rows=tuple(rows),
    )


def detectable_effect(
    residuals: Sequence[float] | Floats,
    num_pairs: int,
    *,
    power: float = POWER,
    confidence: float = CONFIDENCE,
    seed: int = 0,
) -> float | Refusal:
    """Smallest relative change that `num_pairs` pairs find with `power`, by drawing pairs from those seen.

    A draw finds a change as soon as it lifts the interval's lower end above 0; so the change that a share `power`
    of the draws finds is a quantile of how far those ends lie below 0.

    Args:
        residuals: log ratios of pairs that differ by chance alone; each counts with either sign.
        num_pairs: of the A/B; above 96, the effect of 96 shrunk by the root of their number.
        power: share of A/Bs that find it.
        confidence: of the verdict.
        seed: of the draws.
    """
    needed = min_pairs(confidence)
    if num_pairs < needed:
        text = f"{num_pairs} pairs carry no verdict at {100 * confidence:.4g} %: it takes {needed}"
        return Refusal(Reason.TOO_FEW_PAIRS, text, num_pairs, needed)
    sample = checked(residuals)
    count = min(num_pairs, MAX_PAIRS)
    rng = named_rng(seed, f"detectable/{count}")
    drawn = rng.choice(sample, size=(NUM_RESAMPLES, count)) * rng.choice([-1.0, 1.0], size=(NUM_RESAMPLES, count))
    reaches = -walsh_averages(drawn)[:, end_rank(count, confidence) or 0]
    reach = float(np.quantile(reaches, power)) * math.sqrt(count / num_pairs)
    return math.expm1(max(reach, 0.0))
