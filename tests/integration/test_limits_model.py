"""Two gateway workers reserve, settle and crash at random on a real store; a list of events says what each should get.

The model has no clock: it takes the time from the store's replies, and so decides at exactly the same moment. It counts
by going through all events, where the scripts keep sums.
"""

from __future__ import annotations

import asyncio
import math
import struct
from dataclasses import dataclass, field

import pytest
from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule, run_state_machine_as_test

from serving.clock import SystemClock
from serving.core.policies.limits import LimitKind, LimitSettings, bounds_of, nano_usd, scopes_of
from serving.core.tenancy import Limits, Principal, Tenant
from serving.gateway.limits import Hold, LimitKeeper, LimitReached
from serving.store.limits import LIMITS_PREFIX
from serving.store.pipelined import OnReply, StorePipe
from serving.store.resp import Reply
from serving.store.server import StoreServer

# Short windows, so that thousands of steps see them slide; a day of two seconds; leases that run out.
SETTINGS = LimitSettings(window_s=0.3, hour_s=0.4, day_s=2.0, num_slots=20, breaker_open_s=0.1, lease_s=0.12)
NONE = Limits()
WHO = [
    Principal(Tenant("both", limits=Limits(requests_per_minute=12, tokens_per_minute=900)), "k1", limits=NONE),
    Principal(Tenant("keys", limits=Limits(tokens_per_minute=600)), "k1", limits=Limits(requests_per_minute=4)),
    Principal(Tenant("keys", limits=Limits(tokens_per_minute=600)), "k2", limits=Limits(tokens_per_day=1500)),
    Principal(Tenant("streams", limits=Limits(max_streams=3)), "k1", limits=Limits(max_streams=2)),
    Principal(Tenant("money", limits=Limits(usd_per_hour=1.0)), "k1", limits=NONE),
    Principal(Tenant("money", limits=Limits(usd_per_hour=1.0)), "k2", limits=Limits(usd_per_hour=0.6)),
]


class SpyPipe(StorePipe):
    """Keeps the replies to reservations and heartbeats, and the last settlement."""

    def __init__(self, url: str) -> None:
        super().__init__(url, timeout_s=5.0)
        self.replies: list[tuple[float, ...]] = []
        self.last_posted = b""

    def post(self, command: bytes, on_reply: OnReply) -> None:
        self.last_posted = command
        super().post(command, on_reply)

    def send(self, command: bytes) -> asyncio.Future[Reply]:
        future = super().send(command)
        future.add_done_callback(self._keep)
        return future

    def _keep(self, future: asyncio.Future[Reply]) -> None:
        reply = future.result()
        if isinstance(reply, bytes) and len(reply) % 8 == 0 and len(reply) >= 32:
            self.replies.append(struct.unpack(f"<{len(reply) // 8}d", reply))


@dataclass
class Event:
    """A request that was let through, as it counts now."""

    worker: str
    scopes: list[str]
    slot: int
    hour_slot: int
    day: int
    tokens: int
    nano: int
    is_stream: bool
    runs: bool = True
    probe_of: set[str] = field(default_factory=set)


