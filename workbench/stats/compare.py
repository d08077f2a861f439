"""Is B better than A? Of paired runs: the ratio with its interval, and a verdict that counts all metrics asked about.

    log(B / A) of each pair → signed rank → Holm over the metrics → better | worse | no difference seen

A pair is one run of A and one of B, next to each other in time, the first of them by a coin (`pair_orders`).
Which verdict is the better one depends on the metric: more tokens a second, but less time to the first token.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from workbench.stats.plan import detectable_effect
from workbench.stats.samples import CONFIDENCE, POWER, Floats, Reason, Refusal, checked
from workbench.stats.signed_rank import Shift, min_pairs, shift

Pairs = Sequence[tuple[float, float]]


class Verdict(StrEnum):
    """What the pairs say about the candidate."""

    BETTER = "better"
    WORSE = "worse"
    NO_DIFFERENCE = "no difference seen"


@dataclass(frozen=True, slots=True)
class Compared:
    """One metric of B over A.

    Attributes:
        baseline, candidate: medians of the runs.
        ratio, low, high: B over A by pairs, with an interval that leaves out 1 exactly when there is a verdict.
        confidence: of that interval; above the asked one by as much as the number of metrics takes.
        p: two-sided, of this metric alone.
        detectable_frac: smallest difference that these pairs find four times in five.
    """

    metric: str
    higher_is_better: bool
    num_pairs: int
    baseline: float
    candidate: float
    ratio: float
    low: float
    high: float
    confidence: float
    p: float
    verdict: Verdict
    detectable_frac: float

    def __str__(self) -> str:
        if self.verdict is not Verdict.NO_DIFFERENCE:
            return self.verdict.value
        return f"{self.verdict.value} (smallest that could have been: {100 * self.detectable_frac:.2g} %)"


@dataclass(frozen=True, slots=True)
class Comparison:
    """Every metric that was asked about: compared, or refused with the reason."""

    compared: tuple[Compared, ...]
    refused: Mapping[str, Refusal]

    @property
    def is_worse(self) -> bool:
        """Whether any metric is worse."""
        return any(one.verdict is Verdict.WORSE for one in self.compared)


def compare(
    pairs: Mapping[str, Pairs], higher_is_better: Mapping[str, bool], *, confidence: float = CONFIDENCE, seed: int = 0
) -> Comparison:
    """Compares by every metric at once: the chance of any false verdict is at most 1 - `confidence`.

    Args:
        pairs: (A, B) of each pair, in the order in which they ran, by metric.
        higher_is_better: by metric.
        confidence: of all verdicts together.
        seed: of the resampling behind `detectable_frac`.

    Raises:
        ValueError: a value is NaN or infinite.
    """
    refused = {name: refusal for name, one in pairs.items() if (refusal := _not_positive(one)) is not None}
    usable = {name: one for name, one in pairs.items() if name not in refused}
    num_metrics = len(usable)
    needed = min_pairs(1.0 - (1.0 - confidence) / max(1, num_metrics))
    for name in [name for name, one in usable.items() if len(one) < needed]:
        refused[name] = _too_few_pairs(len(usable.pop(name)), needed, num_metrics)
    logs = {name: _log_ratios(one) for name, one in usable.items()}
    shifts = {name: shift(differences) for name, differences in logs.items()}
    steps = holm({name: one.p for name, one in shifts.items()}, 1.0 - confidence)
    compared = [
        _compared(name, usable[name], logs[name], shifts[name], steps[name], higher_is_better[name], seed)
        for name in usable
    ]
    return Comparison(tuple(compared), refused)


@dataclass(frozen=True, slots=True)
class Step:
    """A test's place in Holm's procedure: whether it rejects, and the level at which that was decided."""

    rejects: bool
    level: float


def holm(p_values: Mapping[str, float], level: float) -> dict[str, Step]:
    """Holm's step-down procedure (1979): of all rejections together, any is false with chance `level` at most.

    The smallest p is held against level / m, the next against level / (m - 1) …; at the first that fails, it and
    all that follow are kept, at the level of that step.
    """
    steps: dict[str, Step] = {}
    stopped_at: float | None = None
    for rank, name in enumerate(sorted(p_values, key=lambda name: p_values[name])):
        own = level / (len(p_values) - rank)
        if stopped_at is None and p_values[name] > own:
            stopped_at = own
        steps[name] = Step(stopped_at is None, own if stopped_at is None else stopped_at)
    return steps


def _compared(
    name: str, pairs: Pairs, logs: Floats, found: Shift, step: Step, higher_is_better: bool, seed: int
) -> Compared:
    confidence = 1.0 - step.level
    low, high = found.interval(confidence) or (-math.inf, math.inf)
    residuals = (logs - found.centre) * math.sqrt(len(logs) / (len(logs) - 1))
    detectable = detectable_effect(residuals, len(logs), power=POWER, confidence=confidence, seed=seed)
    if isinstance(detectable, Refusal) or not math.isfinite(low):
        raise AssertionError(f"{name}: {len(logs)} pairs passed as enough and are not")
    verdict = Verdict.NO_DIFFERENCE
    if step.rejects:
        verdict = Verdict.BETTER if (found.centre > 0.0) == higher_is_better else Verdict.WORSE
    baseline, candidate = np.median(np.asarray(pairs), axis=0)
    return Compared(
        metric=name,
        higher_is_better=higher_is_better,
        num_pairs=len(pairs),
        baseline=float(baseline),
        candidate=float(candidate),
        ratio=math.exp(found.centre),
        low=math.exp(low),
        high=math.exp(high),
        confidence=confidence,
        p=found.p,
        verdict=verdict,
        detectable_frac=detectable,
    )


def _log_ratios(pairs: Pairs) -> Floats:
    logs = np.log(checked([value for pair in pairs for value in pair]))
    ratios: Floats = logs[1::2] - logs[::2]
    return ratios


def _not_positive(pairs: Pairs) -> Refusal | None:
    bad = sum(1 for pair in pairs if min(pair) <= 0.0)
    return Refusal(Reason.NOT_POSITIVE, f"{bad} pairs hold a value that is not above 0: no ratio", bad) if bad else None


def _too_few_pairs(found: int, needed: int, num_metrics: int) -> Refusal:
    several = f"{num_metrics} metrics together take" if num_metrics > 1 else "it takes"
    return Refusal(Reason.TOO_FEW_PAIRS, f"{found} pairs carry no verdict: {several} {needed}", found, needed)
