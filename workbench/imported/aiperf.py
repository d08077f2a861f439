"""AIPerf's `profile_export_aiperf.json` (schema 1.x), and its requests in `profile_export.jsonl` beside it.

What it calls inter-token latency is a request's mean, our TPOT; its inter-chunk latency is our ITL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import datetime
from itertools import accumulate
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from serving.core.state import Task
from workbench.imported.foreign import ForeignRun, NotImportable, checked, finite, read_text
from workbench.imported.vllm_bench import spread
from workbench.loadgen import RequestRecord
from workbench.loadgen.records import FailureKind, TokenSource

TOOL = "AIPerf"
REQUESTS_FILE = "profile_export.jsonl"
SUMMARY_FILE = "profile_export_aiperf.json"
LATENCIES = {
    "time_to_first_token": "ttft_s",
    "inter_token_latency": "tpot_s",
    "inter_chunk_latency": "itl_s",
    "request_latency": "e2e_s",
}
RATES = {
    "request_throughput": "request_rps",
    "goodput": "goodput_rps",
    "output_token_throughput": "output_tokens_per_s_per_gpu",
    "input_token_throughput": "prompt_tokens_per_s_per_gpu",
    "total_token_throughput": "tokens_per_s_per_gpu",
}
STATISTICS = {"avg": "mean", "p50": "p50", "p90": "p90", "p95": "p95", "p99": "p99"}
SECONDS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "sec": 1.0, "seconds": 1.0}


class Phase(BaseModel):
    """How requests came in one phase."""

    model_config = ConfigDict(extra="allow")

    kind: str = "profiling"
    type: str = ""
    concurrency: int | None = None
    rate: float | None = None


class InputConfig(BaseModel):
    """What was asked for."""

    model_config = ConfigDict(extra="allow")

    models: dict[str, Any] = Field(default_factory=dict)
    phases: list[Phase] = Field(default_factory=list)


class AiperfExport(BaseModel):
    """What the file must hold; metrics are whatever else has a unit."""

    model_config = ConfigDict(extra="allow")

    schema_version: str = Field(pattern=r"^1\.")
    aiperf_version: str = "of unknown version"
    input_config: InputConfig
    start_time: datetime
    was_cancelled: bool = False


class Record(BaseModel):
    """One line of the requests' file."""

    metadata: dict[str, Any]
    metrics: dict[str, dict[str, Any]] = Field(default_factory=dict)
    error: dict[str, Any] | None = None


def is_it(data: Mapping[str, Any]) -> bool:
    """Whether the object looks like such an export."""
    return "schema_version" in data and "aiperf_version" in data


def is_request(data: Mapping[str, Any]) -> bool:
    """Whether the object looks like a line of the requests' file."""
    return {"metadata", "metrics"} <= set(data)


def read(data: Mapping[str, Any], path: Path) -> ForeignRun:
    """The run of the export, with its requests where their file lies beside. Raises NotImportable."""
    found = checked(AiperfExport, data, path, TOOL)
    figures = found.model_extra or {}
    beside = path.with_name(REQUESTS_FILE)
    records, began_s = _records(beside) if beside.is_file() else ((), None)
    phase = next((one for one in found.input_config.phases if one.kind == "profiling"), Phase())
    is_open = phase.rate is not None or phase.type in ("fixed_schedule", "user_centric")
    load = f"{phase.type}{phase.rate:g}" if phase.rate is not None else phase.type
    names = [str(item.get("name")) for item in found.input_config.models.get("items", [])]
    if not names:
        raise NotImportable(f"{path}: input_config names no model")
    num_served = _number(figures, "request_count", path)
    num_failed = _number(figures, "error_request_count", path)
    return ForeignRun(
        tool=f"{TOOL} {found.aiperf_version}",
        model=names[0],
        started_at_s=found.start_time.timestamp() if began_s is None else began_s,
        duration_s=_seconds(figures.get("benchmark_duration", {"unit": "s", "avg": 0.0}), "avg", path) or 0.0,
        concurrency=phase.concurrency or 0,
        load=load if is_open else "",
        num_requests=len(records) or round(num_served + num_failed),
        num_failed=sum(not record.ok for record in records) if records else round(num_failed),
        num_prompt_tokens=_number(figures, "total_isl", path),
        num_output_tokens=_number(figures, "total_osl", path),
        reported=_reported(figures, path),
        records=records,
        facts={"schema_version": found.schema_version, "was_cancelled": str(found.was_cancelled).lower()},
    )


