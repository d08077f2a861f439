"""What the fake engine really did: every write of every request, with its time."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import orjson


class WriteKind(StrEnum):
    """What was written. `BODY` is a whole unary answer, error answers included."""

    HEAD = "head"
    ROLE = "role"
    TOKEN = "token"
    USAGE = "usage"
    DONE = "done"
    ERROR = "error"
    BODY = "body"


class Write(NamedTuple):
    """One socket write: when (time.perf_counter()), how many output tokens it carried, of what kind."""

    at_s: float
    num_tokens: int
    kind: WriteKind


@dataclass(slots=True)
class RequestLog:
    """One request, from its last byte's arrival on. Times are time.perf_counter().

    `finish_reason` is `length`, `stop`, `abort` (the client left, at `aborted_at_s`), `error` (turned away or
    failed), `died` (by a fault), or None while it runs. `headers` and `body` are what the engine was sent; the
    file leaves them out.
    """

    id: str
    path: str
    received_at_s: float
    headers: dict[bytes, bytes] = field(default_factory=dict, repr=False)
    body: dict[str, Any] = field(default_factory=dict, repr=False)
    status: int = 200
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    started_at_s: float | None = None
    writes: list[Write] = field(default_factory=list)
    finish_reason: str | None = None
    aborted_at_s: float | None = None
    text: str = ""

    @property
    def num_output_tokens(self) -> int:
        """Output tokens written."""
        return sum(write.num_tokens for write in self.writes)

    @property
    def token_writes(self) -> list[Write]:
        """The writes that carried output tokens."""
        return [write for write in self.writes if write.num_tokens]

    def as_dict(self) -> dict[str, Any]:
        """The request as it stands in the file."""
        return {
            "id": self.id,
            "path": self.path,
            "status": self.status,
            "received_at_s": self.received_at_s,
            "started_at_s": self.started_at_s,
            "num_prompt_tokens": self.num_prompt_tokens,
            "num_cached_tokens": self.num_cached_tokens,
            "num_output_tokens": self.num_output_tokens,
            "cache_salt": self.body.get("cache_salt"),
            "priority": self.body.get("priority"),
            "writes": [write._asdict() for write in self.writes],
            "finish_reason": self.finish_reason,
            "aborted_at_s": self.aborted_at_s,
        }


class WriteLog:
    """All requests: those in progress, and the last `limit` that ended."""

    def __init__(self, path: Path | None, limit: int) -> None:
        self.active: dict[str, RequestLog] = {}
        self.ended: deque[RequestLog] = deque(maxlen=limit)
        self._file: BinaryIO | None = path.open("ab", buffering=0) if path is not None else None

    def begin(self, request: RequestLog) -> None:
        """A request has come."""
        self.active[request.id] = request

    def end(self, request: RequestLog, finish_reason: str) -> None:
        """It is over; appends it to the file."""
        request.finish_reason = finish_reason
        self.active.pop(request.id, None)
        self.ended.append(request)
        if self._file is not None:
            self._file.write(orjson.dumps(request.as_dict()) + b"\n")

    def close(self) -> None:
        """Closes the file."""
        if self._file is not None:
            self._file.close()
            self._file = None
