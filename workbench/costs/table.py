"""The cost table: what a token costs per model, hardware class, shape and concurrency, as measured.

    cells (measured) + $/h of hardware classes  ->  rows  ->  data frame, parquet, JSON  ->  router

A mixed cell becomes a row once a prefill-only cell of the same replica and prompt length stands beside it
(`workbench/costs/pricing.py` splits the price). A cell that is invalid, warm or not yet in MLflow never becomes
a row; what was left out is returned with the reason. Columns and files: `workbench/costs/schema.py`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, date, datetime
from typing import Protocol

import pandas as pd

from serving.core.policies.cost import RowState
from serving.core.state import Task
from serving.store.cost_table import PublishedCostTable
from workbench.costs.pricing import MixedWindow, PricingError, TokenPrices, embed_price, split_price
from workbench.costs.schema import COST_TABLE_SCHEMA, CostTableRow, Provenance, to_cost_rows, to_frame
from workbench.sweeps.cells import MEASURED, CellKind, CellResult

DEFAULT_EXPIRES_IN_S = 30 * 86400.0


class PricedHardware(Protocol):
    """What the table needs of a hardware class of `workbench.yaml`."""

    @property
    def usd_per_hour(self) -> float:
        """Price of one unit (one GPU; one core of class `cpu`)."""
        ...

    @property
    def source(self) -> str:
        """Who says so."""
        ...

    @property
    def date(self) -> date | str:
        """When they said so."""
        ...


@dataclass(frozen=True, slots=True)
class MeasuredCell:
    """A cell and the MLflow run that holds it; None while it waits on disk for MLflow."""

    result: CellResult
    mlflow_run_id: str | None


@dataclass(frozen=True, slots=True)
class SkippedCell:
    """A cell that gave no row, and why."""

    cell_id: str
    model: str
    reason: str


@dataclass(frozen=True, slots=True)
class CostTable:
    """Rows, and the cells that gave none."""

    rows: tuple[CostTableRow, ...]
    skipped: tuple[SkippedCell, ...] = ()

    def to_frame(self) -> pd.DataFrame:
        """One line a row, columns in the order of the contract."""
        return to_frame(self.rows)


def build(
    cells: Iterable[MeasuredCell],
    hardware: Mapping[str, PricedHardware],
    *,
    expires_in_s: float = DEFAULT_EXPIRES_IN_S,
) -> CostTable:
    """Rows from measured cells: the newest measurement of each cell counts.

    Args:
        cells: of any number of sweeps, models and replicas.
        hardware: hardware classes by name, for their price.
        expires_in_s: how long a measurement counts.
    """
    rows: list[CostTableRow] = []
    skipped: list[SkippedCell] = []
    usable: list[MeasuredCell] = []
    for cell in cells:
        reason = _unusable(cell, hardware)
        if reason is None:
            usable.append(cell)
        else:
            skipped.append(SkippedCell(cell.result.spec.cell_id, cell.result.model, reason))
    newest = _newest(usable)
    for cell in newest:
        if cell.result.spec.kind in (CellKind.PREFILL, CellKind.CACHED):
            continue
        try:
            rows.append(_row(cell, newest, hardware[cell.result.hardware_class], expires_in_s))
        except PricingError as error:
            skipped.append(SkippedCell(cell.result.spec.cell_id, cell.result.model, str(error)))
    rows.sort(key=_row_order)
    return CostTable(tuple(rows), tuple(skipped))


def _unusable(cell: MeasuredCell, hardware: Mapping[str, PricedHardware]) -> str | None:
    result = cell.result
    if result.invalid is not None:
        return f"invalid: {result.invalid}"
    if result.provenance != MEASURED:
        return f"imported from {result.provenance}: on which engine and hardware is not known"
    if cell.mlflow_run_id is None:
        return "not in MLflow yet: log pending results first"
    if result.hardware_class not in hardware:
        return f"no price: hardware class {result.hardware_class!r} is not in workbench.yaml ({', '.join(hardware)})"
    return None


def _replica_key(result: CellResult) -> tuple[str, ...]:
    return (
        result.task,
        result.model,
        result.version,
        result.hardware_class,
        result.engine_fingerprint,
        result.hardware_fingerprint,
    )


def _newest(cells: Sequence[MeasuredCell]) -> list[MeasuredCell]:
    by_key: dict[tuple[object, ...], MeasuredCell] = {}
    for cell in cells:
        spec = cell.result.spec
        key = (*_replica_key(cell.result), spec.kind, spec.shape, spec.concurrency)
        if key not in by_key or by_key[key].result.ended_at_s < cell.result.ended_at_s:
            by_key[key] = cell
    return list(by_key.values())


def _row(
    cell: MeasuredCell, all_cells: Sequence[MeasuredCell], hardware: PricedHardware, expires_in_s: float
) -> CostTableRow:
    result = cell.result
    usd_per_s = hardware.usd_per_hour * result.num_units / 3600.0
    prefill = _sibling(result, all_cells, CellKind.PREFILL)
    prices = _prices(result, usd_per_s, prefill, _sibling(result, all_cells, CellKind.CACHED))
    is_embed = result.task is Task.EMBED
    prefill_rate = result.prompt_tokens_per_s if is_embed or prefill is None else prefill.prompt_tokens_per_s
    interval_of = "prompt_tokens_per_s_per_gpu" if is_embed else "output_tokens_per_s_per_gpu"
    ci_low, ci_high = result.intervals.get(interval_of, (None, None))
    metrics = result.metrics
    return CostTableRow(
        schema_version=COST_TABLE_SCHEMA,
        task=result.task.value,
        model=result.model,
        version=result.version,
        hardware_class=result.hardware_class,
        engine_fingerprint=result.engine_fingerprint,
        hardware_fingerprint=result.hardware_fingerprint,
        num_prompt_tokens=result.spec.shape.num_prompt_tokens,
        num_output_tokens=result.spec.shape.num_output_tokens,
        concurrency=result.spec.concurrency,
        num_requests=result.num_requests,
        output_tokens_per_s_per_gpu=None if is_embed else result.output_tokens_per_s / result.num_units,
        prefill_tokens_per_s_per_gpu=prefill_rate / result.num_units,
        ttft_p50_s=metrics.get("ttft_s/p50"),
        ttft_p99_s=metrics.get("ttft_s/p99"),
        tpot_p50_s=metrics.get("tpot_s/p50"),
        tpot_p99_s=metrics.get("tpot_s/p99"),
        e2e_p99_s=metrics.get("e2e_s/p99"),
        slo_good_frac=metrics.get("slo_good_frac"),
        usd_per_gpu_hour=hardware.usd_per_hour,
        usd_per_gpu_hour_source=hardware.source,
        usd_per_gpu_hour_date=str(hardware.date),
        usd_per_million_input_tokens=prices.input,
        usd_per_million_cached_input_tokens=prices.cached_input,
        usd_per_million_output_tokens=prices.output,
        ci_low=ci_low,
        ci_high=ci_high,
        provenance=Provenance.MEASURED.value,
        target=result.spec.target.value,
        measured_at=datetime.fromtimestamp(result.ended_at_s, UTC),
        expires_at=datetime.fromtimestamp(result.ended_at_s + expires_in_s, UTC),
        client_error_frac=result.client_error_frac,
        mlflow_run_id=cell.mlflow_run_id or "",
        engine_covers=json.dumps(dict(result.engine_covers), sort_keys=True),
        hardware_covers=json.dumps(dict(result.hardware_covers), sort_keys=True),
    )


def _sibling(result: CellResult, cells: Sequence[MeasuredCell], kind: CellKind) -> CellResult | None:
    """The cell of `kind` on the same replica whose prompts fit: equal length, or nearest above for `CACHED`."""
    own = [cell.result for cell in cells if _replica_key(cell.result) == _replica_key(result)]
    length = result.spec.shape.num_prompt_tokens
    fitting = [
        other
        for other in own
        if other.spec.kind is kind
        and (
            other.spec.shape.num_prompt_tokens == length
            or (kind is CellKind.CACHED and other.spec.shape.num_prompt_tokens > length)
        )
    ]
    return min(fitting, key=lambda other: (other.spec.shape.num_prompt_tokens, -other.spec.concurrency), default=None)


def _prices(result: CellResult, usd_per_s: float, prefill: CellResult | None, cached: CellResult | None) -> TokenPrices:
    if result.task is Task.EMBED:
        return embed_price(usd_per_s, result.prompt_tokens_per_s)
    if prefill is None:
        length = result.spec.shape.num_prompt_tokens
        raise PricingError(f"no prefill cell of {length} prompt tokens on the same replica: input has no price")
    return split_price(
        usd_per_s,
        MixedWindow(result.num_prompt_tokens, result.num_output_tokens, result.window_s),
        prefill_tokens_per_s=prefill.prompt_tokens_per_s,
        decode_tokens_per_s=result.decode_tokens_per_s,
        cached_tokens_per_s=cached.num_cached_tokens / cached.window_s if cached is not None else None,
    )


def _row_order(row: CostTableRow) -> tuple[object, ...]:
    return (row.model, row.version, row.hardware_class, row.target, row.num_prompt_tokens, row.num_output_tokens,
            row.concurrency, row.engine_fingerprint)  # fmt: skip


@dataclass(frozen=True, slots=True)
class RowAge:
    """A row as it stands at a moment: how old, how long it still counts, and whether it does."""

    row: CostTableRow
    age_s: float
    expires_in_s: float
    state: RowState


def ages(rows: Sequence[CostTableRow], now_s: float) -> tuple[RowAge, ...]:
    """Age and state of each row, `FRESH` or `EXPIRED`; whether it fits a running pool is the router's to say."""
    found = []
    for row in rows:
        left_s = row.expires_at.timestamp() - now_s
        state = RowState.FRESH if left_s > 0 else RowState.EXPIRED
        found.append(RowAge(row, now_s - row.measured_at.timestamp(), left_s, state))
    return tuple(found)


class CostTableSink(Protocol):
    """Where a table is published: the store, and a file for when the store is down."""

    async def publish(self, table: PublishedCostTable) -> None:
        """Makes `table` the published one."""
        ...


async def publish(
    rows: Sequence[CostTableRow], run_id: str, sinks: Sequence[CostTableSink], *, now_s: float
) -> PublishedCostTable:
    """Publishes the router's part of the table to every sink; the control plane takes it up from there."""
    table = PublishedCostTable(run_id=run_id, rows=to_cost_rows(rows), published_at_s=now_s)
    for sink in sinks:
        await sink.publish(table)
    return table
