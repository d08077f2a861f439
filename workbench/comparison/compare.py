"""`workbench.compare(a, b)`: two sweeps, or two lists of benchmarks that took turns, metric by metric."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.benchmark.cell import as_cell
from workbench.benchmark.result import BenchResult
from workbench.comparison.cells import Difference, NotComparable, RunComparison, compare_cells
from workbench.sweeps.cells import CellResult
from workbench.sweeps.finished import Sweep
from workbench.sweeps.kept_results import find_cells
from workbench.wiring import layout

if TYPE_CHECKING:
    import pandas as pd

Measured = Sweep | BenchResult | CellResult | str


@dataclass(frozen=True, slots=True, repr=False)
class Compared:
    """B against A; `result` holds all of it."""

    result: RunComparison

    def frame(self) -> pd.DataFrame:
        """A row a metric (and cell): A, B, ratio B / A with its interval, and the verdict or why there is none."""
        import pandas as pd

        return pd.DataFrame(self._rows(), columns=["cell", "metric", "pairs", "A", "B", "ratio", "low", "high", "B is"])

    def _rows(self) -> list[tuple[Any, ...]]:
        rows: list[tuple[Any, ...]] = []
        for outcome in self.result.outcomes:
            cell = outcome.cell_id or "all"
            for one in outcome.compared:
                figures = (one.baseline, one.candidate, one.ratio, one.low, one.high)
                rows.append((cell, one.metric, one.num_pairs, *figures, str(one)))
            for name, refusal in outcome.refused.items():
                rows.append((cell, name, outcome.num_pairs, None, None, None, None, None, f"no verdict: {refusal}"))
        return rows

    def __repr__(self) -> str:
        lines = []
        for _, metric, num_pairs, _, _, ratio, low, high, says in self._rows():
            interval = "" if ratio is None else f" B / A = {ratio:.4f} ({low:.4f} – {high:.4f}),"
            lines.append(f"{metric}:{interval} {num_pairs} pairs, {says}")
        return "\n".join([*lines, *self.result.notes])

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(repr(self))}</pre>"


def compare(
    a: Measured | Sequence[Measured],
    b: Measured | Sequence[Measured],
    *,
    metrics: Sequence[str] | None = None,
    allow: Collection[str] = (),
    by_cell: bool = False,
) -> Compared:
    """Is B better than A?

    Args:
        a: the baseline: a sweep, a cell, a result of `bench`, a list of them, or a name as `workbench compare` takes.
        b: what is set against it.
        metrics: instead of throughput and the medians of TTFT and TPOT.
        allow: differences to accept: `hardware`, `engine`, `model`, `separate`.
        by_cell: a verdict for each cell of a sweep, not one for all.

    Raises:
        NotComparable: nothing in common, another load or workload, or a difference that is not allowed.
        ResultNotFound, ResultsBroken: a name leads nowhere.
        ValueError: a metric of which nobody knows whether more is better; no such difference.
    """
    sides = [list(side) if isinstance(side, list | tuple) else [side] for side in (a, b)]
    asked = {(one.load, one.workload) for side in sides for one in side if isinstance(one, BenchResult)}
    if len(asked) > 1:
        loads = "; ".join(f"{load} {workload}" for load, workload in sorted(asked))
        raise NotComparable(f"A and B were not asked for the same: {loads}")
    cells = [[cell for one in side for cell in _cells(one)] for side in sides]
    allowed = [Difference(name) for name in allow]
    return Compared(compare_cells(*cells, metrics=metrics, allow=allowed, by_cell=by_cell))


def _cells(measured: Any) -> Sequence[CellResult]:
    if isinstance(measured, CellResult):
        return [measured]
    if isinstance(measured, BenchResult):
        return [as_cell(measured)]
    if isinstance(measured, str):
        from workbench.connection import connected

        connection = connected()
        return find_cells(measured, layout(connection.config).results_dir)
    return list(measured.result.cells)
