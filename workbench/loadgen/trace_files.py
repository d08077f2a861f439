"""Traces from files.

    *.csv      Azure's LLM inference traces: TIMESTAMP, ContextTokens, GeneratedTokens
               or turns of agents (agent_turns.py), as the header tells
    *.jsonl    Mooncake's: timestamp (ms), input_length, output_length, hash_ids of blocks of 512 tokens; or
               usage events of our own gateway (a segment of its spool, or what was consumed), one a line
    *.parquet  request records of an earlier run (records.py)

Records and usage events know how many prompt tokens came from the cache, not from whom: requests of one model (and
tenant) share the start of one common text, each as much of it as it had cached.
"""

from __future__ import annotations

import csv
import gzip
import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace
from datetime import datetime
from importlib.resources import files
from pathlib import Path
from typing import Any

from serving.metering.events import BrokenEvent, UsageEvent, Waste, decode
from workbench.loadgen.agent_turns import BLOCK_TOKENS, FIELDS, agent_requests
from workbench.loadgen.json_lines import object_of
from workbench.loadgen.records import RequestRecord, read_parquet
from workbench.loadgen.specs import nearest
from workbench.loadgen.traces import Trace, TracedRequest, TraceError

MOONCAKE_BLOCK_TOKENS = 512
CACHED_BLOCK_TOKENS = 16  # the smallest block that engines cache
SAMPLES = {
    "azure-code": "azure_code_2023_first500.csv",
    "azure-conv": "azure_conv_2023_first500.csv",
    "mooncake-conversation": "mooncake_conversation_first300.jsonl",
    "agent-turns": "agent_turns_first300.csv",
}
_AZURE_FIELDS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


def read_trace(name: str | Path) -> Trace:
    """The trace in a file, or one of the `SAMPLES` by its name.

    Raises:
        TraceError: there is no such file or sample, or a line of it is not as promised.
    """
    path = Path(name)
    if not path.exists() and str(name) in SAMPLES:
        path = Path(str(files("workbench").joinpath("data", SAMPLES[str(name)])))
    if not path.is_file():
        raise TraceError(f"there is no trace file {name}{nearest(str(name), SAMPLES, of='Samples that come along')}")
    suffix = next((s for s in reversed(path.suffixes) if s != ".gz"), "")
    if suffix == ".csv":
        return _table(str(name), path)
    if suffix in (".jsonl", ".ndjson", ".json", ""):
        return _json_lines(str(name), path)
    if suffix == ".parquet":
        return records_trace(str(name), _records(path))
    raise TraceError(f"{path}: a trace is a .csv, .jsonl or .parquet file, not {suffix}")


def records_trace(name: str, records: Iterable[RequestRecord]) -> Trace:
    """The served requests of an earlier run at the times at which they were due."""
    skipped: Counter[str] = Counter()
    requests = []
    for record in records:
        if not record.ok:
            skipped["failed"] += 1
            continue
        blocks = _cached_blocks(record.adapter or "", record.num_cached_tokens or 0)
        own = (record.num_prompt_tokens, record.num_output_tokens)
        requests.append(TracedRequest(record.intended_at_s, *own, blocks, record.tier, record.adapter))
    return _ordered(name, requests, CACHED_BLOCK_TOKENS, skipped)


def events_trace(name: str, events: Iterable[UsageEvent]) -> Trace:
    """The requests that engines answered, by their usage events; an event that comes twice counts once."""
    skipped: Counter[str] = Counter()
    requests: dict[str, TracedRequest] = {}
    for event in events:
        reason = _why_not(event)
        if reason is not None:
            skipped[reason] += 1
            continue
        blocks = _cached_blocks(f"{event.tenant}/{event.model}/{event.adapter or ''}", event.num_cached_tokens)
        own = (event.num_prompt_tokens, event.num_output_tokens)
        requests[event.id] = TracedRequest(event.started_at_s, *own, blocks, event.tier, event.adapter)
    return _ordered(name, requests.values(), CACHED_BLOCK_TOKENS, skipped)


def _why_not(event: UsageEvent) -> str | None:
    """Why an event is no request to send again."""
    if event.waste is Waste.RETRIED:
        return "first tries of requests that went on elsewhere"
    if event.replayed:
        return "replayed from the store"
    if event.status >= 400 or event.num_prompt_tokens < 1:
        return "refused or failed"
    if event.waste is not None:
        return "broken off"
    return None


