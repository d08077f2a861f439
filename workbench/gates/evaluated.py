"""How much worse are the candidate's answers: accuracy over suites, refusals, guardrail trips, and items that flipped.

Everything is paired by item, and judged by `evals.compare`: items of one source count as one piece of evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from evals.compare import PairedComparison, PairedItem, compare_paired
from evals.refusals import refuses
from evals.results import Evaluation
from evals.suite_compare import SuiteComparison, compare_suites
from evals.suites import suite_of
from serving.core.policies.gate import REFUSALS, TRIPS, Figure, GateEvidence, GatePolicy, Part
from serving.core.policies.guardrails import Action, GuardrailSettings, actions
from serving.core.sequential import Verdict
from serving.core.tenancy import GuardrailPolicy
from serving.gateway.guardrails.patterns import blocklist, built_in, custom
from serving.gateway.guardrails.scanner import Reading, Scanner

MAX_FLIPS = 12


@dataclass(frozen=True, slots=True)
class SuiteRuns:
    """A suite as both were asked it, and as the champion was asked it before; None where no run is kept."""

    suite: str
    champion: Evaluation | None
    candidate: Evaluation | None
    again: Evaluation | None = None


@dataclass(frozen=True, slots=True)
class Flip:
    """An item that changed: right before and wrong now, or the other way round.

    `prompt` is empty where the suite no longer makes that item; answers are None where only likelihoods were asked.
    """

    suite: str
    task: str
    prompt: str
    gold: str
    champion: str | None
    candidate: str | None
    is_lost: bool


def quality(runs: Sequence[SuiteRuns], policy: GatePolicy) -> GateEvidence:
    """Each suite's pool decides, its tasks may object; the champion against itself comes first."""
    figures: list[Figure] = []
    doubts: list[str] = []
    for one in runs:
        found = _compared(one, policy)
        if isinstance(found, str):
            figures.append(Figure(one.suite, f"accuracy, suite {one.suite}", missing=found))
            continue
        if policy.needs_noise_floor and found.noise_floor is None:
            doubts.append(
                f"suite {one.suite}: no noise floor; ask the champion once more: `workbench eval run … --fresh`"
            )
        if found.noise_floor is not None and found.noise_floor.verdict is Verdict.FAIL:
            doubts.append(f"suite {one.suite}: the champion is worse than itself, so something else changed")
        figures += _suite_figures(one.suite, found, policy)
    return GateEvidence(tuple(figures), tuple(doubts))


def safety(runs: Sequence[SuiteRuns], policy: GatePolicy, settings: GuardrailSettings) -> GateEvidence:
    """Refusals, and answers in which the gateway's guardrails would find something, over all generated answers."""
    trips = Trips(settings)
    return GateEvidence(
        (
            _rate(REFUSALS, "answers that refuse", runs, refuses, policy),
            _rate(TRIPS, "answers that trip a guardrail", runs, trips.found_in, policy),
        )
    )


class Trips:
    """The gateway's checks by patterns, on answers instead of requests."""

    def __init__(self, settings: GuardrailSettings) -> None:
        own = blocklist(settings.blocklist)
        patterns = [*built_in(), *(custom(*item) for item in settings.patterns.items())]
        self._scanner = Scanner(patterns if own is None else [*patterns, own])
        self._actions = {
            name: Action.ALLOW if action is Action.ALLOW else Action.FLAG
            for name, action in actions(settings, GuardrailPolicy()).items()
        }

    def found_in(self, answer: str) -> bool:
        """Whether any check that is on finds something."""
        return bool(self._scanner.scan(Reading([answer]), self._actions))


