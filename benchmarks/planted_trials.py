"""A rollout of a planted fault: which items it is asked, how it went, and what that is held to. No I/O."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import zip_longest

from benchmarks.harness import Bar, equal_to
from benchmarks.planted_engines import BASE, CHANGED_NOT_WORSE, Planted
from evals.compare import TOLERANCE
from evals.fault_effects import EFFECTS
from evals.suites import suite_of
from evals.tasks import Item
from serving.core.policies.rollout import Phase
from serving.core.sequential import Verdict

SLICE = 32
SEED = 0


@dataclass(frozen=True, slots=True)
class Found:
    """What the items say of a candidate.

    Attributes:
        effect: of the accuracy, candidate less champion.
        interval: at 95 %, and at any time where it was stopped early.
        num_items: asked of each.
    """

    verdict: Verdict
    effect: float
    interval: tuple[float, float]
    num_items: int


@dataclass(frozen=True, slots=True)
class Trial:
    """How a rollout went.

    Attributes:
        outcome: promoted, rolled back, or held at its share.
        reason: the control plane's.
        largest_share: of sessions that the candidate ever had.
        needed_approval: whether the last step waited for a person.
        num_served: sessions meanwhile, and by the candidate among them.
        found_by_prompts: until KL tells that it changed.
        first_difference: tokens until greedy answers differ.
        seconds: from the start of the rollout to its verdict.
    """

    planted: Planted
    outcome: str
    reason: str
    largest_share: float
    needed_approval: bool
    num_served: tuple[int, int]
    num_failed: int
    verdicts: Mapping[str, str]
    drift: str
    kl_mean: float
    found_by_prompts: int | None
    first_difference: int | None
    quality: Found
    seconds: float


def slices() -> Iterator[list[Item]]:
    """Items a task at a time, tasks in turn, no source twice: items of one source would speak for one another."""
    seen: set[str] = set()
    for name in ("smoke", "gate"):
        by_task: dict[str, list[Item]] = {}
        for item in suite_of(name).items(SEED):
            if item.source not in seen:
                seen.add(item.source)
                by_task.setdefault(item.task, []).append(item)
        parts = [[items[n : n + SLICE] for n in range(0, len(items), SLICE)] for items in by_task.values()]
        yield from (part for turn in zip_longest(*parts) for part in turn if part)


def row(trial: Trial) -> str:
    """A trial for people."""
    quality, (num_served, by_candidate) = trial.quality, trial.num_served
    low, high = (100.0 * end for end in quality.interval)
    return (
        f"{trial.planted.name}: {trial.outcome} ({trial.reason}); drift {trial.drift}, KL {trial.kl_mean:.4f} by "
        f"{trial.found_by_prompts} prompts; quality {quality.verdict}, {100.0 * quality.effect:+.1f} points "
        f"[{low:+.1f}, {high:+.1f}] after {quality.num_items} items; at most {100.0 * trial.largest_share:g} % of "
        f"sessions, {by_candidate} of {num_served} served by it, {trial.num_failed} failed; {trial.seconds:.0f} s"
    )


def bars(trial: Trial) -> list[Bar]:
    """What a trial is held to, by what the fault truly does."""
    name, kind = trial.planted.name, trial.planted.kind
    if kind == BASE:
        return [
            equal_to(f"{name}: outcome", trial.outcome, Phase.PROMOTED.value),
            equal_to(f"{name}: drift", trial.drift, "same"),
            equal_to(f"{name}: requests that failed", trial.num_failed, 0),
        ]
    held = [equal_to(f"{name}: requests that failed", trial.num_failed, 0)]
    if kind in CHANGED_NOT_WORSE:
        flagged = trial.drift != "same" and (trial.outcome != Phase.PROMOTED.value or trial.needed_approval)
        return [*held, Bar(f"{name}: flagged as changed", trial.drift, "not same, and approved by a person", flagged)]
    blocked = Bar(f"{name}: largest share of sessions", trial.largest_share, "< 1", trial.largest_share < 1.0)
    return [*held, blocked if _is_worse(kind) else replace(blocked, bar="shown", ok=None)]


def _is_worse(kind: str) -> bool:
    """Whether its true effect is measured, and past the tolerance."""
    effect = EFFECTS[kind].accuracy_points if kind in EFFECTS else None
    return effect is not None and effect[0] < -100.0 * TOLERANCE
