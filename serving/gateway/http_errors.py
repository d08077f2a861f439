"""Where errors become HTTP and an engine's HTTP becomes errors: one table each way, always OpenAI's shape."""

from __future__ import annotations

import math
from typing import Any

import orjson

from serving.core.errors import BadRequest, ErrorCode, Overloaded, ServingError, UpstreamError

Headers = list[tuple[bytes, bytes]]

# OpenAI's word for each status; its clients choose the exception by the status itself.
_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    403: "permission_error",
    404: "invalid_request_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    409: "conflict_error",
    413: "invalid_request_error",
    422: "invalid_request_error",
    429: "rate_limit_error",
    431: "invalid_request_error",
    499: "client_closed_request",
    502: "upstream_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}

ENGINE_BUSY_RETRY_AFTER_S = 1.0

# An engine's 4xx that speak of the client's request. Any other (401, 404) speaks of how we called it: our fault.
_RELAYED = frozenset({400, 413, 422})


class EngineBusy(Overloaded):
    """The engine's own queue is full: load, not failure; another replica may have room."""


def error_object(error: ServingError) -> dict[str, Any]:
    """`{"error": {message, type, param, code}}` as OpenAI's clients expect it."""
    kind = _TYPES.get(error.status, "server_error")
    param = None if error.param is None else _encodable(error.param)
    return {"error": {"message": _encodable(error.message), "type": kind, "param": param, "code": str(error.code)}}


def error_response(error: ServingError) -> tuple[int, Headers, bytes]:
    """Status, headers (Retry-After on every 429 and 503) and body of an error; its length is the sender's to say."""
    body = orjson.dumps(error_object(error))
    headers: Headers = [(b"content-type", b"application/json")]
    if error.status in (429, 503):
        headers.append((b"retry-after", b"%d" % max(math.ceil(error.retry_after_s or 1.0), 1)))
    return error.status, headers, body


def error_event(error: ServingError) -> bytes:
    """The last event of a stream that failed after its head was sent. No `[DONE]` follows."""
    return b"data: " + orjson.dumps(error_object(error)) + b"\n\n"


def _encodable(text: str) -> str:
    """A client's JSON may hold half a surrogate pair, which UTF-8 cannot; a question mark takes its place."""
    return text.encode("utf-8", "replace").decode()


def from_engine(status: int, body: bytes) -> ServingError:
    """What an engine's answer of `status` other than 200 means for the client."""
    try:
        answer = orjson.loads(body)
    except orjson.JSONDecodeError:
        answer = {"message": body[:300].decode("utf-8", "replace")}
    return from_engine_object(answer if isinstance(answer, dict) else {}, status)


def from_engine_object(answer: dict[str, Any], status: int) -> ServingError:
    """As `from_engine`, for a parsed answer; the error's own `code` is its status when it is a number.

    vLLM sends `{"error": {message, type, param, code: 400}}`, as a body or as an event of a stream under HTTP 200.
    """
    error = answer.get("error", answer)
    if not isinstance(error, dict):
        error = {"message": str(error)}
    code = error.get("code")
    if isinstance(code, int) and 400 <= code <= 599:
        status = code
    message = str(error.get("message") or f"the engine answered {status}")
    if status in (429, 503):
        return EngineBusy(f"the engine's queue is full: {message}", retry_after_s=ENGINE_BUSY_RETRY_AFTER_S)
    if status in _RELAYED:
        param = error.get("param")
        too_long = "maximum context length" in message or "max_model_len" in message
        refused = BadRequest(
            message,
            code=ErrorCode.CONTEXT_LENGTH_EXCEEDED if too_long else None,
            param=param if isinstance(param, str) else None,
        )
        refused.status = status
        return refused
    return UpstreamError(f"the engine answered {status}: {message}")
