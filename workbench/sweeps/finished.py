"""A finished sweep as a notebook looks at it: frames of cells and prices, and what they say in words."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter

import pandas as pd

from serving.core.state import Task
from workbench.config import HardwareClass, Slo
from workbench.costs.table import CostTable, MeasuredCell, build
from workbench.loadgen.records import RequestRecord, read_parquet
from workbench.sweeps.cells import CellResult
from workbench.sweeps.frames import LOAD_KINDS, cells_frame
from workbench.sweeps.run import SweepResult

OVERVIEW_COLUMNS = (
    "kind", "num_prompt_tokens", "num_output_tokens", "concurrency", "num_requests", "output_tokens_per_s_per_gpu",
    "prompt_tokens_per_s_per_gpu", "ttft_s/p50", "ttft_s/p99", "tpot_s/p50", "tpot_s/p99", "slo_good_frac", "invalid",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Sweep:
    """What `workbench.sweep()` returns.

    Attributes:
        result: cells with their fingerprints, where they lie on disk, and their runs in MLflow.
        slo: of the hardware class that was measured.
        hardware: hardware classes by name, for prices.
    """

    result: SweepResult
    slo: Slo
    hardware: Mapping[str, HardwareClass]

    @property
    def run_id(self) -> str | None:
        """The sweep's run in MLflow; None while MLflow has nothing of it."""
        return self.result.run_id

    @property
    def cells(self) -> pd.DataFrame:
        """A row a cell; columns as `workbench.sweeps.frames.cells_frame` says."""
        return cells_frame(self.result.cells)

    def overview(self) -> pd.DataFrame:
        """The cells by their main figures; columns that no cell has are left out."""
        cells = self.cells
        return cells[[name for name in OVERVIEW_COLUMNS if name in cells.columns]].dropna(axis="columns", how="all")

    def cost_table(self) -> pd.DataFrame:
        """What this sweep alone says of cost, in the cost table's columns. Routing reads the published table.

        Raises:
            ValueError: no cell gives a price; the message says why, cell by cell.
        """
        return self._priced().to_frame()

    def records(self) -> dict[str, list[RequestRecord]]:
        """The requests of each cell under load that counts, by the cell's name; from disk."""
        cells = [c for c in self.result.cells if c.spec.kind in LOAD_KINDS and c.invalid is None and c.records_file]
        return {c.spec.cell_id: read_parquet(self.result.folder / str(c.records_file)) for c in cells}

    def conclusion(self) -> str:
        """The answer in words: the most tokens a second, what the SLO allows, what it costs, what does not count."""
        lines = [f"{self._name()}:", *self._speed(), *self._cost()]
        for cell in self.result.cells:
            if cell.invalid is not None:
                lines.append(f"- {cell.spec.cell_id} does not count: {cell.invalid}")
        if self.result.mlflow_error is not None:
            lines.append(f"- {self.result.num_pending} cells are not in MLflow yet: {self.result.mlflow_error}")
        return "\n".join(lines)

    def __repr__(self) -> str:
        done = sum(cell.invalid is None for cell in self.result.cells)
        where = f"MLflow run {self.run_id}" if self.run_id else f"not in MLflow ({self.result.mlflow_error})"
        return (
            f"<sweep of {self._name()}: {done} of {len(self.result.cells)} cells count; {where}; {self.result.folder}>"
        )

    def _name(self) -> str:
        if not self.result.cells:
            return "nothing measured"
        cell = self.result.cells[0]
        return f"{cell.model}@{cell.version} on {cell.num_units} x {cell.hardware_class}"

    def _priced(self) -> CostTable:
        run_ids = self.result.run_ids
        table = build([MeasuredCell(c, run_ids.get(c.measurement_id)) for c in self.result.cells], self.hardware)
        if not table.rows:
            reasons = "; ".join(f"{cell.cell_id}: {cell.reason}" for cell in table.skipped)
            raise ValueError(f"no cell gives a price: {reasons or 'nothing was measured'}")
        return table

    def _speed(self) -> list[str]:
        loaded = [c for c in self.result.cells if c.spec.kind in LOAD_KINDS and c.invalid is None and _rate(c)]
        if not loaded:
            return ["- no cell under load counts, so there is no answer"]
        best = max(loaded, key=_rate)
        lines = [f"- the most it gave: {_at(best)}"]
        good = [c for c in loaded if c.metrics.get("slo_good_frac", 0.0) >= self.slo.served_within_frac]
        within = f"within the SLO ({self._slo_text()})"
        lines.append(
            f"- the most {within}: {_at(max(good, key=_rate))}" if good else f"- {within}: at no load measured"
        )
        return lines

    def _slo_text(self) -> str:
        return (
            f"TTFT at most {self.slo.ttft_p99_s:g} s and TPOT at most {self.slo.tpot_p99_s:g} s "
            f"for {self.slo.served_within_frac:.1%} of requests"
        )

    def _cost(self) -> list[str]:
        try:
            rows = self._priced().rows
        except ValueError as error:
            return [f"- {error}"]
        kind = "input" if rows[0].task == Task.EMBED else "output"
        price = attrgetter(f"usd_per_million_{kind}_tokens")
        row = min(rows, key=price)
        also = "" if kind == "input" else f", a million input tokens ${row.usd_per_million_input_tokens:.3g}"
        return [
            f"- a million {kind} tokens costs ${price(row):.3g}{also} at {row.concurrency} in flight, the least seen",
            f"- at ${row.usd_per_gpu_hour:g} an hour of {row.hardware_class} "
            f"({row.usd_per_gpu_hour_source}, {row.usd_per_gpu_hour_date})",
        ]


def _rate_metric(cell: CellResult) -> str:
    return "prompt_tokens_per_s_per_gpu" if cell.task is Task.EMBED else "output_tokens_per_s_per_gpu"


def _rate(cell: CellResult) -> float:
    return cell.metrics.get(_rate_metric(cell), 0.0)


def _at(cell: CellResult) -> str:
    kind = "input" if cell.task is Task.EMBED else "output"
    low, high = cell.intervals.get(_rate_metric(cell), (None, None))
    interval = "" if low is None or high is None else f" (95 % interval {low:.3g} to {high:.3g})"
    return f"{_rate(cell):.3g} {kind} tokens/s a unit{interval} at {cell.spec.concurrency} in flight"
