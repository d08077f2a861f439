"""Cost rows as people read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

COLUMNS: tuple[tuple[str, str, int | None, float], ...] = (
    ("model", "model", None, 1),
    ("through", "target", None, 1),
    ("hardware", "hardware_class", None, 1),
    ("in", "num_prompt_tokens", 0, 1),
    ("out", "num_output_tokens", 0, 1),
    ("streams", "concurrency", 0, 1),
    ("tokens/s/GPU", "output_tokens_per_s_per_gpu", 1, 1),
    ("TTFT p50 ms", "ttft_p50_s", 0, 1000),
    ("TTFT p99 ms", "ttft_p99_s", 0, 1000),
    ("$/M in", "usd_per_million_input_tokens", 3, 1),
    ("$/M out", "usd_per_million_output_tokens", 3, 1),
    ("provenance", "provenance", None, 1),
    ("age h", "age_s", 1, 1 / 3600),
    ("state", "state", None, 1),
)
"""Title, key of the row, digits (None: text), factor."""


P99_MIN_REQUESTS = 368
"""Below this the sample has no 95 % interval for a p99 (stats.min_sample): the figure is the largest seen."""
WEAK_NOTE = f"* the largest seen: a P99 needs {P99_MIN_REQUESTS} requests"


def cost_figures(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]], tuple[int, ...]]:
    """Column titles, cells, and which columns are figures; columns that no row has are left out."""
    shown = [column for column in COLUMNS if any(column[1] in row for row in rows)]
    cells = [[_cell(row, key, digits, factor) for _, key, digits, factor in shown] for row in rows]
    right = tuple(index for index, column in enumerate(shown) if column[2] is not None)
    return [title for title, *_ in shown], cells, right


def _cell(row: Mapping[str, Any], key: str, digits: int | None, factor: float) -> str:
    value = row.get(key)
    if value is None:
        return "–"
    is_weak = "p99" in key and (row.get("num_requests") or 0) < P99_MIN_REQUESTS
    text = str(value) if digits is None else f"{value * factor:.{digits}f}"
    return f"{text}*" if is_weak else text
