"""Requests mirrored to a candidate before anybody gets its answers: sampled, scored by figures, discarded.

The user's request comes first: a mirror begins when the user's answer has ended, at the lowest priority, a few at once;
when those are running it is left out. Only what a tenant with the consent `shadow` asks is mirrored. The engine's work
has a usage event of its own, whose waste is `shadow`; nobody is billed for it.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections.abc import Callable
from dataclasses import replace

import orjson

from serving.core.canary import Kind
from serving.core.errors import ServingError
from serving.core.state import Tier
from serving.core.tenancy import Consent
from serving.gateway.accounting import Accounts, Outcome
from serving.gateway.dispatch import Dispatcher
from serving.gateway.http_errors import Headers
from serving.gateway.observer import Observer, observation
from serving.gateway.own_calls import run_own
from serving.gateway.request import ENGINE_PRIORITIES, Call
from serving.gateway.sessions import Trial
from serving.gateway.usage import Usage
from serving.metering.events import Waste

logger = logging.getLogger(__name__)

MAX_RUNNING = 2
TIMEOUT_S = 60.0


class Shadow:
    """Mirrors of one worker.

    Args:
        dispatcher: puts the mirror on a replica of the candidate.
        observer: told of both ends.
        rng: draws which requests.

    Attributes:
        num_left_out: drawn, and not mirrored because others were running.
    """

    def __init__(self, dispatcher: Dispatcher, observer: Observer, rng: random.Random) -> None:
        self._dispatcher = dispatcher
        self._observer = observer
        self._rng = rng
        self._running: set[asyncio.Task[None]] = set()
        self.num_left_out = 0

    def offer(self, accounts: Accounts, outcome: Outcome, usage: Usage | None, usd: float | None) -> None:
        """Mirrors a request that has been answered, if it is drawn. Never waits, never raises."""
        trial = None if outcome.call is None else outcome.call.trial
        if trial is None or trial.split.shadow_frac <= 0.0 or outcome.error is not None or outcome.principal is None:
            return
        is_stable = outcome.choice is not None and outcome.choice.route.version == trial.split.stable
        if not is_stable or outcome.replayed or Consent.SHADOW not in outcome.principal.tenant.consents:
            return
        if self._rng.random() >= trial.split.shadow_frac:
            return
        if len(self._running) >= MAX_RUNNING:
            self.num_left_out += 1
            return
        task = asyncio.create_task(self._mirror(accounts, outcome, usage, usd, trial))
        self._running.add(task)
        task.add_done_callback(self._running.discard)

    async def stop(self) -> None:
        """Ends what runs."""
        for task in self._running:
            task.cancel()
        await asyncio.gather(*self._running, return_exceptions=True)

    async def _mirror(
        self, accounts: Accounts, user: Outcome, usage: Usage | None, usd: float | None, trial: Trial
    ) -> None:
        assert user.call is not None and user.asked is not None
        event_id = f"{user.event_id}-shadow"
        mirror = replace(
            user,
            event_id=event_id,
            asked=replace(user.asked, tier=Tier.BATCH),
            call=_mirrored(user.call, event_id, trial.split.candidate),
            hold=None,
            choice=None,
            answer=None,
            arrived_at_s=accounts.clock.monotonic_s(),
            started_at_s=accounts.clock.now_s(),
        )
        try:
            async with asyncio.timeout(TIMEOUT_S):
                await run_own(self._dispatcher, mirror, _Nobody())
        except (ServingError, TimeoutError) as error:
            mirror.error = error if isinstance(error, ServingError) else ServingError("the mirror took too long")
        finally:
            accounts.write_down(mirror, Waste.SHADOW)
        if mirror.choice is None:  # no replica took it: that says nothing of the candidate's answers
            return
        for outcome, its_usage, its_usd in ((user, usage, usd), (mirror, mirror.usage, accounts.usd(mirror))):
            seen = observation(outcome, trial, its_usage, its_usd, accounts.clock.now_s())
            # They ran at different priorities and loads: how long they took is no comparison.
            seen = replace(seen, kind=Kind.SHADOW, pair=user.event_id, latency_s=None)
            self._observer.keep(trial.split.rollout_id, seen)


def _mirrored(call: Call, request_id: str, version: str) -> Call:
    """The same call for the candidate, behind all others."""
    body = {**orjson.loads(call.body), "priority": ENGINE_PRIORITIES[Tier.BATCH]}
    view = replace(call.view, request_id=request_id, version=version, tier=Tier.BATCH, target_replica=None)
    return replace(call, view=view, body=orjson.dumps(body), trial=None, timeout_s=None)


class _Nobody:
    """A Writer that reads everything at once and keeps nothing."""

    is_paused = False
    is_started = True

    def __init__(self) -> None:
        self.on_pause: Callable[[bool], None] | None = None

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Nobody is told."""

    def write(self, data: bytes) -> None:
        """Nobody reads."""

    def end(self, data: bytes = b"") -> None:
        """Nobody reads."""

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Nobody reads."""
