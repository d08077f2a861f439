"""Limits in memory: windows against a list of events, shares while the store is away, what clients are told."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.clock import ManualClock
from serving.core.errors import ErrorCode, ExceedsLimit
from serving.core.policies.limits import (
    LimitKind,
    LimitSettings,
    RateHeaders,
    Scope,
    Seen,
    check_cost_cap,
    check_whole_limits,
    nano_usd,
    reset_text,
    scopes_of,
    stream_estimate_s,
)
from serving.core.policies.local_limits import LocalScope, SlidingWindow
from serving.core.tenancy import Limits, Principal, Tenant
from serving.gateway.limits import NOTHING_HELD, LargerThanLimit, LimitKeeper, LimitReached

SETTINGS = LimitSettings()
NOON_S = 1_700_000_000.0


UNBOUNDED = Limits()


def a_principal(limits: Limits = UNBOUNDED, key_limits: Limits = UNBOUNDED, tenant_id: str = "acme") -> Principal:
    return Principal(Tenant(tenant_id, limits=limits), "k1234", limits=key_limits)


def a_scope(**limits: float) -> Scope:
    return Scope("tenant acme", "t:acme", Limits(**limits))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0ms"),
        (-3, "0ms"),
        (0.0001, "1ms"),
        (0.12, "120ms"),
        (0.9999, "1s"),
        (1.2, "2s"),
        (60, "1m0s"),
        (360, "6m0s"),
        (3603, "1h0m3s"),
    ],
)
def test_durations_are_written_as_openai_does(seconds: float, text: str):
    assert reset_text(seconds) == text


def test_money_is_counted_in_whole_numbers_and_never_too_low():
    assert nano_usd(None) == 0
    assert nano_usd(0.25) == 250_000_000
    assert nano_usd(1e-12) == 1


def test_only_scopes_with_a_bound_are_counted():
    assert scopes_of(a_principal()) == ()
    assert scopes_of(a_principal(Limits(usd_per_request=1.0))) == ()
    both = scopes_of(a_principal(Limits(max_streams=2), Limits(tokens_per_day=5)))
    assert [scope.key for scope in both] == ["t:acme", "k:acme:k1234"]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        ({"tokens_per_minute": 99}, "tokens_per_minute of tenant acme is 99 tokens"),
        ({"tokens_per_day": 99}, "tokens_per_day of tenant acme is 99 tokens"),
        ({"requests_per_minute": 0}, "requests_per_minute of tenant acme is 0 requests"),
        ({"max_streams": 0}, "max_streams of tenant acme is 0 streams"),
        ({"usd_per_hour": 0.01}, "usd_per_hour of tenant acme is 0.01 usd"),
    ],
)
def test_what_never_fits_is_refused_with_the_limits_name(limits: dict[str, float], name: str):
    with pytest.raises(ExceedsLimit, match=name):
        check_whole_limits([a_scope(**limits)], 100, 0.02, is_stream=True)
    check_whole_limits([a_scope(tokens_per_minute=100, max_streams=0)], 100, None, is_stream=False)


def test_the_cost_cap_is_the_lower_of_tenant_and_key():
    principal = a_principal(Limits(usd_per_request=0.5), Limits(usd_per_request=0.1))
    check_cost_cap(principal, 0.1)
    check_cost_cap(principal, None)
    check_cost_cap(a_principal(), 100.0)
    with pytest.raises(ExceedsLimit, match=r"usd_per_request is 0\.1") as error:
        check_cost_cap(principal, 0.11)
    assert error.value.code is ErrorCode.COST_CAP


def test_an_estimate_for_streams_is_within_reason():
    assert stream_estimate_s(None, 4) == 5.0
    assert stream_estimate_s(40.0, 4) == 10.0
    assert stream_estimate_s(0.1, 4) == 1.0
    assert stream_estimate_s(1e9, 4) == 60.0


STEPS = st.lists(st.tuples(st.floats(0, 3), st.integers(0, 100)), max_size=60)


@given(STEPS)
def test_a_window_never_passes_more_than_its_limit_and_little_less(steps: list[tuple[float, int]]):
    limit, slot_s, num_slots = 300, 0.1, 20
    window, now_s = SlidingWindow(slot_s, num_slots), NOON_S
    passed: list[tuple[float, int]] = []
    for pause_s, size in steps:
        now_s += pause_s
        window.turn(now_s)
        counting = sum(size for at_s, size in passed if now_s - at_s < slot_s * num_slots - 1e-6)
        at_most = sum(size for at_s, size in passed if now_s - at_s <= slot_s * (num_slots + 1) + 1e-6)
        assert counting <= window.total <= at_most
        if window.total + size <= limit:
            window.add(window.slot(now_s), size)
            passed.append((now_s, size))
        else:
            later_s = now_s + window.wait_s(now_s, window.total + size - limit)
            assert later_s - now_s <= slot_s * (num_slots + 1) + 0.01
            window.turn(later_s)
            assert window.total + size <= limit
            now_s = later_s


def test_a_share_is_the_limit_divided_and_lets_a_large_request_pass_when_nothing_else_counts():
    scope = LocalScope(a_scope(tokens_per_minute=400, requests_per_minute=3), SETTINGS, 4, Seen(), NOON_S)
    assert scope.share(LimitKind.TOKENS_PER_MINUTE) == 100
    assert scope.share(LimitKind.REQUESTS_PER_MINUTE) == 1
    assert scope.check(0, NOON_S, 150, 0, None) is None
    scope.take(NOON_S, 150, 0)
    refusal = scope.check(0, NOON_S + 1, 1, 0, None)
    assert refusal is not None
    assert scope.check(0, NOON_S + 1 + refusal.retry_after_s, 1, 0, None) is None


def test_what_the_store_had_seen_counts_for_the_share():
    seen = Seen(NOON_S, requests=4, tokens=300, tokens_today=1000, nano_usd=0)
    scope = LocalScope(a_scope(tokens_per_minute=400), SETTINGS, 2, seen, NOON_S + 5)
    assert scope.seen(NOON_S + 5).tokens == 300
    assert scope.check(0, NOON_S + 5, 51, 0, None) is not None
    assert scope.check(0, NOON_S + 5, 50, 0, None) is None
    late = LocalScope(a_scope(tokens_per_minute=400), SETTINGS, 2, seen, NOON_S + 100)
    assert late.seen(NOON_S + 100).tokens == 0


def test_the_headers_are_of_the_tightest_scope():
    scopes = [
        a_scope(requests_per_minute=10, tokens_per_day=1000),
        a_scope(requests_per_minute=8, tokens_per_minute=50),
    ]
    at_s = math.floor(NOON_S / 60) * 60 + 30.0
    seen = [Seen(at_s, 9, 0, 400, 0), Seen(at_s, 2, 60, 60, 0)]
    assert dict(RateHeaders(scopes, SETTINGS).of(seen)) == {
        b"x-ratelimit-limit-requests": b"10",
        b"x-ratelimit-remaining-requests": b"1",
        b"x-ratelimit-reset-requests": b"1m1s",
        b"x-ratelimit-limit-tokens": b"50",
        b"x-ratelimit-remaining-tokens": b"0",
        b"x-ratelimit-reset-tokens": b"1m1s",
    }
    assert RateHeaders([a_scope(max_streams=3)], SETTINGS).of(seen[:1]) == []
    unused = dict(RateHeaders(scopes, SETTINGS).of([Seen(), Seen()]))
    assert unused[b"x-ratelimit-remaining-requests"] == b"8"
    assert unused[b"x-ratelimit-reset-tokens"] == b"0ms"


# ---- a keeper without a store


async def test_who_has_no_bound_is_not_counted():
    keeper = LimitKeeper(None, ManualClock())
    hold = await keeper.reserve(a_principal(), 10**9, 1e6, is_stream=True)
    assert hold is NOTHING_HELD
    assert hold.headers == []
    hold.settle(5, None)


async def test_reserve_settle_and_a_wait_that_is_obeyed():
    clock = ManualClock(NOON_S)
    keeper = LimitKeeper(None, clock)
    who = a_principal(Limits(tokens_per_minute=400))
    holds = [await keeper.reserve(who, 150, None, is_stream=False) for _ in range(2)]
    with pytest.raises(LimitReached, match="tokens_per_minute of tenant acme is 400 tokens"):
        await keeper.reserve(who, 150, None, is_stream=False)
    holds[0].settle(100, None)
    holds[0].settle(0, None)  # once is enough
    hold = await keeper.reserve(who, 150, None, is_stream=False)
    assert dict(hold.headers)[b"x-ratelimit-remaining-tokens"] == b"0"
    with pytest.raises(LimitReached) as refused:
        await keeper.reserve(who, 150, None, is_stream=False)
    assert dict(refused.value.headers)[b"x-ratelimit-remaining-tokens"] == b"0"
    assert refused.value.retry_after_s is not None
    clock.advance(math.ceil(refused.value.retry_after_s))
    await keeper.reserve(who, 150, None, is_stream=False)


async def test_streams_are_counted_while_they_run():
    clock = ManualClock(NOON_S)
    keeper = LimitKeeper(None, clock)
    who = a_principal(Limits(max_streams=2))
    holds = [await keeper.reserve(who, 1, None, is_stream=True) for _ in range(2)]
    await keeper.reserve(who, 1, None, is_stream=False)
    with pytest.raises(LimitReached, match="max_streams") as refused:
        await keeper.reserve(who, 1, None, is_stream=True)
    assert refused.value.retry_after_s == 5.0
    clock.advance(30)
    holds[0].settle(1, None)
    await keeper.reserve(who, 1, None, is_stream=True)
    with pytest.raises(LimitReached) as refused:
        await keeper.reserve(who, 1, None, is_stream=True)
    assert refused.value.retry_after_s == 15.0


async def test_the_cost_breaker_trips_alarms_once_and_closes(caplog: pytest.LogCaptureFixture):
    clock, tripped = ManualClock(NOON_S), []
    keeper = LimitKeeper(None, clock, on_trip=tripped.append)
    who = a_principal(Limits(usd_per_hour=1.0))
    (await keeper.reserve(who, 1, 0.9, is_stream=False)).settle(1, 0.9)
    for _ in range(3):
        with pytest.raises(LimitReached) as refused:
            await keeper.reserve(who, 1, 0.2, is_stream=False)
        assert refused.value.code is ErrorCode.COST_BREAKER_OPEN
    assert tripped == ["acme"]
    assert "cost breaker of tenant acme tripped" in caplog.text
    assert refused.value.retry_after_s is not None
    clock.advance(math.ceil(refused.value.retry_after_s))
    await keeper.reserve(who, 1, 0.2, is_stream=False)


async def test_a_request_larger_than_a_whole_limit_brings_the_headers_along():
    keeper = LimitKeeper(None, ManualClock())
    with pytest.raises(LargerThanLimit, match="tokens_per_minute") as refused:
        await keeper.reserve(a_principal(Limits(tokens_per_minute=10)), 11, None, is_stream=False)
    assert refused.value.status == 400
    assert dict(refused.value.headers)[b"x-ratelimit-remaining-tokens"] == b"10"


async def test_changed_limits_count_at_once():
    keeper = LimitKeeper(None, ManualClock())
    await keeper.reserve(a_principal(Limits(tokens_per_minute=10)), 10, None, is_stream=False)
    await keeper.reserve(a_principal(), 10, None, is_stream=False)
    with pytest.raises(LargerThanLimit):
        await keeper.reserve(a_principal(Limits(tokens_per_minute=9)), 10, None, is_stream=False)
    await keeper.reserve(a_principal(Limits(tokens_per_minute=20)), 10, None, is_stream=False)
    with pytest.raises(LimitReached):
        await keeper.reserve(a_principal(Limits(tokens_per_minute=20)), 1, None, is_stream=False)
