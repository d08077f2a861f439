"""The published form of the cost table: its columns, and its way to a frame, to files and to the router.

The schema is versioned; a reader refuses another version rather than guess at a column.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime
from enum import StrEnum
from pathlib import Path
from typing import Any

import pandas as pd

from serving.core.state import CostRow, Task
from workbench.sweeps.cells import TargetKind

COST_TABLE_SCHEMA = 1
TIME_COLUMNS = ("measured_at", "expires_at")
PARQUET_NAME = "cost_table.parquet"
JSON_NAME = "cost_table.json"


class Provenance(StrEnum):
    """Where a row's figures come from; the three never mix in one row."""

    MEASURED = "measured"
    PREDICTED = "predicted"
    PUBLISHED = "published"


@dataclass(frozen=True, slots=True)
class CostTableRow:
    """One row of the published table; the field names are its columns.

    Rates are a unit (GPU or core). `ci_low` and `ci_high` bound `output_tokens_per_s_per_gpu` (for task
    `embed`: `prefill_tokens_per_s_per_gpu`). Times are UTC. The two `_covers` columns hold as JSON what the
    fingerprints are digests of.
    """

    schema_version: int
    task: str
    model: str
    version: str
    hardware_class: str
    engine_fingerprint: str
    hardware_fingerprint: str
    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    num_requests: int
    output_tokens_per_s_per_gpu: float | None
    prefill_tokens_per_s_per_gpu: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    e2e_p99_s: float | None
    slo_good_frac: float | None
    usd_per_gpu_hour: float
    usd_per_gpu_hour_source: str
    usd_per_gpu_hour_date: str
    usd_per_million_input_tokens: float
    usd_per_million_cached_input_tokens: float | None
    usd_per_million_output_tokens: float
    ci_low: float | None
    ci_high: float | None
    provenance: str
    target: str
    measured_at: datetime
    expires_at: datetime
    client_error_frac: float
    mlflow_run_id: str
    engine_covers: str
    hardware_covers: str


COLUMNS = tuple(field.name for field in fields(CostTableRow))


def to_frame(rows: Sequence[CostTableRow]) -> pd.DataFrame:
    """One line a row; missing figures are NaN, times are UTC timestamps."""
    frame = pd.DataFrame([asdict(row) for row in rows], columns=list(COLUMNS))
    for name in TIME_COLUMNS:
        frame[name] = pd.to_datetime(frame[name], utc=True)
    return frame


def from_frame(frame: pd.DataFrame) -> tuple[CostTableRow, ...]:
    """The rows of a frame in this schema.

    Raises:
        ValueError: another schema version, or a column is missing or unknown.
    """
    if set(frame.columns) != set(COLUMNS):
        odd = sorted(set(frame.columns) ^ set(COLUMNS))
        raise ValueError(f"not a cost table of schema {COST_TABLE_SCHEMA}: columns missing or unknown: {odd}")
    rows = []
    for record in frame.to_dict(orient="records"):
        values: dict[str, Any] = {str(name): None if pd.isna(value) else value for name, value in record.items()}
        if values["schema_version"] != COST_TABLE_SCHEMA:
            raise ValueError(f"cost table schema {values['schema_version']} is not {COST_TABLE_SCHEMA}: build it again")
        for name in TIME_COLUMNS:
            values[name] = pd.Timestamp(values[name]).to_pydatetime()
        rows.append(CostTableRow(**values))
    return tuple(rows)


def to_cost_rows(rows: Sequence[CostTableRow]) -> tuple[CostRow, ...]:
    """What the router needs of the table: rows measured in front of the engine (the gateway's state its overhead)."""
    return tuple(
        CostRow(
            model=row.model,
            version=row.version,
            task=Task(row.task),
            hardware_class=row.hardware_class,
            engine_fingerprint=row.engine_fingerprint,
            hardware_fingerprint=row.hardware_fingerprint,
            num_prompt_tokens=row.num_prompt_tokens,
            num_output_tokens=row.num_output_tokens,
            concurrency=row.concurrency,
            output_tokens_per_s_per_gpu=row.output_tokens_per_s_per_gpu,
            prefill_tokens_per_s_per_gpu=row.prefill_tokens_per_s_per_gpu,
            ttft_p50_s=row.ttft_p50_s,
            ttft_p99_s=row.ttft_p99_s,
            tpot_p50_s=row.tpot_p50_s,
            tpot_p99_s=row.tpot_p99_s,
            usd_per_million_input_tokens=row.usd_per_million_input_tokens,
            usd_per_million_cached_input_tokens=row.usd_per_million_cached_input_tokens,
            usd_per_million_output_tokens=row.usd_per_million_output_tokens,
            provenance=row.provenance,
            measured_at_s=row.measured_at.timestamp(),
            expires_at_s=row.expires_at.timestamp(),
            mlflow_run_id=row.mlflow_run_id,
            num_requests=row.num_requests,
        )
        for row in rows
        if row.target == TargetKind.ENGINE
    )


def write(rows: Sequence[CostTableRow], folder: Path) -> tuple[Path, Path]:
    """Writes the table as parquet and as JSON (`schema_version` and `rows`, times in ISO 8601)."""
    parquet, as_json = folder / PARQUET_NAME, folder / JSON_NAME
    to_frame(rows).to_parquet(parquet, index=False)
    as_json.write_text(json.dumps(to_json(rows), indent=1), encoding="utf-8")
    return parquet, as_json


def to_json(rows: Sequence[CostTableRow]) -> dict[str, Any]:
    """Plain JSON types; a missing figure is null."""
    records = []
    for row in rows:
        record = asdict(row)
        for name in TIME_COLUMNS:
            record[name] = record[name].isoformat()
        records.append(record)
    return {"schema_version": COST_TABLE_SCHEMA, "rows": records}


def from_json(data: dict[str, Any]) -> tuple[CostTableRow, ...]:
    """The rows that `to_json` wrote.

    Raises:
        ValueError: another schema version, or a column is missing or unknown.
    """
    if data.get("schema_version") != COST_TABLE_SCHEMA:
        raise ValueError(f"cost table schema {data.get('schema_version')!r} is not {COST_TABLE_SCHEMA}: build it again")
    rows = []
    for record in data["rows"]:
        values = dict(record)
        if set(values) != set(COLUMNS):
            raise ValueError(f"columns missing or unknown: {sorted(set(values) ^ set(COLUMNS))}")
        for name in TIME_COLUMNS:
            values[name] = datetime.fromisoformat(values[name])
        rows.append(CostTableRow(**values))
    return tuple(rows)
