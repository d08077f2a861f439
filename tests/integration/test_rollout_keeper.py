"""Rollouts against a real store: killed after every single write, sources dead in every phase, two at once."""

from __future__ import annotations

import logging
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
import redis.asyncio

from serving.clock import ManualClock
from serving.control.compose import FleetSeen, Registered
from serving.control.rollout import RolloutKeeper, RolloutPorts
from serving.control.troubles import Troubles
from serving.core.canary import Kind, Observation
from serving.core.errors import NotFound, StaleEpoch, Unavailable
from serving.core.policies.rollout import Judgement, Phase, Rollout, RolloutPlan, RolloutRecord, replay
from serving.core.sequential import Verdict
from serving.core.split import Split
from serving.core.state import Pool, Replica, ReplicaState, Task
from serving.store import wanted_pools
from serving.store.connection import connect
from serving.store.leases import Lease, LeaseLost
from serving.store.replicas import ReplicaReport
from serving.store.rollouts import RolloutRuns, Rollouts
from serving.store.server import StoreServer

POOLS = {
    name: Pool(name, "m", version, Task.GENERATE, "cpu", 0.04, 2048, "e", "h", ())
    for name, version in (("old", "1"), ("new", "2"))
}
PLAN = RolloutPlan(steps=(0.05, 1.0), min_step_s=10.0, min_pairs=0, pools=("new",))
WRITES = ("hset", "eval", "xadd")


class Killed(BaseException):
    """The control plane's process ended here."""


@dataclass
class Mortal:
    """A store's client whose process is killed right after write number `left`."""

    client: redis.asyncio.Redis
    left: int = 10**9
    num_writes: int = 0

    def __getattr__(self, name: str) -> Any:
        inner = getattr(self.client, name)
        if name not in WRITES:
            return inner

        async def write(*args: Any, **kwargs: Any) -> Any:
            answer = await inner(*args, **kwargs)
            self.count()
            return answer

        return write

    def count(self) -> None:
        self.num_writes += 1
        if self.num_writes == self.left:
            raise Killed


@dataclass
class World:
    """Registry, judge and fleet beside a real store; what they heard, and whether they answer."""

    client: redis.asyncio.Redis
    clock: ManualClock = field(default_factory=ManualClock)
    champion: str = "1"
    set_to: list[str] = field(default_factory=list)
    judgement: Judgement = field(default_factory=lambda: Judgement(Verdict.PASS, is_approved=True))
    mlflow_is_dead: bool = False
    book_is_locked: bool = False
    mortal: Mortal | None = None
    records: list[RolloutRecord] = field(default_factory=list)

    def judge(self, model: str, version: str) -> Judgement:
        if self.mlflow_is_dead:
            raise Unavailable("MLflow does not answer")
        return self.judgement

    async def appoint(self, model: str, version: str, why: str) -> None:
        if self.book_is_locked:
            raise Unavailable("the release book cannot be written")
        if version != self.champion:
            self.champion = version
            self.set_to.append(version)

    async def fleet(self) -> FleetSeen:
        is_new_up = (await wanted_pools.asked(self.client)).get("new", False)
        names = ("old", "new") if is_new_up else ("old",)
        reports = tuple(
            ReplicaReport(name, Replica(f"{name}-0", "http://x", ReplicaState.READY), None, self.clock.now_s())
            for name in names
        )
        return FleetSeen(tuple(POOLS[name] for name in names), reports)

    def keeper(self, client: Any = None, *, ttl_s: float = 60.0) -> RolloutKeeper:
        client = client or self.client
        lease = Lease(client, "control", ttl_s)
        ports = RolloutPorts(self, self, self.records.append)
        return RolloutKeeper(client, lease, ports, self.clock, Troubles(logging.getLogger("test")), 5.0)

    async def rollout(self) -> Rollout:
        return (await Rollouts(self.client).all())["m"]

    async def begin(self, plan: RolloutPlan = PLAN) -> None:
        now_s = self.clock.now_s()
        await Rollouts(self.client).begin(Rollout("r1", "m", "1", "2", plan, now_s, now_s))

    async def round(self, keeper: RolloutKeeper) -> dict[str, Split] | None:
        """A round, with all that it set off in the background, and time passing."""
        registered = Registered({"m": self.champion}, {"m": ("1", "2")})
        splits = await keeper.step(await self.fleet(), registered)
        await keeper.settled()
        self.clock.advance(4.0)
        return None if splits is None else dict(splits)

    async def until(self, keeper: RolloutKeeper, is_there: Callable[[Rollout], bool], rounds: int = 60) -> Rollout:
        for _ in range(rounds):
            await self.round(keeper)
            if is_there(await self.rollout()):
                return await self.rollout()
        raise AssertionError(f"it stands at {await self.rollout()}")


