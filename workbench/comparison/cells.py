"""Measured cells of A against those of B: which runs make pairs, what forbids a comparison, and its outcome.

    cells → same cell, next in time → pairs → invalid ones out → turns → stats.compare → Outcome

A sweep that is repeated in turns (A B B A …) gives interleaved pairs. Of two sweeps measured on different days the
machine is a part of the difference: such a comparison is refused unless it is asked for, and then says so.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import StrEnum
from statistics import geometric_mean
from typing import Any

from serving.core.state import Task
from workbench import stats
from workbench.comparison.turns import Pair, Paired, in_order, neighbours, together
from workbench.run_fields import flat
from workbench.sweeps.cells import MEASURED, CellResult

DEFAULT_METRICS = {
    Task.GENERATE: ("output_tokens_per_s_per_gpu", "ttft_s/p50", "tpot_s/p50"),
    Task.EMBED: ("prompt_tokens_per_s_per_gpu", "e2e_s/p50"),
}
HIGHER_IS_BETTER = {
    **dict.fromkeys(("output_tokens_per_s_per_gpu", "prompt_tokens_per_s_per_gpu", "decode_tokens_per_s"), True),
    **dict.fromkeys(("output_tokens_per_s_per_user", "tokens_per_s_per_gpu", "tokens_per_s_per_user"), True),
    **dict.fromkeys(("request_rps", "goodput_rps", "slo_good_frac", "cached_prompt_frac"), True),
    **dict.fromkeys(("ttft_s", "ttfc_s", "service_ttft_s", "itl_s", "tpot_s", "e2e_s", "service_e2e_s"), False),
    **dict.fromkeys(("failed_frac", "joules_per_token", "joules_per_output_token"), False),
    **dict.fromkeys(("usd_per_million_tokens", "usd_per_million_output_tokens"), False),
    **dict.fromkeys(("usd_per_million_input_tokens", "usd_per_million_cached_input_tokens"), False),
}
MAX_NAMED_DIFFERENCES = 6


class Difference(StrEnum):
    """What may differ between A and B only when it is asked for."""

    HARDWARE = "hardware"
    ENGINE = "engine"
    MODEL = "model"
    TOOL = "tool"  # measured by us, or imported from another load generator
    SEPARATE = "separate"  # measured one after the other instead of in turns


class NotComparable(Exception):
    """A and B say nothing about each other; `difference` is what would have to be allowed, None where nothing helps."""

    def __init__(self, message: str, difference: Difference | None = None) -> None:
        super().__init__(message)
        self.difference = difference


class UnknownMetric(ValueError):
    """Nobody knows whether more of it is better; the message names those that can be compared."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """A against B, of all cells together or of one.

    Attributes:
        cell_id: the cell, or None for all together.
        num_pairs: turns that count; a turn of several cells is one pair of geometric means.
        num_invalid: pairs left out because one of the two does not count.
        num_single: cells of one side that have no neighbour of the other.
    """

    cell_id: str | None
    num_pairs: int
    num_invalid: int
    num_single: int
    compared: tuple[stats.Compared, ...]
    refused: Mapping[str, stats.Refusal]


@dataclass(frozen=True, slots=True)
class RunComparison:
    """All outcomes, and what a reader must know beside them."""

    outcomes: tuple[Outcome, ...]
    notes: tuple[str, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    @property
    def is_worse(self) -> bool:
        """Whether any metric of any outcome is worse."""
        return any(one.verdict is stats.Verdict.WORSE for outcome in self.outcomes for one in outcome.compared)

    @property
    def has_verdict(self) -> bool:
        """Whether anything could be compared at all."""
        return any(outcome.compared for outcome in self.outcomes)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types; each compared metric with its verdict as people read it in `says`."""
        outcomes = []
        for outcome in self.outcomes:
            plain = asdict(outcome)
            plain["compared"] = [asdict(one) | {"says": str(one)} for one in outcome.compared]
            plain["refused"] = {name: asdict(refusal) for name, refusal in outcome.refused.items()}
            outcomes.append(plain)
        differences = {name: list(values) for name, values in self.differences.items()}
        return {
            "outcomes": outcomes,
            "notes": list(self.notes),
            "differences": differences,
            "is_worse": self.is_worse,
        }


