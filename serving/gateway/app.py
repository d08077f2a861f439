"""The gateway as one application: exchanges on hot routes, everything else as ASGI through FastAPI.

`Gateway(settings)` makes a worker's whole state (fleet, connections, metrics); `HotProtocol` serves it.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import HTMLResponse, Response
from starlette.exceptions import HTTPException
from starlette.types import Message, Receive, Scope, Send

from serving.clock import SystemClock
from serving.core.errors import ErrorCode, Forbidden, NotFound, ServingError, Unavailable
from serving.core.ports import Clock
from serving.core.state import Model
from serving.core.tenancy import AuthMode, Principal
from serving.gateway import cors, docs_page, openapi
from serving.gateway.feedback import add_feedback
from serving.gateway.http_errors import error_response
from serving.gateway.openai_routes import HOT_ROUTES, sane_request_id
from serving.gateway.worker_parts import WorkerParts
from serving.settings import GatewaySettings, is_loopback
from serving.telemetry import metrics as metrics_module
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

_WHO = "principal"  # of the request, once it is known

DESCRIPTION = (
    "OpenAI-compatible inference. Each request goes to the replica that has room and serves it cheapest within its "
    "latency objective; `x-served-by` says which pool, version and routing table that was."
)


class Gateway:
    """One worker: an ASGI application and the state behind it. `answer` answers an exchange on a hot route."""

    def __init__(self, settings: GatewaySettings, *, clock: Clock | None = None, seed: int | None = None) -> None:
        """`clock` and `seed` are for tests; a live worker draws its own seed."""
        self.settings = settings
        self.clock = clock or SystemClock()
        self.metrics = GatewayMetrics()
        self._parts = WorkerParts(settings, self.clock, self.metrics, secrets.randbits(64) if seed is None else seed)
        self.fleet = self._parts.fleet
        self.hot_paths = {path.encode(): path for path in HOT_ROUTES}
        self.max_body_bytes = settings.max_body_bytes
        self.answer = self._parts.hot.answer
        self.cors_headers = cors.cors_headers(settings.cors_origins)
        self.described = self._fastapi()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """ASGI, for all but the hot routes; every answer has its x-request-id, and x-ratelimit-* if it is to a key."""
        if scope["type"] != "http":
            await self.described(scope, receive, send)
            return
        given = next((value for name, value in scope["headers"] if name == b"x-request-id"), None)
        request_id = sane_request_id(given).encode()
        state = scope.setdefault("state", {})

        async def with_id(message: Message) -> None:
            if message["type"] == "http.response.start":
                limits = [] if _WHO not in state else self._parts.limits.last_seen(state[_WHO])
                message = {**message, "headers": [*message["headers"], (b"x-request-id", request_id), *limits]}
            await send(message)

        await self.described(scope, receive, with_id)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Everything in the background of serving; servers enter it by ASGI's lifespan."""
        async with self._parts.running():
            yield

    async def refresh_table(self) -> bool:
        """Looks for a newer routing table now, not only at the next poll; True when one was taken up."""
        return await self._parts.feed.refresh_table()

    def _fastapi(self) -> FastAPI:
        @asynccontextmanager
        async def lifespan(_: FastAPI) -> AsyncIterator[None]:
            async with self.running():
                yield

        app = FastAPI(
            title="LLM workbench gateway",
            description=DESCRIPTION,
            docs_url=None,
            redoc_url=None,
            redirect_slashes=False,
            lifespan=lifespan,
        )
        cors.allow(app, self.settings.cors_origins)
        app.include_router(openapi.router)
        errors = {status: openapi.ERRORS[status] for status in (404, 503)}
        app.add_api_route("/v1/models", self._list_models, tags=["OpenAI API"], summary="List the models")
        app.add_api_route(
            "/v1/models/{reference}",
            self._show_model,
            tags=["OpenAI API"],
            summary="One model",
            responses={404: errors[404]},
        )
        add_feedback(app, self._who, self._parts.observer)
        app.add_api_route(
            "/health", self._health, summary="Whether this worker can serve", responses={503: errors[503]}
        )
        app.add_api_route("/metrics", self._metrics_page, summary="Metrics for Prometheus", response_class=Response)
        app.add_api_route("/docs", self._docs, include_in_schema=False)
        app.add_exception_handler(ServingError, _answer_error)
        app.add_exception_handler(HTTPException, _answer_http_exception)
        return app

    async def _who(self, request: Request) -> Principal:
        principal = await self._parts.identity.authenticator.authenticate(_authorization(request))
        request.scope["state"][_WHO] = principal
        return principal

    async def _list_models(self, request: Request) -> dict[str, Any]:
        """The models that you may use, with their versions; `champion` answers when no version is asked for."""
        principal = await self._who(request)
        models = [model for model in self.fleet.models if principal.may_use(model.name)]
        return {"object": "list", "data": [self._model_object(model, principal) for model in models]}

    async def _show_model(self, request: Request, reference: str) -> dict[str, Any]:
        """A model by `name[@version][+adapter]`."""
        principal = await self._who(request)
        name, version, _ = self._parts.builder.resolve(reference, principal)
        return {**self._model_object(self.fleet.model(name), principal, version), "id": reference}

    def _model_object(self, model: Model, principal: Principal, version: str | None = None) -> dict[str, Any]:
        table = self.fleet.table
        pools = [pool for pool in table.pools if pool.model == model.name] if table is not None else []
        return {
            "id": model.name,
            "object": "model",
            "created": 0 if table is None else int(table.published_at_s),
            "owned_by": "workbench",
            "task": model.task,
            "champion": model.champion,
            "versions": list(model.versions),
            "adapters": list(self._parts.builder.adapters(model.name, version, principal)),
            "max_model_len": max((pool.max_model_len for pool in pools), default=None),
            "pools": [pool.pool_id for pool in pools],
        }

    async def _health(self) -> dict[str, Any]:
        """200 when this worker has a routing table and follows it; it does not say that replicas are ready."""
        table = self.fleet.table
        if table is None:
            raise Unavailable("no routing table yet: the control plane has published none", retry_after_s=1.0)
        if not self._parts.feed.is_running:
            raise Unavailable("this worker no longer follows its fleet; its log says why", retry_after_s=5.0)
        age_s = max(self.clock.now_s() - table.published_at_s, 0.0)
        return {"status": "ok", "table_epoch": table.epoch, "table_age_s": round(age_s, 3), "models": len(table.models)}

    async def _metrics_page(self, request: Request) -> Response:
        """Prometheus text of all workers of this port. Where keys are required, from elsewhere than this machine with
        one for admin calls: labels name every model.
        """
        is_near = request.client is not None and is_loopback(request.client.host)
        if self.settings.auth_mode is AuthMode.REQUIRED and not is_near and not (await self._who(request)).is_admin:
            raise Forbidden("metrics are for keys with the scope admin")
        return Response(self.metrics.page(), media_type=metrics_module.CONTENT_TYPE)

    async def _docs(self, request: Request) -> HTMLResponse:
        return HTMLResponse(docs_page.render(self.described.openapi(), str(request.base_url).rstrip("/")))


def _authorization(request: Request) -> bytes | None:
    value = request.headers.get("authorization")
    return None if value is None else value.encode("latin-1")


async def _answer_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ServingError)
    status, headers, body = error_response(error)
    return Response(body, status, {name.decode(): value.decode() for name, value in headers})


async def _answer_http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    if error.status_code == 404:
        missing = NotFound(
            f"no route {request.method} {request.url.path}; /docs lists them", code=ErrorCode.ROUTE_NOT_FOUND
        )
        return await _answer_error(request, missing)
    if error.status_code == 405:
        wrong = NotFound(f"{request.url.path} does not take {request.method}", code=ErrorCode.METHOD_NOT_ALLOWED)
        wrong.status = 405
        answer = await _answer_error(request, wrong)
        answer.headers.update(error.headers or {})  # Allow
        return answer
    other = ServingError(str(error.detail))
    other.status = error.status_code
    return await _answer_error(request, other)
