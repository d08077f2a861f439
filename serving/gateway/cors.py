"""Which web pages may call the gateway from a browser, and the headers that tell the browser so.

FastAPI's routes and every preflight go through Starlette's middleware; `cors_headers` is the same for hot routes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from serving.gateway.http_errors import Headers

CorsHeaders = Callable[[bytes | None], Headers]
"""From a request's Origin to the headers that its answer gets."""

ANY_ORIGIN = "*"
EXPOSED = (
    *("x-request-id", "x-served-by", "retry-after", "idempotent-replayed"),
    *(f"x-ratelimit-{what}-{unit}" for what in ("limit", "remaining", "reset") for unit in ("requests", "tokens")),
)
MAX_AGE_S = 600


def allow(app: FastAPI, origins: Sequence[str]) -> None:
    """Answers preflights, and marks the answers of FastAPI's routes."""
    if origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=list(origins),
            allow_methods=["GET", "POST"],
            allow_headers=["*"],
            expose_headers=list(EXPOSED),
            max_age=MAX_AGE_S,
        )


def cors_headers(origins: Sequence[str]) -> CorsHeaders:
    """What marks an answer of a hot route; nothing for pages that may not call."""
    exposed = (b"access-control-expose-headers", ", ".join(EXPOSED).encode())
    if ANY_ORIGIN in origins:
        to_all = [(b"access-control-allow-origin", b"*"), exposed]
        return lambda origin: [] if origin is None else to_all
    allowed: dict[bytes | None, Headers] = {
        origin.encode(): [(b"access-control-allow-origin", origin.encode()), (b"vary", b"Origin"), exposed]
        for origin in origins
    }
    return lambda origin: allowed.get(origin, [])
