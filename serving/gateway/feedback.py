"""`POST /v1/feedback`: what somebody thought of an answer, told to the rollout that it was part of."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Literal

from fastapi import FastAPI, Request
from pydantic import BaseModel, ConfigDict, Field

from serving.core.errors import BadRequest, BodyTooLarge, ErrorCode, NotFound, Unavailable
from serving.core.tenancy import Principal, Scope, require
from serving.gateway import openapi
from serving.gateway.body import parse_object
from serving.gateway.observer import Observer

FEEDBACK = "/v1/feedback"
MAX_BODY_BYTES = 4096
Rating = Literal["up", "down"]
Who = Callable[[Request], Awaitable[Principal]]


class Feedback(BaseModel):
    """A rating of an answer."""

    model_config = ConfigDict(extra="forbid")

    request_id: str = Field(min_length=1, max_length=128, description="`x-request-id` of the answer")
    rating: Rating


_BODY = {
    "schema": {"$ref": "#/components/schemas/Feedback"},
    "examples": {"down": {"value": {"request_id": "3f1c0c2a9d8e4b7f60a1b2c3", "rating": "down"}}},
}


def add_feedback(app: FastAPI, who: Who, observer: Observer | None) -> None:
    """Adds the route. `observer` None answers 503: ratings need the store."""

    async def rate(request: Request) -> Feedback:
        """Thumb up or down for an answer of yours, by its `x-request-id`, once and within a day. It is counted by the
        rollout that was comparing two versions when you asked; without one it is a 404 `request_not_found`."""
        principal = await who(request)
        require(principal, Scope.INFERENCE)
        request_id, rating = await _checked(request)
        if observer is None:
            raise Unavailable("ratings need the store, and this gateway has none", code=ErrorCode.STORE_UNAVAILABLE)
        if not await observer.rate(principal.tenant.tenant_id, request_id, rating == "up"):
            raise NotFound(
                f"no answer {request_id!r} of yours waits for a rating: it was rated, is older than a day, or no "
                "rollout was running",
                code=ErrorCode.REQUEST_NOT_FOUND,
                param="request_id",
            )
        return Feedback(request_id=request_id, rating=rating)

    app.add_api_route(
        FEEDBACK,
        rate,
        methods=["POST"],
        tags=["OpenAI API"],
        summary="Rate an answer",
        response_model=Feedback,
        responses={status: openapi.ERRORS[status] for status in (400, 401, 403, 404, 413, 503)},
        # Described, not read by FastAPI: a wrong body is refused in the same words as on the hot routes.
        openapi_extra={"requestBody": {"required": True, "content": {"application/json": _BODY}}},
    )


async def _checked(request: Request) -> tuple[str, Rating]:
    """Request id and rating of the body. Raises BadRequest, BodyTooLarge."""
    raw = b""
    async for part in request.stream():
        raw += part
        if len(raw) > MAX_BODY_BYTES:
            raise BodyTooLarge(f"a rating takes at most {MAX_BODY_BYTES} bytes")
    body = parse_object(raw)
    request_id, rating = body.get("request_id"), body.get("rating")
    if not isinstance(request_id, str) or not 0 < len(request_id) <= 128:
        raise BadRequest("'request_id' is required: the x-request-id of an answer", param="request_id")
    if rating != "up" and rating != "down":
        raise BadRequest("'rating' must be 'up' or 'down'", param="rating")
    if strangers := sorted(set(body) - {"request_id", "rating"}):
        raise BadRequest(f"{strangers[0]!r} is no field of a rating", param=strangers[0])
    return request_id, "up" if rating == "up" else "down"
