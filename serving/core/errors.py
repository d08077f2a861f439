"""Every error the serving layer raises on purpose, as one tree.

    ServingError
    ├── BadRequest            400  the client must change the request
    │   ├── BodyTooLarge      413
    │   ├── ExceedsLimit      400  larger than a whole limit or the cost cap: no waiting helps
    │   ├── ContentBlocked    400  a guardrail; names the category, never the text
    │   └── KeyReused         422  the idempotency key came with another body
    ├── Unauthorized          401  no key or token, or one that is not valid
    ├── Forbidden             403  a grant is missing
    ├── NotFound              404  no such model, version, replica or route
    ├── NotReplayable         409  done before, and the answer was not kept
    ├── Overloaded            429  try again after `retry_after_s`
    │   └── RateLimited       429  a limit of the tenant or of the key
    ├── Unavailable           503  nothing serves this model now
    ├── UpstreamError         502  the engine failed or broke off
    ├── DeadlineExceeded      504  the client's own deadline passed
    ├── ClientGone            499  the client left; nobody is there to answer
    ├── StaleEpoch            409  a newer routing table is already published
    ├── EngineError           ---  a replica could not be started or died
    └── WeightsError          ---  weights are missing, broken or cannot be converted

`code` is the documented, stable name: the same word in the answer's body and in the metric label.
`serving/gateway/http_errors.py` is the one place where these become HTTP.
"""

from __future__ import annotations

from enum import StrEnum


class ErrorCode(StrEnum):
    """Stable names of errors: in the OpenAI error body, in metric labels, in docs."""

    INVALID_JSON = "invalid_json"
    INVALID_REQUEST = "invalid_request"
    BODY_TOO_LARGE = "body_too_large"
    CONTEXT_LENGTH_EXCEEDED = "context_length_exceeded"
    EXCEEDS_LIMIT = "exceeds_limit"
    COST_CAP = "cost_cap"
    CONTENT_BLOCKED = "content_blocked"
    GUARDRAIL_UNAVAILABLE = "guardrail_unavailable"
    IDEMPOTENCY_KEY_REUSED = "idempotency_key_reused"
    NOT_REPLAYABLE = "not_replayable"
    INVALID_API_KEY = "invalid_api_key"
    PERMISSION_DENIED = "permission_denied"
    MODEL_NOT_FOUND = "model_not_found"
    REPLICA_NOT_FOUND = "replica_not_found"
    REQUEST_NOT_FOUND = "request_not_found"
    ROUTE_NOT_FOUND = "route_not_found"
    METHOD_NOT_ALLOWED = "method_not_allowed"
    OVERLOADED = "overloaded"
    RATE_LIMIT_EXCEEDED = "rate_limit_exceeded"
    COST_BREAKER_OPEN = "cost_breaker_open"
    STORE_UNAVAILABLE = "store_unavailable"
    DEADLINE_EXCEEDED = "deadline_exceeded"
    NO_REPLICA = "no_replica"
    UPSTREAM_ERROR = "upstream_error"
    UPSTREAM_TIMEOUT = "upstream_timeout"
    CLIENT_GONE = "client_gone"
    STALE_EPOCH = "stale_epoch"
    ENGINE_FAILED = "engine_failed"
    WEIGHTS_BROKEN = "weights_broken"
    INTERNAL = "internal_error"


class ServingError(Exception):
    """An expected failure: says what happened and what the caller can do.

    Attributes:
        status: the HTTP status it becomes when it reaches a client.
        code: the stable name.
        param: the request field at fault, if one is.
        retry_after_s: seconds after which a retry makes sense, if one does.
    """

    status = 500
    code = ErrorCode.INTERNAL

    def __init__(
        self,
        message: str,
        *,
        code: ErrorCode | None = None,
        param: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.retry_after_s = retry_after_s
        if code is not None:
            self.code = code


class BadRequest(ServingError):
    """The request itself is wrong; the same request will fail again."""

    status = 400
    code = ErrorCode.INVALID_REQUEST


class BodyTooLarge(BadRequest):
    """The body is over the limit; it was not read to its end."""

    status = 413
    code = ErrorCode.BODY_TOO_LARGE


class ExceedsLimit(BadRequest):
    """The request alone is larger than a whole limit or the cost cap; the message names it."""

    code = ErrorCode.EXCEEDS_LIMIT


class ContentBlocked(BadRequest):
    """A guardrail refused the content; the message names the category, never the text."""

    code = ErrorCode.CONTENT_BLOCKED


class KeyReused(BadRequest):
    """The idempotency key was used before with another body."""

    status = 422
    code = ErrorCode.IDEMPOTENCY_KEY_REUSED


class Unauthorized(ServingError):
    """No key or token, or one that is unknown, expired or revoked. Never says which for a key that exists."""

    status = 401
    code = ErrorCode.INVALID_API_KEY


class Forbidden(ServingError):
    """Authenticated, and the grant is missing."""

    status = 403
    code = ErrorCode.PERMISSION_DENIED


class NotReplayable(ServingError):
    """The request was answered before and its answer was not kept; it is never run twice."""

    status = 409
    code = ErrorCode.NOT_REPLAYABLE


class NotFound(ServingError):
    """No such model, version, replica or route. Never answered by a substitute."""

    status = 404
    code = ErrorCode.MODEL_NOT_FOUND


class Overloaded(ServingError):
    """Load, not failure: the same request succeeds later."""

    status = 429
    code = ErrorCode.OVERLOADED


class RateLimited(Overloaded):
    """A limit of the tenant or of its key; the message names which."""

    code = ErrorCode.RATE_LIMIT_EXCEEDED


class Unavailable(ServingError):
    """No replica serves this model now."""

    status = 503
    code = ErrorCode.NO_REPLICA


class UpstreamError(ServingError):
    """The engine answered with a failure of its own or broke off."""

    status = 502
    code = ErrorCode.UPSTREAM_ERROR


class DeadlineExceeded(ServingError):
    """The time that the client gave has passed; the engine was told to stop."""

    status = 504
    code = ErrorCode.DEADLINE_EXCEEDED


class ClientGone(ServingError):
    """The client left before the answer was complete; counted, never sent."""

    status = 499
    code = ErrorCode.CLIENT_GONE


class StaleEpoch(ServingError):
    """Somebody published a newer routing table; read it and try again."""

    status = 409
    code = ErrorCode.STALE_EPOCH


class EngineError(ServingError):
    """A replica did not start, did not become healthy, or died."""

    code = ErrorCode.ENGINE_FAILED


class WeightsError(ServingError):
    """Weights are missing, broken, or cannot be converted; the message names the file."""

    code = ErrorCode.WEIGHTS_BROKEN