def is_higher_better(metric: str) -> bool:
    """Direction of a metric by its name before the `/`.

    Raises:
        UnknownMetric: it has none.
    """
    name = metric.partition("/")[0]
    if name not in HIGHER_IS_BETTER:
        known = ", ".join(sorted(HIGHER_IS_BETTER))
        raise UnknownMetric(f"{metric!r} cannot be compared: of these it is known which way is better: {known}")
    return HIGHER_IS_BETTER[name]


def compare_cells(
    baseline: Sequence[CellResult],
    candidate: Sequence[CellResult],
    *,
    metrics: Sequence[str] | None = None,
    allow: Collection[Difference] = (),
    by_cell: bool = False,
) -> RunComparison:
    """Compares B with A.

    Args:
        baseline: the cells of A, valid or not.
        candidate: those of B.
        metrics: names as in `CellResult.metrics`; by default throughput and the medians of TTFT and TPOT.
        allow: differences to accept.
        by_cell: an outcome for each cell instead of one for all together.

    Raises:
        NotComparable: no cell in common, a difference that is not allowed, the same results twice.
        UnknownMetric: a metric without a direction.
    """
    _check(baseline, candidate, allow)
    names = tuple(metrics) if metrics else DEFAULT_METRICS[baseline[0].task]
    directions = {name: is_higher_better(name) for name in names}
    is_separate = Difference.SEPARATE in allow
    cells = _by_cell(baseline, candidate)
    paired = {cell_id: (in_order if is_separate else neighbours)(*sides) for cell_id, sides in cells.items()}
    groups: list[tuple[str | None, Paired]] = [(None, together(paired.values(), share_turns=not is_separate))]
    if by_cell:
        groups = list(paired.items())
    if not is_separate:
        _check_turns(cells.values(), [one for _, one in groups])
    outcomes = _outcomes(groups, directions)
    notes = ["A and B were not interleaved: the machine may have changed between them"] if is_separate else []
    commits = sorted({cell.commit for cell in (*baseline, *candidate)})
    notes += [f"measured by {len(commits)} states of this code: {', '.join(commits)}"] if len(commits) > 1 else []
    if any(cell.provenance != MEASURED for cell in (*baseline, *candidate)):
        notes.append(
            "imported results do not say on which engine and hardware they were measured: that is yours to know"
        )
    return RunComparison(outcomes, tuple(notes), _covered(baseline[0], candidate[0]))


def _check_turns(cells: Iterable[tuple[Sequence[CellResult], Sequence[CellResult]]], groups: Iterable[Paired]) -> None:
    """Raises NotComparable when there are runs enough, but A and B did not take turns."""
    needed = stats.min_pairs()
    numin_order = sum(len(in_order(*sides).turns) for sides in cells)
    if numin_order >= needed and all(len(one.turns) < needed for one in groups):
        raise NotComparable(
            f"A and B did not take at least {needed} turns, so a change of the machine between them would count as one "
            "of B: measure them interleaved, or allow `separate` and read the verdict with that in mind",
            Difference.SEPARATE,
        )


def _outcomes(groups: Sequence[tuple[str | None, Paired]], directions: Mapping[str, bool]) -> tuple[Outcome, ...]:
    """All groups and metrics are one family: the chance of any false verdict among them is that of one."""
    refused: dict[str, stats.Refusal] = {}
    pairs: dict[str, stats.Pairs] = {}
    for cell_id, one in groups:
        for name in directions:
            found = _values(name, one.turns)
            if isinstance(found, stats.Refusal):
                refused[_key(cell_id, name)] = found
            else:
                pairs[_key(cell_id, name)] = found
    better_higher = {_key(cell_id, name): higher for cell_id, _ in groups for name, higher in directions.items()}
    comparison = stats.compare(pairs, better_higher)
    compared = {one.metric: one for one in comparison.compared}
    refused |= comparison.refused

    def of_group(cell_id: str | None, one: Paired) -> Outcome:
        keys = {name: _key(cell_id, name) for name in directions}
        return Outcome(
            cell_id=cell_id,
            num_pairs=len(one.turns),
            num_invalid=one.num_invalid,
            num_single=one.num_single,
            compared=tuple(replace(compared[key], metric=name) for name, key in keys.items() if key in compared),
            refused={name: refused[key] for name, key in keys.items() if key in refused},
        )

    return tuple(of_group(cell_id, one) for cell_id, one in groups)


