from __future__ import annotations

import json
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.policies.cost import RowState
from serving.core.state import Task
from serving.store.cost_table import PublishedCostTable
from tests.cells import make_cell
from workbench.costs import schema
from workbench.costs.table import CostTable, MeasuredCell, ages, build, publish
from workbench.sweeps.cells import CellKind, CellResult


@dataclass(frozen=True)
class Hardware:
    usd_per_hour: float = 0.04
    source: str = "a list price"
    date: str = "2026-11-01"


HARDWARE = {"cpu": Hardware()}
USD_PER_S = 0.04 / 3600


def build_from(*cells: CellResult, **options: float) -> CostTable:
    return build(
        [MeasuredCell(cell, f"run-{number}") for number, cell in enumerate(cells)],
        HARDWARE,
        **options,  # type: ignore[arg-type]
    )


def whole_sweep() -> list[CellResult]:
    return [
        make_cell(concurrency=1, window_s=30.0),
        make_cell(concurrency=4),
        make_cell(concurrency=8, window_s=7.0),
        make_cell(CellKind.PREFILL, window_s=3.2),
        make_cell(CellKind.CACHED, prompt=65, window_s=1.0),
        make_cell(CellKind.GATEWAY, window_s=10.2),
    ]


def test_mixed_and_gateway_cells_become_rows_and_the_others_price_them() -> None:
    table = build_from(*whole_sweep())
    assert [(row.target, row.concurrency) for row in table.rows] == [
        ("engine", 1), ("engine", 4), ("engine", 8), ("gateway", 4)]  # fmt: skip
    assert table.skipped == ()
    row = table.rows[1]
    assert row.prefill_tokens_per_s_per_gpu == pytest.approx(64 * 30 / 3.2)
    assert row.output_tokens_per_s_per_gpu == pytest.approx(96.0)
    assert row.usd_per_million_cached_input_tokens == pytest.approx(USD_PER_S / (64 * 30 / 1.0) * 1e6)
    assert (row.ci_low, row.ci_high) == (pytest.approx(86.4), pytest.approx(105.6))
    assert (row.usd_per_gpu_hour, row.usd_per_gpu_hour_source, row.usd_per_gpu_hour_date) == (
        0.04, "a list price", "2026-11-01")  # fmt: skip
    assert row.provenance == "measured"
    assert row.mlflow_run_id == "run-1"
    assert json.loads(row.engine_covers)["version"] == "0.32.0"


@given(
    num_units=st.integers(min_value=1, max_value=8),
    window_s=st.floats(min_value=0.1, max_value=100),
    decode=st.floats(min_value=1, max_value=1e4),
    prefill_window_s=st.floats(min_value=0.1, max_value=100),
)
def test_prices_of_a_row_sum_to_the_cost_of_its_cell(
    num_units: int, window_s: float, decode: float, prefill_window_s: float
) -> None:
    mixed = make_cell(window_s=window_s, decode_tokens_per_s=decode, num_units=num_units)
    prefill = make_cell(CellKind.PREFILL, window_s=prefill_window_s, num_units=num_units)
    (row,) = build_from(mixed, prefill).rows
    usd = (
        mixed.num_prompt_tokens * row.usd_per_million_input_tokens
        + mixed.num_output_tokens * row.usd_per_million_output_tokens
    ) / 1e6
    assert usd == pytest.approx(USD_PER_S * num_units * window_s)


def test_an_invalid_cell_never_becomes_a_row() -> None:
    warm = replace(make_cell(), invalid="warm: 40 % of the prompt tokens came from the prefix cache")
    table = build_from(warm, make_cell(CellKind.PREFILL))
    assert table.rows == ()
    assert "warm" in table.skipped[0].reason


def test_an_invalid_prefill_cell_prices_nothing() -> None:
    table = build_from(make_cell(), replace(make_cell(CellKind.PREFILL), invalid="somebody else used the replica"))
    assert table.rows == ()
    assert {skipped.cell_id for skipped in table.skipped} == {"mixed-64x32-c4", "prefill-64x1-c4"}


def test_a_cell_that_waits_for_mlflow_is_left_out_and_says_so() -> None:
    table = build([MeasuredCell(make_cell(), None), MeasuredCell(make_cell(CellKind.PREFILL), "run")], HARDWARE)
    assert table.rows == ()
    assert "MLflow" in table.skipped[0].reason


