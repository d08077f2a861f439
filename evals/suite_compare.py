"""Two evaluations of the same items: the pool decides, each task can object, the champion's own noise comes first."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from evals.compare import ALPHA, TOLERANCE, PairedComparison, PairedItem, compare_paired
from evals.results import Evaluation
from serving.core.sequential import Verdict


@dataclass(frozen=True, slots=True)
class TaskComparison:
    """One task's part.

    Attributes:
        p_holm: of "no drop", corrected by Holm for the tasks that count; None for one that does not.
        objects: the drop is real by `p_holm` and as large as the tolerance.
    """

    comparison: PairedComparison
    p_holm: float | None
    objects: bool


@dataclass(frozen=True, slots=True)
class SuiteComparison:
    """What the evidence of a gate says of quality.

    Attributes:
        verdict: the pool's; fail where a task objects; inconclusive where the champion fails against itself.
        pool: over the tasks that count.
        tasks: every task, also those that are only reported.
        noise_floor: the champion against itself; None where no second run was given.
        reasons: in words, what made the verdict another than the pool's.
    """

    verdict: Verdict
    pool: PairedComparison
    tasks: Mapping[str, TaskComparison]
    noise_floor: PairedComparison | None
    reasons: tuple[str, ...]


def compare_suites(
    champion: Evaluation,
    challenger: Evaluation,
    *,
    again: Evaluation | None = None,
    tolerance: float = TOLERANCE,
    alpha: float = ALPHA,
) -> SuiteComparison:
    """Judges a challenger by two evaluations.

    Args:
        champion: the reference; which tasks count is by its accuracy.
        challenger: of the same items at the same concurrency.
        again: a second run of the champion, for the noise floor.
        tolerance: the drop of the pooled accuracy that is not to pass.
        alpha: the chance of a false fail, and of a false pass.

    Raises:
        ValueError: other items or another concurrency, or no task counts.
    """
    _check(champion, challenger)
    counts = champion.counts_in_gate()
    pairs = _pairs(champion, challenger)
    counted = [pair for task, of_task in pairs.items() if counts[task] for pair in of_task]
    if not counted:
        raise ValueError("no task counts: each generates text, and the champion is outside 15 to 85 % on it")
    pool = compare_paired(counted, tolerance=tolerance, alpha=alpha)
    tasks = _tasks(pairs, counts, tolerance, alpha)
    floor = None
    if again is not None:
        _check(champion, again)
        own = _pairs(champion, again)
        floor = compare_paired(
            [pair for task, of_task in own.items() if counts[task] for pair in of_task],
            tolerance=tolerance,
            alpha=alpha,
        )
    verdict, reasons = _verdict(pool, tasks, floor)
    return SuiteComparison(verdict, pool, tasks, floor, reasons)


def holm(p_values: Mapping[str, float]) -> dict[str, float]:
    """Holm's adjusted p-values: below alpha where the step-down test rejects at alpha for the family."""
    adjusted: dict[str, float] = {}
    highest = 0.0
    for rank, (name, p) in enumerate(sorted(p_values.items(), key=lambda pair: pair[1])):
        highest = max(highest, min(1.0, p * (len(p_values) - rank)))
        adjusted[name] = highest
    return adjusted


def _check(first: Evaluation, second: Evaluation) -> None:
    if first.digest != second.digest:
        raise ValueError(
            f"other items: suite {first.suite}, seed {first.seed} against suite {second.suite}, seed {second.seed}; "
            "run both with the same suite and seed"
        )
    if first.concurrency != second.concurrency:
        raise ValueError(
            f"asked at concurrency {first.concurrency} and {second.concurrency}; texts differ by that alone"
        )


def _pairs(champion: Evaluation, challenger: Evaluation) -> dict[str, list[PairedItem]]:
    scores = {item.id: item.score for item in challenger.items}
    pairs: dict[str, list[PairedItem]] = {}
    for item in champion.items:
        pair = PairedItem(item.id, item.source, item.score, scores[item.id])
        pairs.setdefault(item.task, []).append(pair)
    return pairs


def _tasks(
    pairs: Mapping[str, list[PairedItem]], counts: Mapping[str, bool], tolerance: float, alpha: float
) -> dict[str, TaskComparison]:
    found = {task: compare_paired(of_task, tolerance=tolerance, alpha=alpha) for task, of_task in pairs.items()}
    adjusted = holm({task: comparison.p_drop for task, comparison in found.items() if counts[task]})
    return {
        task: TaskComparison(
            comparison,
            adjusted.get(task),
            objects=adjusted.get(task, 1.0) < alpha and comparison.effect <= -tolerance,
        )
        for task, comparison in found.items()
    }


def _verdict(
    pool: PairedComparison, tasks: Mapping[str, TaskComparison], floor: PairedComparison | None
) -> tuple[Verdict, tuple[str, ...]]:
    if floor is not None and floor.verdict is Verdict.FAIL:
        return Verdict.INCONCLUSIVE, ("the champion is worse than itself: something else changed between its two runs",)
    objecting = tuple(
        f"{task} dropped by {-100 * found.comparison.effect:.1f} points"
        for task, found in tasks.items()
        if found.objects
    )
    return (Verdict.FAIL, objecting) if objecting else (pool.verdict, ())
