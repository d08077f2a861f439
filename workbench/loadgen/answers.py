"""From bytes with their arrival times to a record. Pure; runs after the load, so that it delays no stamp.

Which event brought how many tokens is known from, in this order: the token ids in the event, the usage in
each event, or the final usage spread evenly over the events that carried text. A role event, a usage event
and `[DONE]` bring no token, whenever they come.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import orjson

from serving.core.errors import UpstreamError
from serving.core.state import Task
from serving.core.values import value
from serving.engine.sse import DONE, EventSplitter, payload
from workbench.loadgen.records import FailureKind, RequestRecord, TokenSource

DETAIL_CHARS = 300
_REASONING_FIELDS = ("reasoning_content", "reasoning")


@dataclass(frozen=True, slots=True)
class RawAnswer:
    """What came back for one request, unparsed. Times are `time.perf_counter`.

    `failure` is what the transport knows by itself (no connection, lost, timeout, cut off).
    """

    sent_at_s: float
    ended_at_s: float
    head_at_s: float | None = None
    status: int | None = None
    served_by: str | None = None
    chunks: list[tuple[float, bytes]] = field(default_factory=list)
    failure: FailureKind | None = None
    detail: str | None = None


@value
class _TokenEvent:
    """An event with a choice: what it says about tokens. There is one a token."""

    at_s: float
    num_token_ids: int
    usage_tokens: int | None
    has_text: bool
    has_content: bool


@dataclass(slots=True)
class _Stream:
    """All that a stream said, in the order in which it came."""

    events: list[_TokenEvent] = field(default_factory=list)
    usage: dict[str, Any] | None = None
    finish_reason: str | None = None
    failure: FailureKind | None = None
    detail: str | None = None


def read_answer(raw: RawAnswer, asked: RequestRecord, *, start_s: float, is_exact: bool) -> RequestRecord:
    """Fills `asked` (the request as it was planned) with what `raw` holds.

    Args:
        raw: the answer as it came.
        asked: identity, lengths and intended time; times count from `start_s`.
        start_s: the run's start on `time.perf_counter`.
        is_exact: whether an output of another length than asked is a failure (the server was told to
            ignore end-of-text; otherwise the model may stop early).
    """
    record = replace(
        asked,
        sent_at_s=raw.sent_at_s - start_s,
        head_at_s=None if raw.head_at_s is None else raw.head_at_s - start_s,
        stream_end_at_s=(raw.chunks[-1][0] if raw.chunks else raw.ended_at_s) - start_s,
        http_status=raw.status,
        served_by=raw.served_by,
    )
    if raw.status is not None and not 200 <= raw.status < 300:
        body = b"".join(data for _, data in raw.chunks)
        kind = raw.failure or FailureKind.HTTP_STATUS
        return _failed(record, kind, f"HTTP {raw.status}: {body[:DETAIL_CHARS].decode('utf-8', 'replace')}")
    if raw.status is None:
        return _failed(record, raw.failure or FailureKind.LOST, raw.detail)
    if asked.task is Task.EMBED:
        return _read_embedding(raw, record)
    return _read_stream(raw, record, start_s, is_exact)


def _failed(record: RequestRecord, kind: FailureKind, detail: str | None) -> RequestRecord:
    return replace(record, failure=kind, failure_detail=detail and detail[:DETAIL_CHARS])


def _read_stream(raw: RawAnswer, record: RequestRecord, start_s: float, is_exact: bool) -> RequestRecord:
    stream = _parse(raw.chunks)
    source, chunks = _tokens(stream)
    usage = stream.usage or {}
    record = replace(
        record,
        first_content_at_s=next((event.at_s - start_s for event in stream.events if event.has_content), None),
        chunk_at_s=tuple(at_s - start_s for at_s, _ in chunks),
        chunk_tokens=tuple(count for _, count in chunks),
        num_output_tokens=sum(count for _, count in chunks),
        usage_prompt_tokens=usage.get("prompt_tokens"),
        num_cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        token_source=source,
        finish_reason=stream.finish_reason,
    )
    if raw.failure is not None:
        return _failed(record, raw.failure, raw.detail)
    if stream.failure is not None:
        return _failed(record, stream.failure, stream.detail)
    return _judged(record, stream, is_exact)


def _judged(record: RequestRecord, stream: _Stream, is_exact: bool) -> RequestRecord:
    """The record with the first reason why it does not count, if there is one."""
    num_tokens, asked = record.num_output_tokens, record.num_output_tokens_asked
    usage_tokens = (stream.usage or {}).get("completion_tokens")
    if not record.chunk_at_s:
        has_text = any(event.has_text for event in stream.events)
        kind = FailureKind.UNCOUNTED if has_text else FailureKind.NO_TOKEN
        return _failed(record, kind, "text without any count" if has_text else "HTTP 200 without a token")
    if stream.finish_reason is None:
        return _failed(record, FailureKind.TRUNCATED, f"no finish_reason after {num_tokens} tokens")
    if usage_tokens is not None and usage_tokens != num_tokens:
        return _failed(record, FailureKind.MISCOUNTED, f"{num_tokens} tokens came, usage says {usage_tokens}")
    if num_tokens > asked or (is_exact and num_tokens != asked):
        detail = f"{num_tokens} tokens of {asked} asked for, finish_reason {stream.finish_reason}"
        return _failed(record, FailureKind.WRONG_LENGTH, detail)
    return _prompt_judged(record)


def _prompt_judged(record: RequestRecord) -> RequestRecord:
    if record.is_prompt_estimated and record.usage_prompt_tokens is not None:
        return replace(record, num_prompt_tokens=record.usage_prompt_tokens, is_prompt_estimated=False)
    if record.is_prompt_estimated:
        return record
    if record.usage_prompt_tokens in (None, record.num_prompt_tokens):
        return record
    detail = f"{record.num_prompt_tokens} prompt tokens sent, usage says {record.usage_prompt_tokens}"
    return _failed(record, FailureKind.MISCOUNTED, detail)


def _read_embedding(raw: RawAnswer, record: RequestRecord) -> RequestRecord:
    if raw.failure is not None:
        return _failed(record, raw.failure, raw.detail)
    try:
        answer = orjson.loads(b"".join(data for _, data in raw.chunks))
        vectors = [item["embedding"] for item in answer["data"]]
        record = replace(record, usage_prompt_tokens=(answer.get("usage") or {}).get("prompt_tokens"))
    except (orjson.JSONDecodeError, KeyError, TypeError, AttributeError) as error:
        return _failed(record, FailureKind.MALFORMED, f"no embedding answer: {error!r}")
    if not vectors or not all(vectors):
        return _failed(record, FailureKind.NO_TOKEN, "HTTP 200 without a vector")
    return _prompt_judged(record)


def _parse(chunks: list[tuple[float, bytes]]) -> _Stream:
    """Reads the stream to its end, or to the first event that makes it worthless."""
    stream, splitter = _Stream(), EventSplitter()
    try:
        for at_s, data in chunks:
            for event in splitter.feed(data):
                body = payload(event)
                if body is not None and body != DONE:
                    _take(stream, at_s, orjson.loads(body))
    except (orjson.JSONDecodeError, UpstreamError, KeyError, TypeError, AttributeError) as error:
        stream.failure, stream.detail = FailureKind.MALFORMED, f"an event is not as promised: {error!r}"
    return stream


def _take(stream: _Stream, at_s: float, event: dict[str, Any]) -> None:
    if event.get("error") is not None and stream.failure is None:
        stream.failure, stream.detail = FailureKind.ERROR_EVENT, orjson.dumps(event["error"]).decode()
    usage = event.get("usage")
    stream.usage = usage or stream.usage
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        content = choice.get("text") or delta.get("content")
        other = delta.get("tool_calls") or any(delta.get(name) for name in _REASONING_FIELDS)
        stream.finish_reason = choice.get("finish_reason") or stream.finish_reason
        stream.events.append(
            _TokenEvent(
                at_s=at_s,
                num_token_ids=len(choice.get("token_ids") or ()),
                usage_tokens=usage["completion_tokens"] if usage else None,
                has_text=bool(content or other),
                has_content=bool(content),
            )
        )


def _tokens(stream: _Stream) -> tuple[TokenSource, list[tuple[float, int]]]:
    """Arrival and number of tokens of each event that brought any, from the best source there is."""
    events = stream.events
    if any(event.num_token_ids for event in events):
        return TokenSource.TOKEN_IDS, [(e.at_s, e.num_token_ids) for e in events if e.num_token_ids]
    texts = [event for event in events if event.has_text]
    # A server that adds its usage to the last text alone doesn't count continuously: all events must have it.
    if texts and all(event.usage_tokens is not None for event in texts):
        totals = [(event.at_s, event.usage_tokens) for event in events if event.usage_tokens is not None]
        gains = [
            (at_s, total - before) for (at_s, total), (_, before) in zip(totals, [(0.0, 0), *totals], strict=False)
        ]
        return TokenSource.CONTINUOUS_USAGE, [(at_s, gain) for at_s, gain in gains if gain > 0]
    total = (stream.usage or {}).get("completion_tokens")
    if texts and total:
        return TokenSource.FINAL_USAGE, _spread(total, [event.at_s for event in texts])
    return TokenSource.NONE, []


def _spread(total: int, times: list[float]) -> list[tuple[float, int]]:
    """`total` tokens over the events, evenly and the earlier first, so that the first event has at least one."""
    ends = [-(-total * (index + 1) // len(times)) for index in range(len(times))]
    counts = [end - start for start, end in zip([0, *ends], ends, strict=False)]
    return [(at_s, count) for at_s, count in zip(times, counts, strict=True) if count]
