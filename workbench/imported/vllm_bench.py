"""The JSON of `vllm bench serve --save-result`; with `--save-detailed` its requests too.

With `--append-result` a file holds several, one a line. Its ITL is the gap between chunks, its E2E and TTFT count from
the actual send: an open loop's wait for a slot (`queue_times`) is not in them.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.core.state import Task
from workbench.imported.foreign import ForeignRun, NotImportable, checked, finite
from workbench.loadgen import RequestRecord
from workbench.loadgen.records import FailureKind, TokenSource

TOOL = "vllm bench serve"
LATENCIES = {"ttft": "ttft_s", "tpot": "tpot_s", "itl": "itl_s", "e2el": "e2e_s"}
DATE_FORMAT = "%Y%m%d-%H%M%S"


class VllmResult(BaseModel):
    """What the file must hold; whatever else it holds is let be."""

    model_config = ConfigDict(extra="allow")

    date: str
    backend: str
    model_id: str
    request_rate: float | Literal["inf"]
    burstiness: float = 1.0
    max_concurrency: int | None = None
    duration: float = Field(gt=0)
    completed: int = Field(ge=0)
    failed: int = Field(default=0, ge=0)
    total_input_tokens: int = Field(ge=0)
    total_output_tokens: int = Field(ge=0)
    request_throughput: float
    output_throughput: float
    total_token_throughput: float | None = None
    request_goodput: float | None = None
    input_lens: list[int] | None = None
    output_lens: list[int] | None = None
    start_times: list[float] | None = None
    ttfts: list[float] | None = None
    itls: list[list[float]] | None = None
    errors: list[str] | None = None


def is_it(data: dict[str, Any]) -> bool:
    """Whether the object looks like such a result."""
    return {"backend", "model_id", "request_throughput"} <= set(data)


def read(data: dict[str, Any], path: Path) -> ForeignRun:
    """The run of one object of the file. Raises NotImportable."""
    found = checked(VllmResult, data, path, TOOL)
    is_open = found.request_rate != "inf"
    num_requests = found.completed + found.failed
    burst = "" if found.burstiness == 1.0 else f"-burst{found.burstiness:g}"
    return ForeignRun(
        tool=TOOL,
        model=found.model_id,
        started_at_s=_started_at_s(found, path),
        duration_s=found.duration,
        concurrency=found.max_concurrency or (0 if is_open else num_requests),
        load=f"rate{float(found.request_rate):g}{burst}" if is_open else "",
        num_requests=num_requests,
        num_failed=found.failed,
        num_prompt_tokens=found.total_input_tokens,
        num_output_tokens=found.total_output_tokens,
        reported=_reported(found),
        records=_records(found, path),
        facts={"backend": found.backend, "date": found.date},
    )


def _started_at_s(found: VllmResult, path: Path) -> float:
    """It stamps the end, in local time."""
    try:
        return datetime.strptime(found.date, DATE_FORMAT).timestamp() - found.duration
    except ValueError as error:
        raise NotImportable(f"{path}: date {found.date!r} is not YYYYMMDD-HHMMSS") from error


def _reported(found: VllmResult) -> dict[str, float]:
    figures: dict[str, float | None] = {
        "request_rps": found.request_throughput,
        "goodput_rps": found.request_goodput,
        "output_tokens_per_s_per_gpu": found.output_throughput,
        "tokens_per_s_per_gpu": found.total_token_throughput,
    }
    for name, value in (found.model_extra or {}).items():
        statistic, _, rest = name.partition("_")
        latency = LATENCIES.get(rest.removesuffix("_ms"))
        if latency is None or not rest.endswith("_ms") or not isinstance(value, int | float):
            continue
        label = {"median": "p50"}.get(statistic, statistic)
        if label == "mean" or label.removeprefix("p").replace(".", "").isdigit():
            figures[f"{latency}/{label}"] = value / 1000
    return finite(figures)


def _records(found: VllmResult, path: Path) -> tuple[RequestRecord, ...]:
    columns: list[Sequence[Any] | None] = [
        found.start_times, found.input_lens, found.output_lens, found.ttfts, found.itls, found.errors
    ]  # fmt: skip
    present = [column for column in columns if column is not None]
    if len(present) < len(columns):
        return ()
    if len({len(column) for column in present}) != 1:
        raise NotImportable(f"{path}: start_times, ttfts, itls and the others are not of one length")
    rows = sorted(zip(*present, strict=True))
    start_s = rows[0][0] if rows else 0.0
    return tuple(_record(number, start_s, *row) for number, row in enumerate(rows))


def _record(
    index: int,
    start_s: float,
    sent_s: float,
    num_prompt_tokens: int,
    num_output_tokens: int,
    ttft_s: float,
    gaps_s: list[float],
    error: str,
) -> RequestRecord:
    sent_at_s = sent_s - start_s
    chunk_at_s = tuple(accumulate(gaps_s, initial=sent_at_s + ttft_s)) if not error else ()
    return RequestRecord(
        request_id=f"imported-{index}",
        index=index,
        task=Task.GENERATE,
        num_prompt_tokens=num_prompt_tokens,
        num_output_tokens_asked=num_output_tokens,
        intended_at_s=sent_at_s,
        sent_at_s=sent_at_s,
        stream_end_at_s=chunk_at_s[-1] if chunk_at_s else sent_at_s,
        chunk_at_s=chunk_at_s,
        chunk_tokens=spread(num_output_tokens, len(chunk_at_s)),
        num_output_tokens=num_output_tokens,
        token_source=TokenSource.FINAL_USAGE,
        failure=FailureKind.LOST if error else None,
        failure_detail=error or None,
    )


def spread(num_tokens: int, num_chunks: int) -> tuple[int, ...]:
    """So many tokens over so many chunks, as evenly as whole numbers go."""
    edges = [num_tokens * number // num_chunks for number in range(num_chunks + 1)] if num_chunks else []
    return tuple(later - earlier for earlier, later in pairwise(edges))
