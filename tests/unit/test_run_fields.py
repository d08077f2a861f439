from __future__ import annotations

import math

from tests.cells import make_cell
from workbench import run_fields


def test_metrics_carry_their_intervals_and_are_finite() -> None:
    metrics = run_fields.cell_metrics(make_cell())
    assert metrics["ttft_s/p99"] == 0.31
    assert metrics["output_tokens_per_s_per_gpu/ci_low"] < metrics["output_tokens_per_s_per_gpu"]
    assert metrics["decode_tokens_per_s"] == 110.0
    assert all(math.isfinite(value) for value in metrics.values())


def test_tags_name_what_the_run_rests_on() -> None:
    cell = make_cell()
    tags = run_fields.cell_tags(cell, "parent")
    assert tags["mlflow.parentRunId"] == "parent"
    assert tags["measurement.id"] == cell.measurement_id
    assert (tags["version"], tags["task"], tags["commit"], tags["valid"]) == ("1", "generate", "c0ffee", "true")
    assert {"engine_fingerprint", "hardware_fingerprint", "hardware_class", "target"} <= set(tags)
    invalid = run_fields.cell_tags(make_cell(invalid="warm"), "parent")
    assert (invalid["valid"], invalid["invalid"]) == ("false", "warm")


def test_a_repeated_measurement_has_the_same_key() -> None:
    assert run_fields.cell_key(make_cell()) == run_fields.cell_key(make_cell(started_at_s=1.0, sweep_digest="other"))
    assert run_fields.cell_key(make_cell()) != run_fields.cell_key(make_cell(concurrency=8))
    assert run_fields.cell_key(make_cell()) != run_fields.cell_key(make_cell(engine_fingerprint="other"))


def test_nested_values_become_dotted_names() -> None:
    assert run_fields.flat("engine", {"flags": {"dtype": "bfloat16", "sizes": [1, 2]}, "version": None}) == {
        "engine.flags.dtype": "bfloat16", "engine.flags.sizes": "[1, 2]", "engine.version": "None"}  # fmt: skip