def _cached_blocks(group: str, num_cached_tokens: int) -> tuple[str, ...]:
    return tuple(f"{group}#{number}" for number in range(num_cached_tokens // CACHED_BLOCK_TOKENS))


def _ordered(
    name: str, requests: Iterable[TracedRequest], block_tokens: int = MOONCAKE_BLOCK_TOKENS,
    skipped: Counter[str] | None = None,
) -> Trace:  # fmt: skip
    """By arrival, which is counted from the first."""
    ordered = sorted(requests, key=lambda request: request.at_s)
    first_s = ordered[0].at_s if ordered else 0.0
    moved = tuple(replace(request, at_s=request.at_s - first_s) for request in ordered)
    return Trace(name, moved, block_tokens, dict(skipped or {}))


def _lines(path: Path) -> Iterator[tuple[int, bytes]]:
    """Lines that are not empty, with their numbers."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield number, line
    except (OSError, EOFError) as error:
        raise TraceError(f"{path} cannot be read: {error}") from error


def _table(name: str, path: Path) -> Trace:
    """A trace in CSV, as its header tells."""
    texts = ((number, _text(path, number, line)) for number, line in _lines(path))
    header = next(csv.reader([next(texts, (0, ""))[1]]), [])
    if set(FIELDS) <= set(header):
        skipped: Counter[str] = Counter()
        rows = ((f"{path}:{number}", row) for number, row in _rows(path, header, texts))
        return _ordered(name, agent_requests(rows, skipped), BLOCK_TOKENS, skipped)
    missing = [field for field in _AZURE_FIELDS if field not in header]
    if missing:
        raise TraceError(f"{path}:1: no column {missing[0]}; a trace in CSV has {', '.join(_AZURE_FIELDS)}")
    return _ordered(name, (_azure(path, number, row) for number, row in _rows(path, header, texts)))


def _rows(path: Path, header: list[str], texts: Iterable[tuple[int, str]]) -> Iterator[tuple[int, dict[str, str]]]:
    for number, text in texts:
        cells = next(csv.reader([text]))
        if len(cells) != len(header):
            raise TraceError(f"{path}:{number}: {len(cells)} values in {len(header)} columns")
        yield number, dict(zip(header, cells, strict=True))


def _azure(path: Path, number: int, row: dict[str, str]) -> TracedRequest:
    return TracedRequest(
        _azure_time(path, number, row["TIMESTAMP"]),
        _whole(path, number, "ContextTokens", row["ContextTokens"]),
        _whole(path, number, "GeneratedTokens", row["GeneratedTokens"]),
    )


def _text(path: Path, number: int, line: bytes) -> str:
    try:
        return line.decode("utf-8-sig").rstrip("\r\n")
    except UnicodeDecodeError:
        raise TraceError(f"{path}:{number}: no UTF-8 text") from None


def _azure_time(path: Path, number: int, text: str) -> float:
    try:
        # Seven digits of a second stand there, one more than Python reads.
        whole, _, digits = text.strip().partition(".")
        return datetime.fromisoformat(whole + "+00:00").timestamp() + (float("0." + digits) if digits else 0.0)
    except ValueError:
        raise TraceError(f"{path}:{number}: TIMESTAMP is {text!r}; it must be as 2023-11-16 18:17:03.97") from None


def _json_lines(name: str, path: Path) -> Trace:
    """Mooncake's lines or usage events, as the first line tells."""
    lines = _lines(path)
    number, first = next(lines, (0, b""))
    if not first:
        raise TraceError(f"{name} holds no request")
    head = _object(path, number, first)
    both = (pair for part in ([(number, first)], lines) for pair in part)
    if "dataschema" in head:
        return events_trace(name, (_event(path, number, line) for number, line in both))
    if "input_length" not in head:
        raise TraceError(
            f"{path}:{number}: neither a request (timestamp, input_length, output_length, hash_ids) nor a usage event"
        )
    return _ordered(name, (_mooncake(path, number, _object(path, number, line)) for number, line in both))


def _event(path: Path, number: int, line: bytes) -> UsageEvent:
    try:
        return decode(line)
    except BrokenEvent as error:
        raise TraceError(f"{path}:{number}: {error}") from None


def _object(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        return object_of(line)
    except ValueError as error:
        raise TraceError(f"{path}:{number}: {error}") from None


def _mooncake(path: Path, number: int, row: dict[str, Any]) -> TracedRequest:
    at_ms = row.get("timestamp")
    if isinstance(at_ms, bool) or not isinstance(at_ms, int | float) or not 0 <= at_ms < math.inf:
        raise TraceError(f"{path}:{number}: timestamp is {at_ms!r}; it must be milliseconds, 0 or more")
    num_prompt_tokens = _whole(path, number, "input_length", row.get("input_length"))
    block_ids = row.get("hash_ids") or []
    if not isinstance(block_ids, list) or any(isinstance(b, bool) or not isinstance(b, int | str) for b in block_ids):
        raise TraceError(f"{path}:{number}: hash_ids must be a list of numbers or strings")
    num_blocks = -(-num_prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(block_ids) > num_blocks:
        raise TraceError(
            f"{path}:{number}: hash_ids has {len(block_ids)} blocks of {MOONCAKE_BLOCK_TOKENS} tokens, "
            f"input_length {num_prompt_tokens} has room for {num_blocks}"
        )
    num_output_tokens = _whole(path, number, "output_length", row.get("output_length"))
    return TracedRequest(at_ms / 1000, num_prompt_tokens, num_output_tokens, tuple(block_ids))


def _whole(path: Path, number: int, field: str, value: object) -> int:
    if isinstance(value, str) and value.strip().isdigit():
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise TraceError(f"{path}:{number}: {field} is {value!r}; it must be a whole number of at least 1")
    return value


def _records(path: Path) -> list[RequestRecord]:
    try:
        return read_parquet(path)
    except (OSError, ValueError, KeyError) as error:
        raise TraceError(f"{path} holds no request records: {error}") from error
