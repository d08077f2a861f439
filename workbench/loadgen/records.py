"""What one request of a load run left behind, and its way to parquet and back.

A record keeps the raw times and counts; every latency is a property computed from them, so that a
definition can't differ between a plot and a table. All `_at_s` are seconds since the run's start.

    intended ── sent ── head ── first token ─ … ─ last token ── stream end
       └─────── ttft_s ────────────┘                  │            (late usage and [DONE] events
       └─────── e2e_s ────────────────────────────────┘             come here and move nothing)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from enum import StrEnum
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from serving.core.state import Task

RECORDS_SCHEMA = 2
_ADDED_IN_2 = ("adapter", "tier", "session_id", "turn", "is_prompt_estimated")


class TokenSource(StrEnum):
    """Where the token counts of a stream come from, best first."""

    TOKEN_IDS = "token_ids"
    CONTINUOUS_USAGE = "continuous_usage"
    FINAL_USAGE = "final_usage"  # spread evenly over the chunks that carried text
    NONE = "none"


class FailureKind(StrEnum):
    """Why a request does not count as served."""

    CONNECT = "connect"  # no connection: nothing was sent
    LOST = "lost"  # the peer broke off
    TIMEOUT = "timeout"  # no end within the request's time limit
    HTTP_STATUS = "http_status"  # an answer other than 2xx
    ERROR_EVENT = "error_event"  # `data: {"error": …}` under HTTP 200
    NO_TOKEN = "no_token"  # a 200 that carried no token
    TRUNCATED = "truncated"  # the stream ended without a finish reason
    MALFORMED = "malformed"  # not the JSON that the protocol promises
    UNCOUNTED = "uncounted"  # text, but nothing that counts its tokens
    MISCOUNTED = "miscounted"  # the chunks' tokens and the usage disagree
    WRONG_LENGTH = "wrong_length"  # another number of output tokens than asked for
    CUT_OFF = "cut_off"  # still running when the run had to end


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request. `num_prompt_tokens` is what was sent by our count, `usage_prompt_tokens` the server's.

    `chunk_at_s` and `chunk_tokens` hold, for each chunk that carried tokens, its arrival and how many.
    `is_prompt_estimated`: nobody has counted the prompt, neither we nor the server. `intended_at_s` of a session's
    later turn is the end of the turn before plus the pause; in a closed loop a user has no other schedule.
    """

    request_id: str
    index: int
    task: Task
    num_prompt_tokens: int
    num_output_tokens_asked: int
    intended_at_s: float
    sent_at_s: float
    head_at_s: float | None = None
    first_content_at_s: float | None = None
    stream_end_at_s: float | None = None
    chunk_at_s: tuple[float, ...] = ()
    chunk_tokens: tuple[int, ...] = ()
    num_output_tokens: int = 0
    usage_prompt_tokens: int | None = None
    num_cached_tokens: int | None = None
    token_source: TokenSource = TokenSource.NONE
    finish_reason: str | None = None
    http_status: int | None = None
    failure: FailureKind | None = None
    failure_detail: str | None = None
    served_by: str | None = None
    adapter: str | None = None
    tier: str | None = None
    session_id: str | None = None
    turn: int = 0
    is_prompt_estimated: bool = False

    @property
    def ok(self) -> bool:
        """Whether the request was served as asked."""
        return self.failure is None

    @property
    def first_token_at_s(self) -> float | None:
        """Arrival of the first token; reasoning counts, a role chunk does not."""
        return self.chunk_at_s[0] if self.chunk_at_s else None

    @property
    def end_at_s(self) -> float | None:
        """When the last token came; for an embedding, when the answer was complete."""
        return self.chunk_at_s[-1] if self.chunk_at_s else (self.stream_end_at_s if self.task is Task.EMBED else None)

    @property
    def send_lag_s(self) -> float:
        """How far behind its schedule the client sent this request."""
        return self.sent_at_s - self.intended_at_s

    @property
    def ttft_s(self) -> float | None:
        """Intended send to first token: what a user of an open loop waits, whoever is to blame."""
        return _since(self.intended_at_s, self.first_token_at_s)

    @property
    def service_ttft_s(self) -> float | None:
        """Actual send to first token: the server's part of `ttft_s`."""
        return _since(self.sent_at_s, self.first_token_at_s)

    @property
    def ttfc_s(self) -> float | None:
        """Intended send to the first content that is not reasoning."""
        return _since(self.intended_at_s, self.first_content_at_s)

    @property
    def e2e_s(self) -> float | None:
        """Intended send to last token (embedding: to the complete answer)."""
        return _since(self.intended_at_s, self.end_at_s)

    @property
    def service_e2e_s(self) -> float | None:
        """Actual send to last token: the server's part of `e2e_s`."""
        return _since(self.sent_at_s, self.end_at_s)

    @property
    def tpot_s(self) -> float | None:
        """Seconds an output token after the first chunk: (e2e - ttft) / (output tokens - 1).

        When the first chunk brings several tokens, those after its first have no gap that anybody saw;
        they leave the denominator too, or 4 tokens a chunk would look faster than they are.
        """
        num_timed = sum(self.chunk_tokens[1:])
        return (self.chunk_at_s[-1] - self.chunk_at_s[0]) / num_timed if num_timed else None

    def itl_s(self) -> list[float]:
        """The gap before each token after the first chunk; tokens of one chunk share its gap evenly."""
        gaps: list[float] = []
        for (earlier, later), count in zip(pairwise(self.chunk_at_s), self.chunk_tokens[1:], strict=True):
            gaps.extend([(later - earlier) / count] * count)
        return gaps


