"""Cells of a sweep as a pandas frame: what notebooks look at and plots draw."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any

import pandas as pd

from workbench.sweeps.cells import CellKind, CellResult

CELL_COLUMNS = (
    "kind", "model", "version", "task", "hardware_class", "num_prompt_tokens", "num_output_tokens", "concurrency",
    "target", "num_requests", "num_failed", "prefix_cache_hit_frac", "client_error_frac", "energy",
    "invalid", "measured_at",
)  # fmt: skip

# The cells that answer "how fast at which load"; the others exist to split the price.
LOAD_KINDS = (CellKind.MIXED.value, CellKind.GATEWAY.value, CellKind.EMBED.value)


def cells_frame(cells: Iterable[CellResult]) -> pd.DataFrame:
    """A row a cell: `CELL_COLUMNS`, then every metric under its MLflow name.

    A metric with a 95 % interval has `METRIC/ci_low` and `METRIC/ci_high` beside it. `METRIC/weak` is True
    where the sample is too small to carry the figure. `invalid` says why a cell does not count, else None.
    """
    rows = [_row(cell) for cell in cells]
    metrics = sorted({name for row in rows for name in row} - set(CELL_COLUMNS))
    return pd.DataFrame(rows, columns=[*CELL_COLUMNS, *metrics])


def _row(cell: CellResult) -> dict[str, Any]:
    row: dict[str, Any] = {
        "kind": cell.spec.kind.value,
        "model": cell.model,
        "version": cell.version,
        "task": cell.task.value,
        "hardware_class": cell.hardware_class,
        "num_prompt_tokens": cell.spec.shape.num_prompt_tokens,
        "num_output_tokens": cell.spec.shape.num_output_tokens,
        "concurrency": cell.spec.concurrency,
        "target": cell.spec.target.value,
        "num_requests": cell.num_requests,
        "num_failed": cell.num_failed,
        "prefix_cache_hit_frac": cell.prefix_cache_hit_frac,
        "client_error_frac": cell.client_error_frac,
        "energy": cell.energy,
        "invalid": cell.invalid,
        "measured_at": datetime.fromtimestamp(cell.ended_at_s, UTC),
    }
    row.update(cell.metrics)
    for name, (low, high) in cell.intervals.items():
        row[f"{name}/ci_low"], row[f"{name}/ci_high"] = low, high
    for name in cell.weak:
        row[f"{name}/weak"] = True
    return row
