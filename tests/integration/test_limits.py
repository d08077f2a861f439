"""Limits over two gateway workers on a real store: exact, given back by the dead, and what happens while it is away."""

from __future__ import annotations

import asyncio
import math
import os
import signal
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from serving.clock import SystemClock
from serving.core.errors import ErrorCode
from serving.core.policies.limits import LimitSettings
from serving.core.tenancy import Limits, Principal, Tenant
from serving.gateway.limits import LimitKeeper, LimitReached
from serving.store.limits import LIMITS_PREFIX
from serving.store.pipelined import StorePipe
from serving.store.resp import encode
from serving.store.server import StoreServer


class Worker:
    """A gateway worker as far as limits go."""

    def __init__(self, server: StoreServer, settings: LimitSettings, **options: object) -> None:
        self.pipe = StorePipe(server.url, timeout_s=0.2)
        self.keeper = LimitKeeper(self.pipe, SystemClock(), settings=settings, **options)  # type: ignore[arg-type]

    async def passes(self, who: Principal, num_tokens: int = 1, usd: float | None = None) -> bool:
        try:
            hold = await self.keeper.reserve(who, num_tokens, usd, is_stream=False)
        except LimitReached:
            return False
        hold.settle(num_tokens, usd)
        await self.settled()
        return True

    async def settled(self) -> None:
        """Returns when the store has done all that was posted."""
        if self.pipe.is_up:
            await self.pipe.call("PING")

    async def until_renewed(self) -> None:
        async with asyncio.timeout(10):
            while True:
                if await self.keeper.renew():
                    return
                await asyncio.sleep(0.02)

    async def die(self) -> None:
        await self.pipe.close()