class Model:
    """What should be counted."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.open_until_s: dict[str, float] = {}
        self.leases_s: dict[str, float] = {}
        self.last_beat_s: float | None = None

    def used(self, scope: str, now_s: float) -> tuple[int, int, int, int, int]:
        slot, hour_slot = math.floor(now_s / SETTINGS.slot_s), math.floor(now_s / SETTINGS.hour_slot_s)
        mine = [event for event in self.events if scope in event.scopes]
        minute = [event for event in mine if event.slot >= slot - SETTINGS.num_slots]
        hour = [event for event in mine if event.hour_slot >= hour_slot - SETTINGS.num_slots]
        today = [event for event in mine if event.day == math.floor(now_s / SETTINGS.day_s)]
        return (
            len(minute),
            sum(event.tokens for event in minute),
            sum(event.tokens for event in today),
            sum(event.is_stream and event.runs for event in mine),
            sum(event.nano for event in hour),
        )

    def decide(
        self, who: Principal, now_s: float, tokens: int, nano: int, is_stream: bool
    ) -> tuple[set[int], set[str]]:
        """The limits that refuse, and the scopes whose probe the request is."""
        kinds: set[int] = set()
        probes: set[str] = set()
        for scope in scopes_of(who):
            bounds, used = bounds_of(scope.limits), self.used(scope.key, now_s)
            for kind, bound, count, size in zip(LimitKind, bounds, used, (1, tokens, tokens, 1, nano), strict=True):
                if bound >= 0 and count + size > bound and (kind != LimitKind.STREAMS or is_stream):
                    kinds.add(kind)
            if bounds[4] < 0:
                continue
            open_until_s = self.open_until_s.get(scope.key, 0.0)
            if now_s < open_until_s:
                kinds.add(LimitKind.USD_PER_HOUR)
            elif open_until_s:
                if any(scope.key in event.probe_of for event in self.events if event.runs):
                    kinds.add(LimitKind.USD_PER_HOUR)
                probes.add(scope.key)
        return kinds, probes

    def wait_s(self, scope: str, now_s: float, nano: int, bound: float) -> float:
        """Until the money fits, as the breaker waits for it."""
        for later in range(SETTINGS.num_slots + 2):
            until_s = (math.floor(now_s / SETTINGS.hour_slot_s) + later) * SETTINGS.hour_slot_s
            if self.used(scope, until_s + 0.001)[4] + nano <= bound:
                return until_s - now_s + 0.001
        raise AssertionError("never")

    def on_beat(self, worker: str, now_s: float) -> int:
        """What a heartbeat gives back: how many reservations."""
        if self.last_beat_s is not None and now_s - self.last_beat_s > SETTINGS.lease_s / 2:
            self.leases_s = dict.fromkeys(self.leases_s, now_s + SETTINGS.lease_s)
        self.last_beat_s = now_s
        self.leases_s[worker] = now_s + SETTINGS.lease_s
        dead = min(((end_s, name) for name, end_s in self.leases_s.items() if end_s <= now_s), default=None)
        if dead is None:
            return 0
        lost = [event for event in self.events if event.worker == dead[1] and event.runs]
        for event in lost:
            event.runs, event.tokens, event.nano = False, 0, 0
        if not lost:
            del self.leases_s[dead[1]]
        return len(lost)


class TwoWorkers(RuleBasedStateMachine):
    """Steps on two workers, one after another."""

    url = ""
    steps = 0

    @initialize()
    def start(self) -> None:
        self.loop = asyncio.new_event_loop()
        self.model = Model()
        self.num_workers = 0
        self.pipes: list[SpyPipe] = []
        self.keepers: list[LimitKeeper] = []
        self.names: list[str] = []
        self.holds: list[tuple[int, Hold, Event]] = []
        for at in range(2):
            self.add_worker(at)
        self.do(self.pipes[0].call("FLUSHALL"))

    def add_worker(self, at: int) -> None:
        self.num_workers += 1
        pipe, name = SpyPipe(self.url), f"worker-{self.num_workers}"
        keeper = LimitKeeper(pipe, SystemClock(), settings=SETTINGS, worker=name)
        self.pipes[at : at + 1], self.keepers[at : at + 1], self.names[at : at + 1] = [pipe], [keeper], [name]

    def do(self, doing):  # type: ignore[no-untyped-def]
        return self.loop.run_until_complete(doing)

    def take_beats(self, at: int) -> list[tuple[float, ...]]:
        """Tells the model of the heartbeats among the new replies; returns the others."""
        replies, self.pipes[at].replies = self.pipes[at].replies, []
        for reply in replies:
            if len(reply) == 4:
                assert self.model.on_beat(self.names[at], reply[0]) == reply[2]
                assert len(self.model.leases_s) == reply[1]
        return [reply for reply in replies if len(reply) > 4]

    @rule(
        at=st.integers(0, 1),
        who=st.sampled_from(WHO),
        tokens=st.integers(0, 250),
        usd=st.sampled_from([None, 0.0, 0.05, 0.3]),
        is_stream=st.booleans(),
    )
    def reserve(self, at: int, who: Principal, tokens: int, usd: float | None, is_stream: bool) -> None:
        TwoWorkers.steps += 1
        outcome: Hold | LimitReached
        try:
            outcome = self.do(self.keepers[at].reserve(who, tokens, usd, is_stream=is_stream))
        except LimitReached as refused:
            outcome = refused
        (reply,) = self.take_beats(at)
        kind, _, retry_after_s, now_s = reply[:4]
        nano = nano_usd(usd)
        kinds, probes = self.model.decide(who, now_s, tokens, nano, is_stream)
        scopes = scopes_of(who)
        if isinstance(outcome, LimitReached):
            assert int(kind) in kinds
            self.check_wait(who, int(kind), retry_after_s, now_s, tokens, nano, is_stream)
        else:
            assert kinds == set()
            slots = math.floor(now_s / SETTINGS.slot_s), math.floor(now_s / SETTINGS.hour_slot_s)
            keys = [scope.key for scope in scopes]
            day = math.floor(now_s / SETTINGS.day_s)
            event = Event(self.names[at], keys, *slots, day, tokens, nano, is_stream, probe_of=probes)
            self.model.events.append(event)
            self.holds.append((at, outcome, event))
        for place, scope in enumerate(scopes):
            counted = self.model.used(scope.key, now_s)
            seen = reply[9 + 4 * place : 13 + 4 * place]
            assert seen[:3] == counted[:3]
            if scope.limits.usd_per_hour is not None:
                assert seen[3] == counted[4]

    @rule(
        at=st.integers(0, 1), who=st.sampled_from(WHO[4:]), num_after=st.integers(0, 2), usd=st.sampled_from([0.0, 0.2])
    )
    def probe(self, at: int, who: Principal, num_after: int, usd: float) -> None:
        """Spends until the breaker opens, waits until it half-opens, and asks as often as it takes to see that."""
        for _ in range(4):
            self.reserve(at, who, 1, 0.3, False)
        opens_s = [self.model.open_until_s.get(scope.key, 0.0) for scope in scopes_of(who)]
        self.do(asyncio.sleep(min(max(max(opens_s) - SystemClock().now_s() + 0.002, 0.0), 0.5)))
        for number in range(1 + num_after):
            self.reserve((at + number) % 2, who, 1, usd, False)

    def check_wait(
        self, who: Principal, kind: int, retry_after_s: float, now_s: float, tokens: int, nano: int, is_stream: bool
    ) -> None:
        """Takes note of breakers that open, and sees that who waits alone is let in."""
        waits_s = [0.0]
        for scope in scopes_of(who):
            bound, used = bounds_of(scope.limits)[4], self.model.used(scope.key, now_s)[4]
            open_until_s = self.model.open_until_s.get(scope.key, 0.0)
            probe_runs = any(scope.key in event.probe_of for event in self.model.events if event.runs)
            if bound >= 0 and now_s >= open_until_s and not probe_runs and used + nano > bound:
                wait_s = max(self.model.wait_s(scope.key, now_s, nano, bound), SETTINGS.breaker_open_s)
                self.model.open_until_s[scope.key] = now_s + wait_s
                waits_s.append(wait_s)
        if kind == LimitKind.USD_PER_HOUR and len(waits_s) > 1:
            assert retry_after_s >= max(waits_s) - 1e-5
        if retry_after_s:
            kinds, _ = self.model.decide(who, now_s + retry_after_s + 1e-5, tokens, nano, is_stream)
            running = {LimitKind.STREAMS, LimitKind.USD_PER_HOUR} if any(e.runs for e in self.model.events) else set()
            assert kinds <= running

    @rule(
        which=st.integers(0, 1000),
        tokens=st.sampled_from([0, 0.5, 1, 1, 1.2]),
        usd=st.sampled_from([None, 0.02, 0.3, 0.4]),
        twice=st.booleans(),
    )
    def settle(self, which: int, tokens: float, usd: float | None, twice: bool) -> None:
        TwoWorkers.steps += 1
        if not self.holds:
            return
        at, hold, event = self.holds.pop(which % len(self.holds))
        num_tokens = int(event.tokens * tokens)
        hold.settle(num_tokens, usd)
        if twice:  # its reply was lost, say
            self.pipes[at].post(self.pipes[at].last_posted, lambda reply: None)
        self.do(self.pipes[at].call("PING"))
        if not event.runs:  # given back: this worker was taken for dead
            return
        event.tokens, event.nano, event.runs = num_tokens, nano_usd(usd), False
        for scope in event.probe_of:
            self.model.open_until_s[scope] = 0.0

    @rule(at=st.integers(0, 1))
    def beat(self, at: int) -> None:
        TwoWorkers.steps += 1
        assert self.do(self.keepers[at].renew())
        assert self.take_beats(at) == []
        for scope in {scope.key for who in WHO for scope in scopes_of(who)}:
            state = self.do(self.pipes[at].call("GET", f"{LIMITS_PREFIX}{scope}"))
            running = sum(scope in event.scopes and event.runs and event.is_stream for event in self.model.events)
            assert running == (0 if state is None else struct.unpack("<13d", state)[7])
        self.pipes[at].replies = []  # states are as long as replies to reservations

    @rule(at=st.integers(0, 1))
    def crash(self, at: int) -> None:
        TwoWorkers.steps += 1
        self.do(self.pipes[at].close())
        self.holds = [held for held in self.holds if held[0] != at]
        self.add_worker(at)

    @rule(at=st.integers(0, 1), num_beats=st.integers(4, 8))
    def die(self, at: int, num_beats: int) -> None:
        """A worker crashes and the other one lives on, perhaps for longer than the lease."""
        self.crash(at)
        for _ in range(num_beats):
            self.do(asyncio.sleep(0.02))
            self.beat(1 - at)

    @rule(pause_s=st.sampled_from([0.002, 0.01, 0.01, 0.03, 0.03, 0.2]))
    def wait(self, pause_s: float) -> None:
        TwoWorkers.steps += 1
        self.do(asyncio.sleep(pause_s))

    def teardown(self) -> None:
        if hasattr(self, "loop"):
            for pipe in self.pipes:
                self.do(pipe.close())
            self.do(asyncio.sleep(0))
            self.loop.close()


def run_steps(url: str, num_runs: int, num_steps: int, same_each_time: bool = False) -> int:
    TwoWorkers.url, TwoWorkers.steps = url, 0
    run_state_machine_as_test(
        TwoWorkers,
        settings=settings(
            max_examples=num_runs,
            stateful_step_count=num_steps,
            derandomize=same_each_time,
            deadline=None,
            database=None,
            phases=[Phase.generate],  # a step on real time is not the same step again, so nothing can be shrunk
            suppress_health_check=list(HealthCheck),
        ),
    )
    return TwoWorkers.steps


async def test_some_hundred_random_steps(server: StoreServer) -> None:
    assert await asyncio.to_thread(run_steps, server.url, 8, 30, True) >= 200


@pytest.mark.long
async def test_ten_thousand_random_steps(server: StoreServer) -> None:
    num_steps = 0
    while num_steps < 10_000:
        num_steps += await asyncio.to_thread(run_steps, server.url, 10, 100)