def _since(start_s: float, end_s: float | None) -> float | None:
    return None if end_s is None else end_s - start_s


_COLUMNS: dict[str, pa.DataType] = {
    "request_id": pa.string(),
    "index": pa.int64(),
    "task": pa.string(),
    "num_prompt_tokens": pa.int64(),
    "num_output_tokens_asked": pa.int64(),
    "intended_at_s": pa.float64(),
    "sent_at_s": pa.float64(),
    "head_at_s": pa.float64(),
    "first_content_at_s": pa.float64(),
    "stream_end_at_s": pa.float64(),
    "chunk_at_s": pa.list_(pa.float64()),
    "chunk_tokens": pa.list_(pa.int32()),
    "num_output_tokens": pa.int64(),
    "usage_prompt_tokens": pa.int64(),
    "num_cached_tokens": pa.int64(),
    "token_source": pa.string(),
    "finish_reason": pa.string(),
    "http_status": pa.int32(),
    "failure": pa.string(),
    "failure_detail": pa.string(),
    "served_by": pa.string(),
    "adapter": pa.string(),
    "tier": pa.string(),
    "session_id": pa.string(),
    "turn": pa.int32(),
    "is_prompt_estimated": pa.bool_(),
}


def to_table(records: Sequence[RequestRecord]) -> pa.Table:
    """The records as an arrow table, a row a request (`to_table(r).to_pandas()` for notebooks)."""
    schema = pa.schema(list(_COLUMNS.items()), metadata={"records_schema": str(RECORDS_SCHEMA)})
    columns = {name: [getattr(record, name) for record in records] for name in _COLUMNS}
    return pa.table(columns, schema=schema)


def write_parquet(records: Sequence[RequestRecord], path: Path) -> None:
    """Writes the records to `path`, whole or not at all."""
    partial = path.with_name(path.name + ".partial")
    pq.write_table(to_table(records), partial, compression="zstd")
    partial.replace(path)


def read_parquet(path: Path) -> list[RequestRecord]:
    """Reads what `write_parquet` wrote, in this schema or the one before.

    Raises:
        ValueError: the file is of another schema; the message names it.
    """
    table = pq.read_table(path)
    found = (table.schema.metadata or {}).get(b"records_schema", b"none").decode()
    if found not in ("1", str(RECORDS_SCHEMA)):
        raise ValueError(f"{path}: request records of schema {found}, this version reads 1 and {RECORDS_SCHEMA}")
    return [_from_row(row) for row in table.to_pylist()]


def _from_row(row: dict[str, Any]) -> RequestRecord:
    values = {f.name: row[f.name] for f in fields(RequestRecord) if f.name in row or f.name not in _ADDED_IN_2}
    values["task"] = Task(values["task"])
    values["token_source"] = TokenSource(values["token_source"])
    values["failure"] = None if values["failure"] is None else FailureKind(values["failure"])
    values["chunk_at_s"] = tuple(values["chunk_at_s"])
    values["chunk_tokens"] = tuple(values["chunk_tokens"])
    return RequestRecord(**values)