@pytest_asyncio.fixture
async def minute(server: StoreServer) -> AsyncIterator[list[Worker]]:
    """Two workers whose minute is one."""
    workers = [Worker(server, LimitSettings()) for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.die()


@pytest_asyncio.fixture
async def short(server: StoreServer) -> AsyncIterator[list[Worker]]:
    """Two workers whose minute is a second, and who are dead after 0.3 s of silence."""
    settings = LimitSettings(window_s=1.0, hour_s=1.5, breaker_open_s=0.5, lease_s=0.3)
    workers = [Worker(server, settings) for _ in range(2)]
    yield workers
    for worker in workers:
        await worker.die()


def someone(key: Limits | None = None, **limits: float) -> Principal:
    return Principal(Tenant("acme", limits=Limits(**limits)), "k1234", limits=key or Limits())  # type: ignore[arg-type]


async def test_of_five_calls_at_once_that_are_too_many_at_most_two_pass(minute: list[Worker]) -> None:
    who = someone(tokens_per_minute=400)
    calls = [minute[number % 2].keeper.reserve(who, 150, None, is_stream=False) for number in range(5)]
    outcomes = await asyncio.gather(*calls, return_exceptions=True)
    assert sum(not isinstance(outcome, LimitReached) for outcome in outcomes) == 2


async def test_calls_that_alternate_between_workers_are_counted_together(minute: list[Worker]) -> None:
    who = someone(requests_per_minute=25)
    assert [await minute[number % 2].passes(who) for number in range(30)] == [True] * 25 + [False] * 5


@pytest.mark.parametrize(("requests", "tokens", "passed"), [(1000, 5000, 500), (400, 5000, 400)])
async def test_with_requests_and_tokens_both_limited_the_tighter_one_is_what_passes(
    minute: list[Worker], requests: int, tokens: int, passed: int
) -> None:
    who = someone(requests_per_minute=requests, tokens_per_minute=tokens)

    async def call(number: int) -> bool:
        return await minute[number % 2].passes(who, 10)

    outcomes = [
        await asyncio.gather(*(call(number) for number in range(begin, begin + 50))) for begin in range(0, 1200, 50)
    ]
    assert 0.98 * passed <= sum(sum(batch) for batch in outcomes) <= passed


async def test_over_several_windows_as_much_passes_as_the_limit_and_never_more(short: list[Worker]) -> None:
    who = someone(requests_per_minute=10_000, tokens_per_minute=4000)
    passed_at_s: list[float] = []
    tried_at_s: list[float] = []
    loop = asyncio.get_running_loop()

    async def caller(worker: Worker) -> None:
        while loop.time() < began_s + 3.3:
            try:
                hold = await worker.keeper.reserve(who, 10, None, is_stream=False)
            except LimitReached:
                tried_at_s.append(loop.time())
                await asyncio.sleep(0.002)
            else:
                tried_at_s.append(loop.time())
                assert hold.at_s is not None
                passed_at_s.append(hold.at_s)
                hold.settle(10, None)

    began_s = loop.time()
    await asyncio.gather(*(caller(worker) for worker in short))
    for first in range(0, len(passed_at_s), 7):
        window = sum(passed_at_s[first] <= at_s < passed_at_s[first] + 1.0 for at_s in passed_at_s)
        assert window * 10 <= 4000
    assert len(passed_at_s) >= 0.95 * num_that_could_pass(tried_at_s, at_once=400)


def num_that_could_pass(tried_at_s: list[float], *, at_once: int) -> int:
    """How many of the tries a window of a second lets through: on a busy machine fewer try than it would let."""
    passed: list[float] = []
    for at_s in sorted(tried_at_s):
        if len(passed) < at_once or passed[-at_once] <= at_s - 1.0:
            passed.append(at_s)
    return len(passed)


async def test_key_and_tenant_are_counted_together_or_not_at_all(minute: list[Worker]) -> None:
    first = someone(Limits(tokens_per_minute=100), tokens_per_minute=150)
    second = Principal(first.tenant, "other", limits=Limits(tokens_per_minute=100))
    assert await minute[0].passes(first, 100)
    assert not await minute[1].passes(second, 60)  # the tenant's limit; the key's is not used up by it
    with pytest.raises(LimitReached, match="tokens_per_minute of tenant acme") as refused:
        await minute[1].keeper.reserve(second, 60, None, is_stream=False)
    assert dict(refused.value.headers)[b"x-ratelimit-remaining-tokens"] == b"50"
    assert await minute[1].passes(second, 50)
    with pytest.raises(LimitReached, match=r"of (key k1234|tenant acme) is"):
        await minute[0].keeper.reserve(first, 1, None, is_stream=False)


async def test_settling_gives_back_what_was_not_used_and_counts_what_was_used_more(minute: list[Worker]) -> None:
    who = someone(tokens_per_minute=1000, tokens_per_day=1000)
    low = await minute[0].keeper.reserve(who, 900, None, is_stream=False)
    low.settle(100, None)
    await minute[0].settled()
    high = await minute[1].keeper.reserve(who, 200, None, is_stream=False)
    assert dict(high.headers)[b"x-ratelimit-remaining-tokens"] == b"700"
    high.settle(850, None)
    high.settle(850, None)
    await minute[1].settled()
    assert await minute[0].passes(who, 50)
    assert not await minute[0].passes(who, 1)


async def test_who_waits_as_long_as_told_is_let_in(short: list[Worker]) -> None:
    who = someone(tokens_per_minute=100)
    for number in range(4):
        while await short[number % 2].passes(who, 30):
            pass
        with pytest.raises(LimitReached) as refused:
            await short[0].keeper.reserve(who, 30, None, is_stream=False)
        assert refused.value.retry_after_s is not None
        assert 0 < refused.value.retry_after_s <= 1.02
        await asyncio.sleep(refused.value.retry_after_s)
        assert await short[1].passes(who, 30)


async def test_streams_are_counted_over_workers_and_given_back_when_a_worker_dies(short: list[Worker]) -> None:
    who = someone(max_streams=3, tokens_per_day=1000)
    holds = [await worker.keeper.reserve(who, 100, None, is_stream=True) for worker in (short[0], short[0], short[1])]
    with pytest.raises(LimitReached, match="max_streams of tenant acme is 3 streams") as refused:
        await short[1].keeper.reserve(who, 100, None, is_stream=True)
    assert refused.value.retry_after_s is not None
    await short[0].die()
    for _ in range(8):
        await asyncio.sleep(0.1)
        await short[1].keeper.renew()
    assert short[1].keeper.num_workers == 1
    for _ in range(2):
        await short[1].keeper.reserve(who, 400, None, is_stream=True)  # tokens came back as well
    with pytest.raises(LimitReached, match="max_streams"):
        await short[1].keeper.reserve(who, 1, None, is_stream=True)
    holds[2].settle(100, None)
    await short[1].settled()
    await short[1].keeper.reserve(who, 100, None, is_stream=True)


async def test_a_caller_that_leaves_while_it_reserves_holds_nothing(minute: list[Worker]) -> None:
    who = someone(max_streams=1, requests_per_minute=2)
    await minute[0].keeper.renew()
    for _ in range(5):
        task = asyncio.create_task(minute[0].keeper.reserve(who, 1, None, is_stream=True))
        await asyncio.sleep(0)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
    await minute[0].settled()
    hold = await minute[1].keeper.reserve(who, 1, None, is_stream=True)
    assert dict(hold.headers)[b"x-ratelimit-remaining-requests"] == b"1"


async def test_the_breaker_trips_once_in_the_fleet_and_closes_after_one_probe(
    server: StoreServer, caplog: pytest.LogCaptureFixture
) -> None:
    tripped: list[str] = []
    settings = LimitSettings(window_s=1.0, hour_s=1.5, breaker_open_s=0.5)
    workers = [Worker(server, settings, on_trip=tripped.append) for _ in range(2)]
    who = someone(usd_per_hour=1.0)
    assert await workers[0].passes(who, 1, 0.9)
    for number in range(4):
        with pytest.raises(LimitReached, match="usd_per_hour of tenant acme is 1 usd") as refused:
            await workers[number % 2].keeper.reserve(who, 1, 0.2, is_stream=False)
        assert refused.value.code is ErrorCode.COST_BREAKER_OPEN
    assert tripped == ["acme"]
    assert caplog.text.count("the cost breaker of tenant acme tripped") == 1
    assert not await workers[1].passes(who, 1, 0.0)  # open is open, whatever it costs
    assert refused.value.retry_after_s is not None
    await asyncio.sleep(refused.value.retry_after_s)
    probe = await workers[1].keeper.reserve(who, 1, 0.2, is_stream=False)
    with pytest.raises(LimitReached, match="breaker") as refused:
        await workers[0].keeper.reserve(who, 1, 0.2, is_stream=False)
    assert refused.value.retry_after_s == 1.0
    probe.settle(1, 0.1)
    await workers[1].settled()
    assert await workers[0].passes(who, 1, 0.2)
    assert await workers[1].passes(who, 1, 0.2)
    assert tripped == ["acme"]
    for worker in workers:
        await worker.die()


async def test_while_the_store_is_away_each_worker_has_its_share_and_nothing_is_counted_twice(
    server: StoreServer, minute: list[Worker]
) -> None:
    who = someone(tokens_per_minute=1000, tokens_per_day=100_000)
    for worker in minute:
        await worker.keeper.start()
    assert [worker.keeper.num_workers for worker in minute] == [1, 2]
    await minute[0].keeper.renew()
    before = await minute[0].keeper.reserve(who, 200, None, is_stream=False)
    await server.stop()
    before.settle(100, None)  # kept for later
    passed = [[await worker.passes(who, 50) for _ in range(12)] for worker in minute]
    # The share is 500; the first worker knows of 200 reserved, of which 100 are its part.
    assert [sum(outcomes) for outcomes in passed] == [8, 10]
    assert minute[0].keeper.is_local
    late = None
    await server.start()
    for worker in minute:
        await worker.until_renewed()
        assert not worker.keeper.is_local
    for worker in minute:
        await worker.keeper.renew()
        await worker.settled()
    late = await minute[1].keeper.reserve(who, 0, None, is_stream=False)
    assert dict(late.headers)[b"x-ratelimit-remaining-tokens"] == b"%d" % (1000 - 100 - 18 * 50)
    for worker in minute:
        await worker.keeper.stop()


async def test_a_store_that_hangs_is_passed_by_and_what_it_did_meanwhile_is_undone(
    server: StoreServer, minute: list[Worker]
) -> None:
    who = someone(requests_per_minute=100, max_streams=2, tokens_per_day=1000)
    await minute[0].keeper.renew()
    await minute[1].keeper.renew()
    assert server.pid is not None
    os.kill(server.pid, signal.SIGSTOP)
    try:
        hold = await minute[0].keeper.reserve(who, 10, None, is_stream=True)  # written, not answered: counted here
        assert minute[0].keeper.is_local
    finally:
        os.kill(server.pid, signal.SIGCONT)
    await minute[0].until_renewed()
    hold.settle(7, None)
    await minute[0].keeper.renew()
    holds = [await minute[1].keeper.reserve(who, 10, None, is_stream=True) for _ in range(2)]
    headers = dict(holds[1].headers)
    assert headers[b"x-ratelimit-remaining-requests"] == b"97"
    assert headers[b"x-ratelimit-remaining-tokens"] == b"%d" % (1000 - 7 - 20)


async def test_a_store_that_comes_back_empty_counts_from_nothing(server: StoreServer, minute: list[Worker]) -> None:
    who = someone(max_streams=2, tokens_per_minute=100)
    hold = await minute[0].keeper.reserve(who, 100, None, is_stream=True)
    await minute[0].pipe.call("FLUSHALL")
    await minute[0].pipe.call("SCRIPT", "FLUSH")
    hold.settle(50, None)
    for worker in minute:
        await worker.keeper.reserve(who, 50, None, is_stream=True)
    assert not await minute[0].passes(who, 1)


async def test_the_day_ends_at_utc_midnight(server: StoreServer) -> None:
    worker = Worker(server, LimitSettings(day_s=2.0))
    who = someone(tokens_per_day=10)
    while await worker.passes(who, 10):
        pass
    with pytest.raises(LimitReached, match="tokens_per_day") as refused:
        await worker.keeper.reserve(who, 10, None, is_stream=False)
    assert refused.value.retry_after_s is not None
    assert refused.value.retry_after_s <= 2.01
    await asyncio.sleep(refused.value.retry_after_s)
    assert await worker.passes(who, 10)
    await worker.die()


async def test_who_has_no_bound_costs_no_call(server: StoreServer) -> None:
    worker = Worker(server, LimitSettings())
    hold = await worker.keeper.reserve(someone(), 10**6, 1.0, is_stream=True)
    hold.settle(10, None)
    assert not worker.pipe.is_up
    await worker.die()


async def test_what_lies_in_the_store_ends_by_itself(minute: list[Worker]) -> None:
    who = someone(tokens_per_minute=1000, usd_per_hour=1.0)
    assert await minute[0].passes(who, 10, 0.1)
    hold = await minute[0].keeper.reserve(who, 10, 0.1, is_stream=True)
    await minute[0].keeper.renew()
    pipe = minute[1].pipe
    keys = await pipe.call("KEYS", f"{LIMITS_PREFIX}*")
    assert isinstance(keys, list)
    assert len(keys) == 4
    for key in keys:
        if b"workers" not in key and b"last-beat" not in key:
            assert await pipe.send(encode((b"TTL", key))) > 3600
    hold.settle(5, 0.05)
    assert math.isfinite(hold.at_s or 0.0)
