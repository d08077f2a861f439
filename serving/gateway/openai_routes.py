"""The hot routes: `POST /v1/…` below ASGI. `openapi.py` describes the same routes to clients.

who asks ── may it ── the body's size ── call ── replica ── relay ── account
"""

from __future__ import annotations

import asyncio
import logging
import random
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import orjson

from serving.core.errors import BadRequest, ClientGone, DeadlineExceeded, ErrorCode, ServingError, Unavailable
from serving.core.policies.limits import check_cost_cap
from serving.core.ports import Clock
from serving.core.tenancy import Principal, Scope, require
from serving.core.values import value
from serving.gateway.accounting import Accounts, Outcome
from serving.gateway.auth import Authenticator
from serving.gateway.body import parse_object
from serving.gateway.cors import CorsHeaders
from serving.gateway.dispatch import TARGET_HEADER, Dispatched, Dispatcher
from serving.gateway.exchange import Exchange
from serving.gateway.generate import GenerateWriter, to_openai
from serving.gateway.guardrails.moderations import moderate
from serving.gateway.guardrails.screen import Guardrails
from serving.gateway.http_errors import Headers, error_event
from serving.gateway.idempotency import Replays
from serving.gateway.keep_alive import KeepAlive
from serving.gateway.limit_errors import LargerThanLimit, LimitReached
from serving.gateway.limits import Hold, LimitKeeper
from serving.gateway.recorder import Client
from serving.gateway.relay import Writer
from serving.gateway.request import Asked, Call, CallBuilder, Endpoint
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

GENERATE = "/v1/generate"
MODERATIONS = "/v1/moderations"
HOT_ROUTES: Sequence[str] = (*(endpoint.value for endpoint in Endpoint), GENERATE, MODERATIONS)
_ENDPOINTS: Mapping[str, Endpoint] = {endpoint.value: endpoint for endpoint in Endpoint}

MAX_TIMEOUT_MS = 86_400_000
_TARGET_HEADER = TARGET_HEADER.encode()
_SANE_REQUEST_ID = re.compile(rb"[A-Za-z0-9._:@/+=-]{1,128}")
_TRACEPARENT = re.compile(rb"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}(-.{0,256})?")
_draw_id = random.Random().getrandbits  # as unique as the system's own numbers, and cheaper


@dataclass(frozen=True, slots=True)
class HotParts:
    """What a request passes through, in its order, and how long it may stay."""

    authenticator: Authenticator
    builder: CallBuilder
    replays: Replays | None
    guardrails: Guardrails
    limits: LimitKeeper
    dispatcher: Dispatcher
    accounts: Accounts
    metrics: GatewayMetrics
    clock: Clock
    keep_alive_s: float
    cors_headers: CorsHeaders


@value
class _Visit:
    """A request that was let in, and what is to be told with its answer."""

    endpoint: Endpoint
    asked: Asked
    body: dict[str, Any]
    principal: Principal
    timeout_s: float | None
    outcome: Outcome
    headers: Headers
    target_replica: str | None = None
    session: bytes | None = None
    traceparent: bytes | None = None


