"""Is tonight worse than the accepted run? A plain rule by cell, behind a protocol that a better one can take up.

The rule is crude: one figure a cell, whose interval is of that run alone. So a cell is worse only when its figure is
worse by more than the tolerance and the two intervals do not touch; what a sample is too small to carry is not judged.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Protocol

from workbench.comparison.cells import is_higher_better
from workbench.run_fields import cell_key
from workbench.schedule.book import CompareRule
from workbench.schedule.history import Outcome
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import folders


@dataclass(frozen=True, slots=True)
class Judged:
    """The verdict (ok, regression or inconclusive), a line a cell, and how much worse the worst cell is."""

    outcome: Outcome
    lines: tuple[str, ...] = ()
    worst_loss_frac: float | None = None


class Judge(Protocol):
    """Sets a run's cells against those of the accepted run."""

    def __call__(self, accepted: Sequence[CellResult], newest: Sequence[CellResult], rule: CompareRule) -> Judged:
        """The verdict. Cells of both sides may be invalid, and may be measured more than once."""
        ...


@dataclass(frozen=True, slots=True)
class _Figure:
    value: float
    low: float | None
    high: float | None


def measured_since(results_dir: Path, since_s: float, mlflow_run_id: str | None) -> list[CellResult]:
    """Cells whose measurement began since then, of the sweep that the notebook recorded, else of any.

    Raises:
        ResultsBroken: a file cannot be read.
    """
    found, of_the_run = [], []
    for folder in folders(results_dir):
        cells = [cell for cell in folder.cells() if cell.started_at_s >= since_s]
        logged = folder.logged()
        if mlflow_run_id is not None and logged is not None and logged.parent_run_id == mlflow_run_id:
            of_the_run += cells
        found += cells
    return of_the_run or found


def judge_by_ratio(accepted: Sequence[CellResult], newest: Sequence[CellResult], rule: CompareRule) -> Judged:
    """The plain rule."""
    before, now = _by_key(accepted), _by_key(newest)
    both = [key for key in before if key in now]
    if not both:
        return Judged(Outcome.INCONCLUSIVE, (_nothing_in_common(before, now),))
    is_higher = is_higher_better(rule.metric)
    lines, losses, num_open, is_worse = [], [], len(before) - len(both), False
    for key in both:
        cell_id = now[key][0].spec.cell_id
        old, new = _figure(before[key], rule.metric), _figure(now[key], rule.metric)
        if isinstance(old, str) or isinstance(new, str):
            lines.append(f"{cell_id}: not judged, {new if isinstance(new, str) else old}")
            num_open += 1
            continue
        loss = 1 - new.value / old.value if is_higher else new.value / old.value - 1
        says, worse = _says(old, new, loss, rule, is_higher)
        is_worse |= worse
        losses.append(loss)
        lines.append(f"{cell_id}: {rule.metric} {old.value:.4g} -> {new.value:.4g}, {says}")
    missing = [key for key in before if key not in now]
    lines += [f"{before[key][0].spec.cell_id}: not measured validly this time" for key in missing]
    verdict = Outcome.REGRESSION if is_worse else Outcome.INCONCLUSIVE if num_open else Outcome.OK
    return Judged(verdict, tuple(lines), max(losses, default=None))


def _says(old: _Figure, new: _Figure, loss: float, rule: CompareRule, is_higher: bool) -> tuple[str, bool]:
    """What a cell's line says, and whether the cell is worse."""
    change = f"{abs(loss):.1%} {'worse' if loss > 0 else 'better'}"
    if loss <= rule.tolerance_frac:
        return f"{change}: within {rule.tolerance_frac:.1%}" if loss > 0 else change, False
    if old.low is None or old.high is None or new.low is None or new.high is None:
        return f"{change} (no interval)", True
    apart = new.high < old.low if is_higher else new.low > old.high
    return (change, True) if apart else (f"{change}, but the intervals touch: no difference shown", False)


def _by_key(cells: Sequence[CellResult]) -> dict[str, list[CellResult]]:
    """Valid measurements by what was measured."""
    found: dict[str, list[CellResult]] = {}
    for cell in cells:
        if cell.invalid is None:
            found.setdefault(cell_key(cell), []).append(cell)
    return found


def _figure(cells: Sequence[CellResult], metric: str) -> _Figure | str:
    """The metric of one cell, or why there is none. Of several measurements the median and their range."""
    values = [
        cell.decode_tokens_per_s if metric == "decode_tokens_per_s" else cell.metrics.get(metric) for cell in cells
    ]
    known = [value for value in values if value is not None and value > 0]
    if len(known) < len(values):
        return f"{metric} is not there or not above 0"
    if any(metric in cell.weak for cell in cells):
        return f"the sample is too small to carry {metric}"
    if len(known) > 1:
        return _Figure(median(known), min(known), max(known))
    low, high = cells[0].intervals.get(metric, (None, None))
    return _Figure(known[0], low, high)


def _nothing_in_common(before: dict[str, list[CellResult]], now: dict[str, list[CellResult]]) -> str:
    if not now:
        return (
            "no valid cell was measured since the run began: a notebook that takes `max_age_s` measures anew each time"
        )
    old, new = next(iter(before.values()), [None])[0], next(iter(now.values()))[0]
    if old is None:
        return "the accepted run has no valid cell"
    names = ("model", "version", "hardware_class", "engine_fingerprint", "hardware_fingerprint")
    changed = [name for name in names if getattr(old, name) != getattr(new, name)]
    return f"no cell in common with the accepted run ({', '.join(changed) or 'another plan'} changed)"
