"""What a client is told that met a limit: which one, how large it is, when to come again, and the headers."""

from __future__ import annotations

import math

from serving.core.errors import ErrorCode, ExceedsLimit, RateLimited
from serving.core.policies.limits import LIMIT_NAMES, LimitKind, Refusal, Scope, amount, bounds_of, stream_estimate_s
from serving.gateway.http_errors import Headers

# When the cost breaker's one probe runs: it ends when it ends.
PROBE_RETRY_AFTER_S = 1.0


class LimitReached(RateLimited):
    """A limit has no room now. `headers` are the x-ratelimit-* of the answer."""

    def __init__(self, message: str, headers: Headers, retry_after_s: float, code: ErrorCode | None) -> None:
        super().__init__(message, code=code, retry_after_s=retry_after_s)
        self.headers = headers


class LargerThanLimit(ExceedsLimit):
    """The request never fits. `headers` are the x-ratelimit-* of the answer."""

    def __init__(self, message: str, headers: Headers) -> None:
        super().__init__(message)
        self.headers = headers


def limit_reached(
    refusal: Refusal, scope: Scope, num_tokens: int, mean_stream_s: float | None, headers: Headers
) -> LimitReached:
    """The error for a request that has to wait.

    Args:
        refusal: by which limit.
        scope: whose limit it is.
        num_tokens: that the request would have reserved.
        mean_stream_s: how long the scope's streams take, for an estimate.
        headers: of the answer.
    """
    bound = bounds_of(scope.limits)[refusal.kind - 1]
    retry_after_s, code = refusal.retry_after_s, None
    text = f"{LIMIT_NAMES[refusal.kind]} of {scope.name} is {amount(refusal.kind, bound)}"
    if refusal.kind is LimitKind.STREAMS:
        retry_after_s = stream_estimate_s(mean_stream_s, bound)
        text += ", and as many run"
    elif refusal.kind is LimitKind.USD_PER_HOUR:
        retry_after_s = retry_after_s or PROBE_RETRY_AFTER_S
        code = ErrorCode.COST_BREAKER_OPEN
        text += ": the cost breaker is open"
    elif refusal.kind is LimitKind.REQUESTS_PER_MINUTE:
        text += ", and they are used up"
    else:
        text += f": the request needs {num_tokens}, and fewer are left"
    return LimitReached(f"{text}; try again in {math.ceil(retry_after_s)} s", headers, retry_after_s, code)
