"""The usage event: what one request used, whose it was, and what it cost. Metadata only.

On the wire it is a CloudEvents 1.0 event in structured JSON, one a line:

    id                     the request's internal key; a request has one event however often it was tried inside
    source, type, time     the worker, what kind of event this is, when the request ended
    subject, partitionkey  the tenant: events of a tenant stay in order in a partitioned log
    dataschema             names the version of `data`; a reader refuses one that it does not know
    data                   the fields of `UsageEvent`

Delivery is at least once; whoever adds events up counts an id once.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import UTC, datetime
from enum import StrEnum
from typing import Any

import orjson
from pydantic import TypeAdapter, ValidationError

from serving.core.errors import ClientGone, DeadlineExceeded, ServingError

SCHEMA = "urn:workbench:usage:1"
TYPE = "workbench.usage"
_JSON = orjson.OPT_UTC_Z | orjson.OPT_APPEND_NEWLINE


class Waste(StrEnum):
    """Why an engine's work did not become a whole answer. With the billed events these make up all that engines did."""

    ABANDONED = "abandoned"  # the client left, or the deadline that it set passed
    RETRIED = "retried"  # a replica failed or was full; the request went on elsewhere, under an event of its own
    SHADOW = "shadow"  # a request mirrored to a candidate version; its answer was scored and discarded
    FAILED = "failed"  # the engine broke off or the gateway was stopped: the client was told of an error


class BrokenEvent(ValueError):
    """A line holds no usage event of this schema; the message says why."""


# Not frozen: one is made for each request, and frozen takes three times as long. Nobody changes it.
@dataclass(slots=True)
class UsageEvent:
    """What one request used.

    Attributes:
        id: internal key of the request, equal in each of its deliveries.
        request_id: the client's X-Request-Id or ours, for people to follow.
        key_id: of the API key or token; safe to log.
        version: empty, like `pool` and `replica`, when no replica was chosen.
        tier: of the request, after its grants were checked.
        usd: by the cost table; None when the pool has no row that counts.
        cost_table_run_id: the MLflow run of that table.
        status: HTTP status; a stream that broke off has 200 and its `waste`.
        replayed: answered from the store: no engine worked, so tokens and usd are 0.
        waste: None when the client got the whole answer.
        exact: the engine reported the tokens; otherwise they were counted here.
        started_at_s: arrival, `ended_at_s` end of the answer; Unix seconds. On the wire they are RFC 3339 times
            `started_at` and `ended_at`.
    """

    id: str
    tenant: str
    request_id: str
    key_id: str
    model: str
    version: str
    adapter: str | None
    pool: str
    replica: str
    tier: str
    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    finish_reason: str | None
    usd: float | None
    cost_table_run_id: str | None
    status: int
    started_at_s: float
    ended_at_s: float
    waste: Waste | None = None
    exact: bool = True
    replayed: bool = False
    batch_id: str | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output."""
        return self.num_prompt_tokens + self.num_output_tokens


def waste_of(error: ServingError | None) -> Waste | None:
    """How the work of a request that ended with `error` is classed."""
    if error is None:
        return None
    return Waste.ABANDONED if isinstance(error, ClientGone | DeadlineExceeded) else Waste.FAILED


def retried_id(event_id: str, attempt: int) -> str:
    """The id of the waste that attempt `attempt` left: not that of the request's own event, for both count."""
    return f"{event_id}-retried-{attempt}"


def encode(event: UsageEvent, source: str) -> bytes:
    """The event as a line, its end included. `source` is the worker, as a URI reference (`/gateway/0`)."""
    ended_at = datetime.fromtimestamp(event.ended_at_s, UTC)
    return orjson.dumps(
        {
            "specversion": "1.0",
            "id": event.id,
            "source": source,
            "type": TYPE,
            "time": ended_at,
            "subject": event.tenant,
            "partitionkey": event.tenant,
            "datacontenttype": "application/json",
            "dataschema": SCHEMA,
            "data": {
                "id": event.id,
                "tenant": event.tenant,
                "request_id": event.request_id,
                "key_id": event.key_id,
                "model": event.model,
                "version": event.version,
                "adapter": event.adapter,
                "pool": event.pool,
                "replica": event.replica,
                "tier": event.tier,
                "num_prompt_tokens": event.num_prompt_tokens,
                "num_cached_tokens": event.num_cached_tokens,
                "num_output_tokens": event.num_output_tokens,
                "finish_reason": event.finish_reason,
                "usd": event.usd,
                "cost_table_run_id": event.cost_table_run_id,
                "status": event.status,
                "started_at": datetime.fromtimestamp(event.started_at_s, UTC),
                "ended_at": ended_at,
                "waste": event.waste,
                "exact": event.exact,
                "replayed": event.replayed,
                "batch_id": event.batch_id,
            },
        },
        option=_JSON,
    )


_EVENT = TypeAdapter(UsageEvent)
_TIMES = {"started_at": "started_at_s", "ended_at": "ended_at_s"}
NAMES = tuple(next((wire for wire, own in _TIMES.items() if own == f.name), f.name) for f in fields(UsageEvent))
"""Names of the fields on the wire."""


def decode(line: bytes) -> UsageEvent:
    """The event that a line holds. Fields that it has beyond ours are left out: a newer writer may add some.

    Raises:
        BrokenEvent: it is no event, one of another schema, or lacks a field.
    """
    try:
        envelope = orjson.loads(line)
        schema, data = envelope["dataschema"], envelope["data"]
        values = {_TIMES.get(name, name): _read(name, data[name]) for name in NAMES} if schema == SCHEMA else {}
    except KeyError as error:
        raise BrokenEvent(f"it lacks {error}") from None
    except (TypeError, AttributeError, ValueError) as error:
        raise BrokenEvent(f"it is no usage event ({error})") from None
    if schema != SCHEMA:
        raise BrokenEvent(f"schema {schema!r} is not {SCHEMA!r}: read it with the version that wrote it")
    try:
        return _EVENT.validate_python(values)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        raise BrokenEvent(f"{'.'.join(map(str, first['loc']))}: {first['msg']}") from None


def _read(name: str, value: Any) -> Any:
    return datetime.fromisoformat(value).timestamp() if name in _TIMES else value