@pytest.fixture
async def client(server: StoreServer) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest.fixture
async def world(client: redis.asyncio.Redis) -> World:
    return World(client)


async def test_a_rollout_ends_with_the_candidate_as_champion_and_its_decisions_replay(world: World) -> None:
    await world.begin()
    keeper = world.keeper()
    over = await world.until(keeper, lambda r: r.phase.is_over)
    assert (over.phase, world.champion, world.set_to) == (Phase.PROMOTED, "2", ["2"])
    assert await wanted_pools.asked(world.client) == {"new": True}
    assert [record.decision.phase for record in world.records] == [
        *(Phase.STEP, Phase.STEP, Phase.PROMOTING, Phase.PROMOTED)
    ]
    assert all(replay(record) == record.decision for record in world.records)
    assert await world.round(keeper) == {}
    await keeper.stop()


async def story(world: World, client: Any, keeper: RolloutKeeper | None) -> RolloutKeeper:
    """A recorded rollout to its end: promoted, then taken back to the version before."""
    keeper = keeper or world.keeper(client)
    await world.until(keeper, lambda r: r.phase.is_over)
    if (await world.rollout()).phase is Phase.PROMOTED:
        await Rollouts(world.client).edit("m", lambda r: replace(r, is_taken_back=True))
        await world.until(keeper, lambda r: r.phase is Phase.ROLLED_BACK)
    return keeper


async def test_killed_after_any_write_it_ends_in_the_same_state(world: World) -> None:
    await world.begin()
    mortal = Mortal(world.client)
    await (await story(world, mortal, None)).stop()
    expected = (await world.rollout(), await wanted_pools.asked(world.client), world.champion, world.set_to)
    assert (expected[0].phase, expected[2], mortal.num_writes > 15) == (Phase.ROLLED_BACK, "1", True)
    for number in range(1, mortal.num_writes + 1):
        await world.client.flushall()
        again = World(world.client)
        await again.begin()
        dying = Mortal(world.client, left=number)
        first = again.keeper(dying)
        with pytest.raises(Killed):
            await story(again, dying, first)
            await first.stop()
        await first.abandon()
        await world.client.delete("workbench:lease:control")  # its time ran out
        await (await story(again, world.client, None)).stop()
        found = (await again.rollout(), await wanted_pools.asked(world.client), again.champion, again.set_to)
        assert replace(found[0], started_at_s=0, entered_at_s=0) == replace(
            expected[0], started_at_s=0, entered_at_s=0
        ), number
        assert found[1:] == expected[1:], number


