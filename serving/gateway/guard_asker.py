"""The gateway's own questions to a guard model: a call like any other, routed to the model's pool and accounted for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import orjson

from serving.core.errors import ClientGone, ServingError, UpstreamError
from serving.core.ports import Clock
from serving.core.state import Tier
from serving.core.tenancy import ANY, Principal, Tenant
from serving.gateway.accounting import Accounts, Outcome
from serving.gateway.dispatch import Dispatcher
from serving.gateway.http_errors import Headers
from serving.gateway.own_calls import run_own
from serving.gateway.request import CallBuilder, Endpoint

ASKER = Principal(Tenant("guardrails", models=(ANY,), adapters=(ANY,), tiers=tuple(Tier)), key_id="guardrails")
"""Whose the usage of these calls is: no tenant pays for them."""
PATH = "guardrails"
MAX_OUTPUT_TOKENS = 32


class GuardAsker:
    """Asks `model` whether a text is safe."""

    def __init__(
        self,
        model: str,
        builder: CallBuilder,
        dispatcher: Dispatcher,
        accounts: Accounts,
        clock: Clock,
        new_id: Callable[[], str],
    ) -> None:
        self._model = model
        self._builder = builder
        self._dispatcher = dispatcher
        self._accounts = accounts
        self._clock = clock
        self._new_id = new_id

    async def __call__(self, text: str) -> str:
        """What the model says of the text. Raises ServingError."""
        body = {
            "model": self._model,
            "messages": [{"role": "user", "content": text}],
            "max_tokens": MAX_OUTPUT_TOKENS,
            "temperature": 0.0,
        }
        asked = self._builder.asked(body, ASKER)
        event_id = self._new_id()
        # A cache of its own for each question: a prefix that one tenant asked about must not be quicker for another.
        tenant = replace(ASKER.tenant, sharing_group=event_id)
        outcome = Outcome(event_id, event_id, PATH, self._clock.monotonic_s(), self._clock.now_s(), ASKER, asked)
        outcome.call = self._builder.build(Endpoint.CHAT, event_id, asked, body, tenant)
        answered = await self._answer(outcome)
        try:
            return str(orjson.loads(answered)["choices"][0]["message"]["content"])
        except (orjson.JSONDecodeError, LookupError, TypeError) as error:
            raise UpstreamError(f"{self._model} answered in no form that is known") from error

    async def _answer(self, outcome: Outcome) -> bytes:
        """The body of the model's answer, counted as any request is."""
        kept = _Kept()
        try:
            await run_own(self._dispatcher, outcome, kept)
        except ServingError as error:
            outcome.error = error
            raise
        except asyncio.CancelledError:
            outcome.error = ClientGone("the request that it was asked for has ended")
            raise
        finally:
            outcome.status = 200 if outcome.error is None else outcome.error.status
            self._accounts.close(outcome)
        return kept.body


class _Kept:
    """A Writer that keeps a complete answer."""

    is_paused = False
    is_started = False

    def __init__(self) -> None:
        self.on_pause: Callable[[bool], None] | None = None
        self.body = b""

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Not used: the call asks for no stream."""

    def write(self, data: bytes) -> None:
        """Keeps a part."""
        self.body += data

    def end(self, data: bytes = b"") -> None:
        """Keeps the last part."""
        self.body += data

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Keeps the whole."""
        self.body = body