def _reported(figures: Mapping[str, Any], path: Path) -> dict[str, float]:
    found: dict[str, float | None] = {
        ours: _statistic(figures[theirs], "avg", path) for theirs, ours in RATES.items() if theirs in figures
    }
    for theirs, ours in LATENCIES.items():
        for statistic, label in STATISTICS.items() if theirs in figures else ():
            found[f"{ours}/{label}"] = _seconds(figures[theirs], statistic, path)
    return finite(found)


def _statistic(metric: Any, name: str, path: Path) -> float | None:
    value = metric.get(name) if isinstance(metric, Mapping) else None
    if value is not None and not isinstance(value, int | float):
        raise NotImportable(f"{path}: {name} is {value!r}, no number")
    return None if value is None else float(value)


def _seconds(metric: Any, name: str, path: Path) -> float | None:
    value = _statistic(metric, name, path)
    if value is None:
        return None
    unit = str(metric.get("unit"))
    if unit not in SECONDS:
        raise NotImportable(f"{path}: a time in {unit!r}; known are {', '.join(SECONDS)}")
    return value * SECONDS[unit]


def _number(figures: Mapping[str, Any], name: str, path: Path) -> float:
    return _statistic(figures.get(name), "avg", path) or 0.0


def _records(path: Path) -> tuple[tuple[RequestRecord, ...], float | None]:
    """Its requests of the profiling phase, and when the first was due (seconds since the epoch)."""
    lines = []
    for number, line in enumerate(read_text(path).splitlines(), start=1):
        try:
            data = json.loads(line)
        except ValueError as error:
            raise NotImportable(f"{path}, line {number} is no JSON, or was cut off: {error}") from error
        record = checked(Record, data, path, TOOL)
        if record.metadata.get("benchmark_phase", "profiling") == "profiling":
            lines.append(record)
    try:
        lines.sort(key=lambda record: record.metadata["request_start_ns"])
        start_ns = min((record.metadata["request_start_ns"] for record in lines), default=0)
        found = tuple(_record(index, record, start_ns, path) for index, record in enumerate(lines))
    except (KeyError, TypeError) as error:
        raise NotImportable(f"{path}: a request without {error}") from error
    return found, start_ns / 1e9 if lines else None


def _record(index: int, line: Record, start_ns: int, path: Path) -> RequestRecord:
    sent_at_s = (line.metadata["request_start_ns"] - start_ns) / 1e9
    ttft_s = _seconds(line.metrics.get("time_to_first_token"), "value", path)
    gaps = line.metrics.get("inter_chunk_latency", {"value": [], "unit": "ms"})
    gaps_s = [gap * SECONDS[str(gaps["unit"])] for gap in gaps["value"]]
    is_served = line.error is None and not line.metadata.get("was_cancelled") and ttft_s is not None
    chunk_at_s = tuple(accumulate(gaps_s, initial=sent_at_s + (ttft_s or 0.0))) if is_served else ()
    num_output_tokens = round(_statistic(line.metrics.get("output_sequence_length"), "value", path) or 0)
    cached = _statistic(line.metrics.get("usage_prompt_cache_read_tokens"), "value", path)
    return RequestRecord(
        request_id=str(line.metadata.get("x_request_id", f"imported-{index}")),
        index=index,
        task=Task.GENERATE,
        num_prompt_tokens=round(_statistic(line.metrics.get("input_sequence_length"), "value", path) or 0),
        num_output_tokens_asked=num_output_tokens,
        intended_at_s=sent_at_s,
        sent_at_s=sent_at_s,
        stream_end_at_s=(line.metadata["request_end_ns"] - start_ns) / 1e9,
        chunk_at_s=chunk_at_s,
        chunk_tokens=spread(num_output_tokens, len(chunk_at_s)),
        num_output_tokens=num_output_tokens,
        num_cached_tokens=None if cached is None else round(cached),
        token_source=TokenSource.FINAL_USAGE,
        failure=None if is_served else FailureKind.LOST,
        failure_detail=None if line.error is None else str(line.error.get("message", line.error))[:500],
    )
