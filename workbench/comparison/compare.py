"""`workbench.compare(a, b)`: two sweeps, or two lists of benchmarks that took turns, metric by metric."""

from __future__ import annotations

import html
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from workbench.benchmark.result import BenchResult
from workbench.comparison.cells import Difference, NotComparable, RunComparison, compare_cells
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape
from workbench.sweeps.finished import Sweep
from workbench.sweeps.kept_results import find_cells
from workbench.wiring import layout

if TYPE_CHECKING:
    import pandas as pd

Measured = Sweep | BenchResult | CellResult | str
ONE_SPEC = CellSpec(CellKind.MIXED, Shape(1, 1), 1, 1)
"""Benchmarks have a load and a workload instead of a cell's shape: those are held equal before."""


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
        return [_as_cell(measured)]
    if isinstance(measured, str):
        from workbench.connection import connected

        connection = connected()
        return find_cells(measured, layout(connection.config).results_dir)
    return list(measured.result.cells)


def _as_cell(result: BenchResult) -> CellResult:
    """The benchmark as a cell, for the one comparison that there is."""
    facts = result.facts
    return CellResult(
        sweep_digest="bench",
        spec=ONE_SPEC,
        model=result.model,
        version=facts.get("version", ""),
        task=result.task,
        hardware_class=facts.get("hardware_class", ""),
        num_units=result.num_units,
        engine_fingerprint=facts.get("engine_fingerprint", result.url),
        hardware_fingerprint=facts.get("hardware_fingerprint", result.url),
        engine_covers={"url": result.url},
        hardware_covers={"url": result.url},
        replica_id=result.url,
        started_at_s=result.started_at_s,
        ended_at_s=result.ended_at_s,
        window_s=result.metrics.get("window_s", 0.0),
        num_requests=result.summary.num_requests,
        num_failed=result.summary.num_failed,
        failures={},
        num_prompt_tokens=0.0,
        num_cached_tokens=0.0,
        num_output_tokens=0.0,
        engine_num_prompt_tokens=0,
        engine_num_output_tokens=0,
        prefix_cache_hit_frac=0.0,
        decode_tokens_per_s=None,
        metrics=result.metrics,
        intervals=result.intervals,
        client_error_frac=result.metrics.get("client_error_frac", 0.0),
        prompt_seed=0,
        commit=facts.get("commit", ""),
        records_file=None,
        weak=tuple(sorted(result.summary.weak)),
        invalid=result.invalid,
        notes=result.notes,
    )
