"""A benchmark as a cell of a sweep, which it is like in all but its plan."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from workbench.benchmark.result import BenchResult
from workbench.loadgen import RequestRecord
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape

ONE_SPEC = CellSpec(CellKind.MIXED, Shape(1, 1), 1, 1)
"""Benchmarks have a load and a workload instead of a cell's shape: comparisons hold those equal before."""


def write_page(result: BenchResult, path: Path) -> None:
    """One self-contained HTML page of the benchmark.

    Raises:
        OSError: the file cannot be written.
    """
    # Figures take a second to import.
    from workbench.pages import draw

    cell = as_cell(result, _spec(result))
    title = f"{result.model}: {result.load}, {result.workload}"
    shown = draw.Measured(title, [cell], {cell.measurement_id: result.records}, result.slo)
    draw.write_page(shown, path)


def _spec(result: BenchResult) -> CellSpec:
    records = result.records
    shape = Shape(
        _mean([one.num_prompt_tokens for one in records]), _mean([one.num_output_tokens_asked for one in records])
    )
    return CellSpec(CellKind.MIXED, shape, _most_in_flight(records), len(records), load=result.load)


def _mean(values: Sequence[int]) -> int:
    return round(sum(values) / len(values)) if values else 0


def _most_in_flight(records: Sequence[RequestRecord]) -> int:
    """How many were in flight at once, at most: an open loop has no bound to name."""
    ends = [(one.stream_end_at_s or one.end_at_s or one.sent_at_s, -1) for one in records]
    steps = sorted([*((one.sent_at_s, 1) for one in records), *ends])
    most = now = 0
    for _, step in steps:
        now += step
        most = max(most, now)
    return most


def as_cell(result: BenchResult, spec: CellSpec = ONE_SPEC) -> CellResult:
    """The benchmark as a cell, for the one comparison and the one page that there are."""
    facts = result.facts
    return CellResult(
        sweep_digest="bench",
        spec=spec,
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
        failures={kind.value: count for kind, count in result.summary.failures.items()},
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