def _key(cell_id: str | None, metric: str) -> str:
    return f"{cell_id or ''} {metric}"


def _values(name: str, turns: Sequence[Sequence[Pair]]) -> list[tuple[float, float]] | stats.Refusal:
    """A's and B's figure of each turn: of several cells the geometric mean."""
    cells = [cell for turn in turns for pair in turn for cell in pair]
    num_weak = sum(name in cell.weak for cell in cells)
    if num_weak:
        text = (
            f"{num_weak} of {len(cells)} runs are too short to carry it: measure longer, or ask for a lower percentile"
        )
        return stats.Refusal(stats.Reason.WEAK_PERCENTILE, text, num_weak)
    num_absent = sum(_value(cell, name) is None for cell in cells)
    if num_absent:
        return stats.Refusal(stats.Reason.ABSENT, f"{num_absent} of {len(cells)} runs do not have it", num_absent)
    sides = [[_mean([_value(pair[side], name) or 0.0 for pair in turn]) for turn in turns] for side in (0, 1)]
    return list(zip(*sides, strict=True))


def _mean(values: Sequence[float]) -> float:
    """Geometric mean, 0 where one is not above 0: no ratio can be made of that either."""
    return geometric_mean(values) if min(values) > 0.0 else 0.0


def _value(cell: CellResult, name: str) -> float | None:
    return cell.decode_tokens_per_s if name == "decode_tokens_per_s" else cell.metrics.get(name)


def _by_cell(
    baseline: Sequence[CellResult], candidate: Sequence[CellResult]
) -> dict[str, tuple[list[CellResult], list[CellResult]]]:
    ids = [{cell.spec.cell_id for cell in side} for side in (baseline, candidate)]
    return {
        cell_id: (
            [cell for cell in baseline if cell.spec.cell_id == cell_id],
            [cell for cell in candidate if cell.spec.cell_id == cell_id],
        )
        for cell_id in sorted(ids[0] & ids[1])
    }


def _check(baseline: Sequence[CellResult], candidate: Sequence[CellResult], allow: Collection[Difference]) -> None:
    """Raises NotComparable where A and B must not be set against each other."""
    if not baseline or not candidate:
        raise NotComparable(f"{'B' if baseline else 'A'} holds no measured cell")
    if {cell.measurement_id for cell in baseline} & {cell.measurement_id for cell in candidate}:
        raise NotComparable("A and B share measurements: name two different results")
    if not _by_cell(baseline, candidate):
        raise NotComparable(f"no cell in common: A has {_ids(baseline)}, B has {_ids(candidate)}")
    of: dict[Difference, Callable[[CellResult], object]] = {
        Difference.MODEL: lambda cell: f"{cell.model}@{cell.version}",
        Difference.HARDWARE: lambda cell: cell.hardware_fingerprint,
        Difference.ENGINE: lambda cell: cell.engine_fingerprint,
        Difference.TOOL: lambda cell: cell.provenance,
    }
    for difference, key in of.items():
        sides = [sorted({str(key(cell)) for cell in side}) for side in (baseline, candidate)]
        if difference not in allow and len({*sides[0], *sides[1]}) > 1:
            covered = list(_covered(baseline[0], candidate[0]).items())
            named = [f"{name} {old} against {new}" for name, (old, new) in covered if name.startswith(difference)]
            what = "; ".join(named[:MAX_NAMED_DIFFERENCES]) or f"{', '.join(sides[0])} against {', '.join(sides[1])}"
            raise NotComparable(f"A and B differ in {difference} ({what}); allow it to compare them", difference)


def _covered(one: CellResult, other: CellResult) -> dict[str, tuple[str, str]]:
    """What of the two configurations is not the same, by its name in the fingerprints."""
    sides = [flat("engine", cell.engine_covers) | flat("hardware", cell.hardware_covers) for cell in (one, other)]
    names = sorted({*sides[0], *sides[1]})
    found = {name: (sides[0].get(name, "absent"), sides[1].get(name, "absent")) for name in names}
    return {name: values for name, values in found.items() if values[0] != values[1]}


def _ids(cells: Sequence[CellResult]) -> str:
    return ", ".join(sorted({cell.spec.cell_id for cell in cells}))