@pytest.mark.parametrize("phase", [Phase.DEPLOYING, Phase.STEP, Phase.PROMOTING, Phase.ROLLING_BACK])
async def test_with_mlflow_dead_the_split_stands_and_it_goes_on_after(world: World, phase: Phase) -> None:
    await world.begin()
    world.book_is_locked = phase is Phase.PROMOTING
    keeper = world.keeper()
    if phase is Phase.ROLLING_BACK:
        await world.until(keeper, lambda r: r.phase is Phase.STEP)
        await Rollouts(world.client).edit("m", lambda r: replace(r, is_taken_back=True))
    elif phase is not Phase.DEPLOYING:
        await world.until(keeper, lambda r: r.phase is phase)
    world.mlflow_is_dead = True
    for _ in range(8):
        splits = await world.round(keeper)
        here = await world.rollout()
        assert splits == ({} if here.split is None else {"m": here.split})
        assert here.phase is not Phase.PROMOTED and here.share_frac in (0.0, 0.05, 1.0)
    world.mlflow_is_dead = world.book_is_locked = False
    over = await world.until(keeper, lambda r: r.phase.is_over)
    assert over.phase is (Phase.ROLLED_BACK if phase is Phase.ROLLING_BACK else Phase.PROMOTED)
    assert world.set_to == ([] if phase is Phase.ROLLING_BACK else ["2"])
    await keeper.stop()


@pytest.mark.parametrize("phase", [Phase.DEPLOYING, Phase.STEP, Phase.PROMOTING])
async def test_with_the_store_dead_nothing_is_said_and_it_goes_on_after(
    world: World, server: StoreServer, phase: Phase
) -> None:
    await world.begin()
    world.book_is_locked = phase is Phase.PROMOTING
    keeper = world.keeper()
    if phase is not Phase.DEPLOYING:
        await world.until(keeper, lambda r: r.phase is phase)
    here, fleet = await world.rollout(), await world.fleet()
    await server.stop()
    for _ in range(3):
        assert await keeper.step(fleet, Registered({"m": world.champion}, {"m": ("1", "2")})) is None
        await keeper.settled()
    await server.start()
    assert await world.rollout() == here
    world.book_is_locked = False
    over = await world.until(keeper, lambda r: r.phase.is_over)
    assert (over.phase, world.set_to) == (Phase.PROMOTED, ["2"])
    await keeper.stop()


async def test_an_alarm_takes_the_candidate_back_in_the_round_that_hears_of_it(world: World) -> None:
    await world.begin()
    keeper = world.keeper()
    await world.until(keeper, lambda r: r.phase is Phase.STEP)
    seen = [
        Observation(Kind.REQUEST, version, f"{version}-{number}", 10.0 * number, failed=version == "2")
        for number in range(20)
        for version in ("1", "2")
    ]
    await Rollouts(world.client).observe("r1", seen)
    splits = await world.round(keeper)
    assert splits is not None and splits["m"].share_frac == 0.0
    assert (await world.rollout()).reason == "worse online: errors"
    over = await world.until(keeper, lambda r: r.phase.is_over)
    assert (over.phase, world.set_to) == (Phase.ROLLED_BACK, [])
    assert await wanted_pools.asked(world.client) == {"new": False}
    await keeper.stop()


async def test_of_two_control_planes_one_moves_and_a_lost_lease_writes_nothing(world: World) -> None:
    await world.begin()
    one, other = world.keeper(), world.keeper()
    first, second = await world.round(one), await world.round(other)
    assert first == second and (await world.rollout()).revision <= 2
    lease = Lease(world.client, "other", 60.0)
    assert await lease.hold()
    await world.client.delete(lease.key)
    here = await world.rollout()
    with pytest.raises(LeaseLost):
        await Rollouts(world.client).save(replace(here, revision=here.revision + 1), lease)
    assert await lease.hold()
    with pytest.raises(StaleEpoch, match="changed meanwhile"):
        await Rollouts(world.client).save(replace(here, revision=here.revision), lease)
    assert await world.rollout() == here
    for keeper in (one, other):
        await keeper.stop()


async def test_a_model_has_one_rollout_at_a_time(world: World) -> None:
    with pytest.raises(NotFound, match="canary start"):
        await Rollouts(world.client).edit("m", lambda r: r)
    await world.begin()
    with pytest.raises(RolloutRuns, match="runs already"):
        await world.begin()
