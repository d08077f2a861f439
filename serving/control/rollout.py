"""Carries rollouts out: reads where each stands, has the core decide, writes it down, and makes the world follow.

    read state ─▶ look (replicas, registry, judge, observations) ─▶ decide ─▶ write the new state, under the lease
                                                                                 └─▶ pools wanted, champion, split

There is one write that moves a rollout: its state in the store. All others say again what that state says, at every
round: a control plane that dies between any two of them leaves what the next one makes whole. The split that gateways
get is read from the state alone, so that it is right also while the registry is away.

Only the holder of the lease moves anything; who does not hold it reads the splits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import redis.asyncio

from serving.control.compose import FleetSeen, Registered
from serving.control.troubles import Troubles
from serving.core.canary import CanaryTests
from serving.core.errors import ServingError, StaleEpoch
from serving.core.policies.rollout import (
    Action,
    Judgement,
    Phase,
    Rollout,
    RolloutDecision,
    RolloutRecord,
    RolloutView,
    apply,
    awaits_approval,
    decide,
)
from serving.core.ports import Champions, Clock, Judge
from serving.core.split import Split
from serving.core.state import ReplicaState
from serving.store import wanted_pools
from serving.store.connection import StoreUnavailable
from serving.store.leases import Lease
from serving.store.rollouts import Rollouts

logger = logging.getLogger(__name__)

JUDGE_EVERY_S = 2.0


@dataclass(frozen=True, slots=True)
class RolloutPorts:
    """Whom the keeper asks and tells.

    `record` is given each decision that moves a rollout; `awaited`, once, each judgement that lacks only an approval.
    """

    judge: Judge
    champions: Champions
    record: Callable[[RolloutRecord], None]
    awaited: Callable[[Rollout, Judgement], None] = lambda rollout, judgement: None


class _Watched:
    """What is remembered of one rollout between rounds; nothing of it is lost for good with this process."""

    def __init__(self, rollout: Rollout) -> None:
        self.tests = CanaryTests(rollout.stable, rollout.candidate)
        self.observed_until = "0"
        self.judgement: Judgement | None = None
        self.waits_for: tuple[str, ...] | None = None
        self.judged_at_s = float("-inf")
        self.awaited: str | None = None
        self.judging: asyncio.Task[None] | None = None


class RolloutKeeper:
    """Moves the rollouts, a round at a time.

    Args:
        client: the store's.
        lease: under which rollouts are moved.
        ports: judge, champions, records.
        clock: times of phases.
        troubles: where a dead judge or registry is told.
        report_max_age_s: a replica that was silent for longer is not ready.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        lease: Lease,
        ports: RolloutPorts,
        clock: Clock,
        troubles: Troubles,
        report_max_age_s: float,
    ) -> None:
        self._client = client
        self._lease = lease
        self._ports = ports
        self._clock = clock
        self._troubles = troubles
        self._report_max_age_s = report_max_age_s
        self._rollouts = Rollouts(client)
        self._watched: dict[str, _Watched] = {}

    async def step(self, fleet: FleetSeen | None, registered: Registered | None) -> Mapping[str, Split] | None:
        """One round; the splits after it, by model. None when the store does not answer: they stand as they were."""
        try:
            rollouts = await self._rollouts.all()
            if await self._lease.hold():
                rollouts = {model: await self._move(one, fleet, registered) for model, one in rollouts.items()}
        except ServingError as error:
            self._troubles.begin("rollouts", f"{error.message}; splits stand as last published")
            return None
        self._troubles.over("rollouts")
        return {model: split for model, one in rollouts.items() if (split := one.split) is not None}

    async def settled(self) -> None:
        """Returns when the judge has answered what it was asked so far."""
        await asyncio.gather(*self._judging())

    async def abandon(self) -> None:
        """Ends what runs in the background, and leaves the lease to end by itself."""
        for task in self._judging():
            task.cancel()
        await asyncio.gather(*self._judging(), return_exceptions=True)

    async def stop(self) -> None:
        """Ends what runs in the background and gives the lease back."""
        await self.abandon()
        try:
            await self._lease.release()
        except StoreUnavailable as error:
            logger.warning("%s; the lease ends by itself", error.message)

    def _judging(self) -> list[asyncio.Task[None]]:
        return [watched.judging for watched in self._watched.values() if watched.judging is not None]

    async def _move(self, rollout: Rollout, fleet: FleetSeen | None, registered: Registered | None) -> Rollout:
        """The rollout after this round's decision, if there is one to make."""
        if rollout.phase is Phase.ROLLED_BACK or (rollout.phase is Phase.PROMOTED and not rollout.is_taken_back):
            self._watched.pop(rollout.rollout_id, None)
            return rollout
        watched = self._watched.setdefault(rollout.rollout_id, _Watched(rollout))
        await self._observe(rollout, watched)
        self._ask_judge(rollout, watched)
        wishes = await wanted_pools.asked(self._client) if rollout.plan.pools else {}
        view = RolloutView(
            now_s=self._clock.now_s(),
            rollout=rollout,
            num_ready=_num_ready(rollout, fleet, self._clock.now_s(), self._report_max_age_s),
            champion=None if registered is None else registered.champions.get(rollout.model),
            judgement=watched.judgement,
            signals=watched.tests.signals,
            wishes=wishes,
        )
        decision = decide(view)
        if decision.action is not Action.WAIT:
            rollout = await self._write(view, decision)
        if decision.waits_for != watched.waits_for:
            await self._rollouts.tell_waits(rollout.rollout_id, decision.waits_for)
            watched.waits_for = decision.waits_for
        await self._tell(rollout, wishes, view.champion)
        self._tell_awaited(rollout, watched)
        return rollout

    async def _write(self, view: RolloutView, decision: RolloutDecision) -> Rollout:
        after = apply(view, decision)
        try:
            await self._rollouts.save(after, self._lease)
        except StaleEpoch as error:  # somebody's word came in between, or the lease went: the next round reads it
            logger.info("%s", error.message)
            return view.rollout
        self._ports.record(RolloutRecord(view, decision))
        logger.info("rollout of %s@%s: %s (%s)", after.model, after.candidate, after.phase, after.reason)
        return after

    async def _tell(self, rollout: Rollout, wishes: Mapping[str, bool], champion: str | None) -> None:
        """Tells the stack, and the record of champions, what the rollout says, where they do not say so themselves."""
        for pool_id, run in rollout.pools_wanted.items():
            if wishes.get(pool_id) is not run:
                await wanted_pools.ask(self._client, pool_id, run)
        if rollout.champion not in (None, champion):
            await self._appoint(rollout, str(rollout.champion))

    async def _appoint(self, rollout: Rollout, version: str) -> None:
        topic = f"champion of {rollout.model}"
        try:
            await self._ports.champions.appoint(
                rollout.model, version, f"rollout {rollout.rollout_id}: {rollout.reason}"
            )
        except ServingError as error:
            self._troubles.begin(topic, f"{error.message}; {rollout.model}@{version} becomes champion later")
        else:
            self._troubles.over(topic)

    def _tell_awaited(self, rollout: Rollout, watched: _Watched) -> None:
        judgement = watched.judgement
        if judgement is not None and awaits_approval(rollout, judgement) and watched.awaited != judgement.digest:
            watched.awaited = judgement.digest
            self._ports.awaited(rollout, judgement)

    async def _observe(self, rollout: Rollout, watched: _Watched) -> None:
        watched.observed_until, seen = await self._rollouts.observed(rollout.rollout_id, watched.observed_until)
        for one in seen:
            watched.tests.add(one)

    def _ask_judge(self, rollout: Rollout, watched: _Watched) -> None:
        now_s = self._clock.monotonic_s()
        is_asking = watched.judging is not None and not watched.judging.done()
        if is_asking or now_s - watched.judged_at_s < JUDGE_EVERY_S:
            return
        watched.judged_at_s = now_s
        watched.judging = asyncio.create_task(self._judge(rollout, watched))

    async def _judge(self, rollout: Rollout, watched: _Watched) -> None:
        topic = f"judge of {rollout.model}"
        try:
            judgement = await asyncio.to_thread(self._ports.judge.judge, rollout.model, rollout.candidate)
        except ServingError as error:
            watched.judgement = None  # what cannot be asked now may have been withdrawn
            self._troubles.begin(topic, f"{error.message}; the rollout of {rollout.model} waits")
        else:
            watched.judgement = judgement
            self._troubles.over(topic)


def _num_ready(rollout: Rollout, fleet: FleetSeen | None, now_s: float, report_max_age_s: float) -> int | None:
    if fleet is None:
        return None
    version = (rollout.model, rollout.candidate)
    own = {pool.pool_id for pool in fleet.pools if (pool.model, pool.version) == version}
    return sum(
        report.pool_id in own
        and report.replica.state is ReplicaState.READY
        and now_s - max(report.updated_at_s, fleet.settled_since_s) <= report_max_age_s
        for report in fleet.reports
    )