def test_without_a_price_for_the_hardware_there_is_no_row() -> None:
    table = build_from(make_cell(hardware_class="l4-24g"), make_cell(CellKind.PREFILL, hardware_class="l4-24g"))
    assert table.rows == ()
    assert "l4-24g" in table.skipped[0].reason


@pytest.mark.parametrize(
    "change",
    [
        {"prompt": 128},
        {"model": "gemma3-270m"},
        {"version": "2"},
        {"engine_fingerprint": "other"},
        {"hardware_fingerprint": "other"},
    ],
)
def test_a_prefill_cell_of_another_replica_or_length_prices_nothing(change: dict[str, object]) -> None:
    table = build_from(make_cell(), make_cell(CellKind.PREFILL, **change))  # type: ignore[arg-type]
    assert table.rows == ()
    assert "no prefill cell of 64 prompt tokens" in table.skipped[0].reason


def test_the_newest_measurement_of_a_cell_counts() -> None:
    old, new = make_cell(), make_cell(window_s=20.0, started_at_s=1.8e9, ended_at_s=1.8e9 + 20)
    (row,) = build_from(new, old, make_cell(CellKind.PREFILL)).rows
    assert row.mlflow_run_id == "run-0"
    assert row.output_tokens_per_s_per_gpu == pytest.approx(48.0)


def test_an_embedding_row_prices_input_alone() -> None:
    (row,) = build_from(make_cell(CellKind.EMBED, output=0)).rows
    assert row.task == "embed"
    assert row.usd_per_million_output_tokens == 0.0
    assert row.usd_per_million_input_tokens == pytest.approx(USD_PER_S / 192 * 1e6)
    assert row.output_tokens_per_s_per_gpu is None
    assert (row.ci_low, row.ci_high) == (pytest.approx(172.8), pytest.approx(211.2))


def test_rows_expire_when_told() -> None:
    table = build_from(*whole_sweep(), expires_in_s=3600.0)
    row = table.rows[0]
    measured_at_s = row.measured_at.timestamp()
    assert row.expires_at.timestamp() - measured_at_s == 3600.0
    assert [age.state for age in ages([row], measured_at_s + 3599)] == [RowState.FRESH]
    (age,) = ages([row], measured_at_s + 3700)
    assert (age.state, age.age_s, age.expires_in_s) == (RowState.EXPIRED, 3700, -100)


def test_the_table_survives_frame_parquet_and_json(tmp_path: Path) -> None:
    rows = build_from(*whole_sweep(), make_cell(CellKind.EMBED, output=0)).rows
    parquet, as_json = schema.write(rows, tmp_path)
    assert schema.from_frame(pd.read_parquet(parquet)) == rows
    assert schema.from_json(json.loads(as_json.read_text())) == rows
    assert list(schema.to_frame(rows).columns) == list(schema.COLUMNS)


def test_an_empty_table_has_its_columns() -> None:
    frame = CostTable(()).to_frame()
    assert list(frame.columns) == list(schema.COLUMNS)
    assert schema.from_frame(frame) == ()


def test_another_schema_is_refused() -> None:
    rows = build_from(*whole_sweep()).rows
    data = schema.to_json(rows)
    with pytest.raises(ValueError, match="schema 2"):
        schema.from_json(data | {"schema_version": 2})
    with pytest.raises(ValueError, match="ttft_p99_s"):
        schema.from_frame(schema.to_frame(rows).drop(columns="ttft_p99_s"))


def test_the_router_gets_the_engines_rows() -> None:
    rows = build_from(*whole_sweep()).rows
    routed = schema.to_cost_rows(rows)
    assert [row.concurrency for row in routed] == [1, 4, 8]
    assert routed[0].task is Task.GENERATE
    assert routed[0].expires_at_s == rows[0].expires_at.timestamp()


class Sink:
    def __init__(self) -> None:
        self.tables: list[PublishedCostTable] = []

    async def publish(self, table: PublishedCostTable) -> None:
        self.tables.append(table)


async def test_publishing_hands_every_sink_the_same_table() -> None:
    sinks = [Sink(), Sink()]
    published = await publish(build_from(*whole_sweep()).rows, "run-9", sinks, now_s=5.0)
    assert [sink.tables for sink in sinks] == [[published], [published]]
    assert (published.run_id, len(published.rows)) == ("run-9", 3)