class HotRoutes:
    """Answers one request after another."""

    def __init__(self, parts: HotParts) -> None:
        self._parts = parts

    async def answer(self, exchange: Exchange) -> None:
        """Serves a request to one of `HOT_ROUTES`; whatever happens, it is answered and counted once."""
        parts = self._parts
        given = exchange.header(b"x-request-id")
        request_id = new_id() if given is None else sane_request_id(given)
        outcome = Outcome(request_id, new_id(), exchange.path, parts.clock.monotonic_s(), parts.clock.now_s())
        headers: Headers = [(b"x-request-id", request_id.encode())]
        origin = exchange.header(b"origin")
        if origin is not None:
            headers += parts.cors_headers(origin)
        parts.metrics.num_in_flight += 1
        try:
            await self._serve(exchange, outcome, headers)
        except asyncio.CancelledError:
            outcome.error = _why_cancelled(exchange)
            if not exchange.gone and not exchange.expired:  # the drain at shutdown ran out of time
                raise
        except ServingError as error:
            outcome.error = error
        except Exception as error:  # noqa: BLE001 - the last resort; logged and told without what it quotes
            logger.critical("request %s failed inside the gateway: %s", request_id, _where(error))
            outcome.error = ServingError(f"the gateway failed; its log has the details under {request_id}")
        finally:
            if outcome.error is not None and not exchange.response_complete and not exchange.gone:
                _tell(exchange, outcome.error, self._with_limits(headers, outcome))
            if exchange.gone and not outcome.kept:
                outcome.error = _why_cancelled(exchange)
            parts.metrics.num_in_flight -= 1
            outcome.status = exchange.status or outcome.status or (outcome.error.status if outcome.error else 0)
            parts.accounts.close(outcome)

    async def _serve(self, exchange: Exchange, outcome: Outcome, headers: Headers) -> None:
        if exchange.gone:
            raise ClientGone("the client left while sending its request")
        authorization, authenticator = exchange.header(b"authorization"), self._parts.authenticator
        principal = authenticator.find(authorization) or await authenticator.authenticate(authorization)
        outcome.principal = principal
        if exchange.refusal is not None:
            raise exchange.refusal
        timeout_s = None if exchange.header(b"x-request-timeout-ms") is None else _deadline(exchange)
        body = parse_object(exchange.body)
        if exchange.path == MODERATIONS:
            await self._moderate(exchange, body, principal, headers)
            return
        path = exchange.path
        if path == GENERATE:
            body = to_openai(body)
            path = Endpoint.CHAT if "messages" in body else Endpoint.COMPLETIONS
        asked = outcome.asked = self._parts.builder.asked(body, principal)
        key = exchange.header(b"idempotency-key")
        target = None if exchange.header(_TARGET_HEADER) is None else _target(exchange, principal)
        session = exchange.header(b"x-session-id")
        trace = None if exchange.header(b"traceparent") is None else _traceparent(exchange)
        visit = _Visit(_ENDPOINTS[path], asked, body, principal, timeout_s, outcome, headers, target, session, trace)
        if key is None:
            await self._run(visit, exchange)
        else:
            await self._run_once(visit, key, exchange)

    async def _run_once(self, visit: _Visit, key: bytes, exchange: Exchange) -> None:
        """Runs the request unless it was run under its key; then sends that answer."""
        replays, tenant = self._parts.replays, visit.principal.tenant
        if replays is None:
            raise Unavailable(
                "an Idempotency-Key needs the store, and this gateway has none", code=ErrorCode.STORE_UNAVAILABLE
            )
        digest = sha256(exchange.body + (visit.target_replica or "").encode()).digest()
        told = self._with_limits(visit.headers, visit.outcome)
        try:
            owner = await replays.begin(tenant, key, digest, exchange.path, exchange, told)
        except (ServingError, asyncio.CancelledError):
            visit.outcome.replayed = exchange.is_started  # it broke off, or its client left, in the middle of a replay
            raise
        if owner is None:
            visit.outcome.replayed = True
            return
        recorder = owner.recorder(exchange)
        exchange.on_lost = recorder.detach
        try:
            await self._run(visit, recorder)
            visit.outcome.kept = True
        except ServingError as error:
            visit.outcome.error = error
            # What no engine has begun to answer is nobody's answer: the key is free, whatever comments were sent.
            begun = visit.outcome.answer is not None
            _tell(recorder if begun else exchange, error, self._with_limits(visit.headers, visit.outcome))
        except asyncio.CancelledError:
            if not exchange.expired or not recorder.is_started or visit.outcome.answer is None:
                raise
            visit.outcome.error = _why_cancelled(exchange)
            _tell(recorder, visit.outcome.error, visit.headers)
        finally:
            visit.outcome.status = recorder.status
            owner.close()

    async def _moderate(self, exchange: Exchange, body: dict[str, Any], principal: Principal, headers: Headers) -> None:
        """Judges texts: a request against the limits, of no tokens."""
        require(principal, Scope.INFERENCE)
        hold = await self._hold(principal, 0, None, headers)
        try:
            answer = await moderate(self._parts.guardrails, principal.tenant, body)
        finally:
            hold.settle(0, None)
        exchange.whole(200, [(b"content-type", b"application/json"), *headers], orjson.dumps(answer))

    def _with_limits(self, headers: Headers, outcome: Outcome) -> Headers:
        """The headers with x-ratelimit-*, as last heard where the request has reserved nothing."""
        if outcome.principal is None or any(name.startswith(b"x-ratelimit-") for name, _ in headers):
            return headers
        return [*headers, *self._parts.limits.last_seen(outcome.principal)]

    async def _run(self, visit: _Visit, client: Writer) -> None:
        """Has a replica answer."""
        parts, outcome, tenant = self._parts, visit.outcome, visit.principal.tenant
        if parts.guardrails.check(tenant, visit.body) is None:
            await parts.guardrails.check_slowly(tenant, visit.body)
        call = parts.builder.build(
            visit.endpoint,
            outcome.event_id,
            visit.asked,
            visit.body,
            tenant,
            visit.timeout_s,
            visit.target_replica,
            visit.session,
            visit.traceparent,
        )
        outcome.call = call
        usd = self._most_usd(call, visit.principal) if visit.principal.has_bounds_on_cost else None
        outcome.hold = await self._hold(
            visit.principal, call.view.num_tokens, usd, visit.headers, is_stream=call.stream
        )
        writer: Writer = client
        if outcome.path == GENERATE:
            writer = GenerateWriter(client, outcome.request_id, lambda: outcome.summary(parts.accounts.usd(outcome)))
        if call.stream:
            dispatched = await self._dispatch_stream(call, visit, writer)
        else:
            dispatched = await parts.dispatcher.dispatch(call, outcome.on_choice)
        try:
            outcome.answer = dispatched.answer
            assert dispatched.answer is not None  # dispatch() returns begun answers only
            await dispatched.answer.relay(writer, [*visit.headers, *outcome.served_by])
        finally:
            dispatched.close()

    def _most_usd(self, call: Call, principal: Principal) -> float | None:
        """The most that the request may cost. Raises ExceedsLimit when that is over what one request may."""
        parts = self._parts
        usd = parts.accounts.most_usd(call, parts.dispatcher.pools_of(call))
        check_cost_cap(principal, usd)
        return usd

    async def _hold(
        self, principal: Principal, num_tokens: int, usd: float | None, headers: Headers, *, is_stream: bool = False
    ) -> Hold:
        """A reservation; `headers` get the x-ratelimit-* of it, or of the refusal."""
        try:
            hold = await self._parts.limits.reserve(principal, num_tokens, usd, is_stream=is_stream)
        except (LargerThanLimit, LimitReached) as error:
            headers.extend(error.headers)
            raise
        headers.extend(hold.headers)
        return hold

    async def _dispatch_stream(self, call: Call, visit: _Visit, writer: Writer) -> Dispatched:
        """A replica that has begun; until then a stream's connection is kept alive."""
        outcome = visit.outcome
        keep_alive = KeepAlive(writer, lambda: [*visit.headers, *outcome.served_by], self._parts.keep_alive_s)
        try:
            return await self._parts.dispatcher.dispatch(call, outcome.on_choice)
        finally:
            keep_alive.stop()