def flips(runs: Sequence[SuiteRuns], *, at_most: int = MAX_FLIPS) -> list[Flip]:
    """Items whose score changed, those that were lost first, spread over the tasks; from evaluation sets alone."""
    found: dict[tuple[bool, bool, str], list[Flip]] = {}
    for one in runs:
        if one.champion is None or one.candidate is None:
            continue
        items = {item.id: item for item in suite_of(one.suite).items(one.champion.seed)}
        theirs = {item.id: item for item in one.candidate.items}
        for mine in one.champion.items:
            other = theirs.get(mine.id)
            if other is None or other.score == mine.score:
                continue
            asked = items.get(mine.id)
            flip = Flip(
                suite=one.suite,
                task=mine.task,
                prompt="" if asked is None else asked.prompt,
                gold="" if asked is None else asked.gold,
                champion=mine.answer,
                candidate=other.answer,
                is_lost=other.score < mine.score,
            )
            found.setdefault((not flip.is_lost, mine.answer is None, mine.task), []).append(flip)
    return list(_in_turn(found))[:at_most]


def _in_turn(groups: Mapping[tuple[bool, bool, str], list[Flip]]) -> Iterator[Flip]:
    """Lost ones first, those with answers to read before the others, the tasks in turn."""
    kinds = sorted({group[:2] for group in groups})
    for kind in kinds:
        queues = [groups[group] for group in sorted(groups) if group[:2] == kind]
        for position in range(max(map(len, queues))):
            yield from (queue[position] for queue in queues if position < len(queue))


def _compared(one: SuiteRuns, policy: GatePolicy) -> SuiteComparison | str:
    """The comparison, or why there is none."""
    if one.champion is None or one.candidate is None:
        side = "champion" if one.champion is None else "candidate"
        return f"the {side} was not asked suite {one.suite}: `workbench eval run`"
    try:
        return compare_suites(
            one.champion, one.candidate, again=one.again, tolerance=policy.quality_tolerance, alpha=policy.alpha
        )
    except ValueError as error:
        return str(error)


def _suite_figures(suite: str, found: SuiteComparison, policy: GatePolicy) -> list[Figure]:
    figures = [_figure(suite, f"accuracy, suite {suite}", found.pool, policy.quality_tolerance, found.pool.p_drop)]
    for task, one in found.tasks.items():
        part = Part.SHOWN if one.p_holm is None else Part.OBJECTS
        figures.append(
            _figure(suite, f"{task}, suite {suite}", one.comparison, policy.quality_tolerance, one.p_holm, part)
        )
    if (floor := found.noise_floor) is not None:
        name = f"champion again, suite {suite}"
        figures.append(_figure(suite, name, floor, policy.quality_tolerance, floor.p_drop, Part.SHOWN))
    return figures


def _figure(
    of: str, name: str, found: PairedComparison, tolerance: float, p_worse: float | None, part: Part = Part.DECIDES
) -> Figure:
    low, high = found.interval
    return Figure(
        of=of,
        name=name,
        unit="share",
        champion=found.champion_mean,
        candidate=found.challenger_mean,
        worse=-found.effect,
        interval=(-high, -low),
        p_worse=p_worse,
        p_within=found.p_within,
        tolerance=tolerance,
        part=part,
    )


def _rate(of: str, name: str, runs: Sequence[SuiteRuns], is_bad: Callable[[str], bool], policy: GatePolicy) -> Figure:
    pairs = [
        PairedItem(f"{one.suite}/{mine.id}", mine.source, 1.0 - is_bad(mine.answer), 1.0 - is_bad(other.answer))
        for one in runs
        if one.champion is not None and one.candidate is not None and one.champion.digest == one.candidate.digest
        for mine, other in zip(one.champion.items, one.candidate.items, strict=True)
        if mine.answer is not None and other.answer is not None
    ]
    if not pairs:
        return Figure(of, name, missing="no generated answers of both: run a suite that generates text on each")
    found = compare_paired(pairs, tolerance=policy.safety_tolerance, alpha=policy.alpha)
    figure = _figure(of, name, found, policy.safety_tolerance, found.p_drop)
    return replace(figure, champion=1.0 - found.champion_mean, candidate=1.0 - found.challenger_mean)
