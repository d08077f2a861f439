"""What gateways tell a running rollout: one observation a request, and which request may be rated.

Requests only add to a list in memory. A background loop sends it to the store four times a second; what the store does
not take is dropped and counted, for a rollout waits when it hears nothing, and no request waits for a rollout.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from dataclasses import replace

import redis.asyncio

from serving.core.canary import Kind, Observation
from serving.core.errors import BadRequest, ClientGone, DeadlineExceeded, NotFound, Overloaded
from serving.core.ports import Clock
from serving.gateway.accounting import Outcome
from serving.gateway.sessions import Trial
from serving.gateway.usage import Usage
from serving.store.connection import StoreUnavailable
from serving.store.rollouts import Rated, Rollouts

logger = logging.getLogger(__name__)

SEND_EVERY_S = 0.25
MAX_KEPT = 20_000
_NOT_ITS_FAULT = (ClientGone, DeadlineExceeded, BadRequest, NotFound, Overloaded)


class Observer:
    """Observations of this worker on their way to the store.

    Attributes:
        num_dropped: those that the store did not take, or that were too many.
    """

    def __init__(self, client: redis.asyncio.Redis, clock: Clock) -> None:
        self._rollouts = Rollouts(client)
        self._clock = clock
        self._kept: list[tuple[str, Observation, Rated | None]] = []
        self.num_dropped = 0

    def offer(self, outcome: Outcome, usage: Usage | None, usd: float | None) -> None:
        """Keeps what a finished request says, if a rollout drew its session. Never waits, never raises."""
        trial = None if outcome.call is None else outcome.call.trial
        if trial is None or outcome.choice is None or isinstance(outcome.error, _NOT_ITS_FAULT):
            return
        seen = observation(outcome, trial, usage, usd, self._clock.now_s())
        tenant_id = "" if outcome.principal is None else outcome.principal.tenant.tenant_id
        rated = Rated(tenant_id, outcome.request_id, trial.split.rollout_id, seen.version, seen.session)
        self.keep(trial.split.rollout_id, seen, None if seen.failed else rated)

    def keep(self, rollout_id: str, seen: Observation, rated: Rated | None = None) -> None:
        """Keeps an observation, and what a later rating of its request needs."""
        if len(self._kept) >= MAX_KEPT:
            self.num_dropped += 1
        else:
            self._kept.append((rollout_id, seen, rated))

    async def rate(self, tenant_id: str, request_id: str, thumb: bool) -> bool:
        """Counts a rating; False when that tenant has no such request to rate, or has rated it. StoreUnavailable."""
        await self.send()  # the request may have ended a moment ago, here
        rated = await self._rollouts.take_rated(tenant_id, request_id)
        if rated is None:
            return False
        seen = Observation(Kind.THUMB, rated.version, rated.session, self._clock.now_s(), thumb=thumb)
        await self._rollouts.observe(rated.rollout_id, [seen])
        return True

    async def send(self) -> None:
        """Sends what is kept. Raises StoreUnavailable; what was not taken is dropped then."""
        kept, self._kept = self._kept, []
        by_rollout: dict[str, list[Observation]] = defaultdict(list)
        for rollout_id, seen, _ in kept:
            by_rollout[rollout_id].append(seen)
        try:
            for rollout_id, observations in by_rollout.items():
                await self._rollouts.observe(rollout_id, observations)
            await self._rollouts.allow_ratings([rated for _, _, rated in kept if rated is not None])
        except StoreUnavailable:
            self.num_dropped += len(kept)
            raise

    async def run(self) -> None:
        """Sends until cancelled."""
        is_failing = False
        while True:
            await asyncio.sleep(SEND_EVERY_S)
            try:
                await self.send()
            except StoreUnavailable as error:
                if not is_failing:
                    logger.warning("%s; observations of rollouts are lost meanwhile", error.message)
                is_failing = True
            else:
                is_failing = False


def observation(outcome: Outcome, trial: Trial, usage: Usage | None, usd: float | None, now_s: float) -> Observation:
    """What a request that was sent to a replica says of its version."""
    assert outcome.choice is not None
    seen = Observation(
        Kind.REQUEST,
        outcome.choice.route.version,
        f"{trial.place.at:.17f}",
        now_s,
        trial.prompt,
        failed=outcome.error is not None,
    )
    if outcome.error is not None or outcome.answer is None:
        return seen
    latency_s = outcome.ttft_s if outcome.ttft_s is not None else now_s - outcome.started_at_s
    return replace(
        seen,
        finish_reason=outcome.answer.finish_reason,
        num_output_tokens=0 if usage is None else usage.num_output_tokens,
        latency_s=max(0.0, latency_s),
        usd=usd,
    )