def _deadline(exchange: Exchange) -> float | None:
    """Gives the exchange the time that its client gives it; how long that is, if it does."""
    given = exchange.header(b"x-request-timeout-ms")
    if given is None:
        return None
    if not given.isdigit() or not 0 < int(given[:20]) <= MAX_TIMEOUT_MS:
        raise BadRequest(f"X-Request-Timeout-Ms must be a whole number from 1 to {MAX_TIMEOUT_MS}")
    timeout_s = int(given) / 1000
    exchange.expire_in(timeout_s)
    return timeout_s


def _target(exchange: Exchange, principal: Principal) -> str:
    """The replica that is to serve the request, by an admin's word. Raises Forbidden, BadRequest."""
    require(principal, Scope.ADMIN)
    target = exchange.header(_TARGET_HEADER) or b""
    if not _SANE_REQUEST_ID.fullmatch(target):
        raise BadRequest(f"{TARGET_HEADER} must be the id of a replica", param=TARGET_HEADER)
    return target.decode("ascii")


def _traceparent(exchange: Exchange) -> bytes | None:
    """The client's place in its trace; one that is malformed is as none (W3C Trace Context, 3.2.2)."""
    given = exchange.header(b"traceparent")
    return given if given is not None and _TRACEPARENT.fullmatch(given) else None


def _why_cancelled(exchange: Exchange) -> ServingError:
    if exchange.gone:
        return ClientGone("the client left before the answer was complete")
    if exchange.expired:
        return DeadlineExceeded("the time in X-Request-Timeout-Ms has passed")
    return ServingError("the gateway was stopped")


def _tell(client: Client, error: ServingError, headers: Headers) -> None:
    """Tells the client of a failure: as the whole response, or as the last event of a stream that had begun."""
    if client.is_started:
        client.end(error_event(error))
    else:
        client.fail(error, headers)


def _where(error: BaseException) -> str:
    """What was raised and where; never its message, which may quote a request's content."""
    frames = traceback.extract_tb(error.__traceback__)
    places = " < ".join(f"{frame.filename}:{frame.lineno} {frame.name}" for frame in reversed(frames))
    return f"{type(error).__name__} at {places}"


def sane_request_id(given: bytes | None) -> str:
    """The client's X-Request-Id when it can be echoed safely, else a new one."""
    if given is not None and _SANE_REQUEST_ID.fullmatch(given):
        return given.decode("ascii")
    return new_id()


def new_id() -> str:
    """24 hexadecimal digits that nobody drew before."""
    return f"{_draw_id(96):024x}"
