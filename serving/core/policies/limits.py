"""What limits mean: which bounds a request meets, how windows slide, what a client is told.

    whole limits   a request larger than a whole limit never passes: 400, and no waiting helps
    windows        requests and tokens of a minute, of the requests admitted in it; tokens of UTC's day; usd of an hour
    streams        how many run now

The store counts for all gateways (`serving/store/limit_scripts.py`). `local_limits.py` is the same
arithmetic in a worker's memory, for its share of each limit while the store is away.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache

from serving.core.errors import ErrorCode, ExceedsLimit
from serving.core.tenancy import Limits, Principal
from serving.core.values import value

NANO = 1_000_000_000
# A stream limit's Retry-After when no stream of the scope has ended yet.
UNKNOWN_STREAM_S = 5.0
LONGEST_ESTIMATE_S = 60.0


class LimitKind(IntEnum):
    """What refused a request; the numbers are those of the store's replies."""

    REQUESTS_PER_MINUTE = 1
    TOKENS_PER_MINUTE = 2
    TOKENS_PER_DAY = 3
    STREAMS = 4
    USD_PER_HOUR = 5


LIMIT_NAMES = {
    LimitKind.REQUESTS_PER_MINUTE: "requests_per_minute",
    LimitKind.TOKENS_PER_MINUTE: "tokens_per_minute",
    LimitKind.TOKENS_PER_DAY: "tokens_per_day",
    LimitKind.STREAMS: "max_streams",
    LimitKind.USD_PER_HOUR: "usd_per_hour",
}


@dataclass(frozen=True, slots=True)
class LimitSettings:
    """How limits are kept. The lengths of the windows are for tests: to users a minute is a minute.

    Attributes:
        window_s: the "minute" of requests and tokens.
        hour_s: the "hour" of the cost breaker.
        day_s: the "day"; it begins at multiples of this.
        num_slots: parts of a window; an amount counts for up to one part longer than the window.
        breaker_open_s: how long a tripped cost breaker refuses at least.
        lease_s: how long a silent worker keeps what it has reserved.
    """

    window_s: float = 60.0
    hour_s: float = 3600.0
    day_s: float = 86400.0
    num_slots: int = 100
    breaker_open_s: float = 60.0
    lease_s: float = 10.0

    @property
    def slot_s(self) -> float:
        """Seconds of one part of the minute's window."""
        return self.window_s / self.num_slots

    @property
    def hour_slot_s(self) -> float:
        """Seconds of one part of the hour's window."""
        return self.hour_s / self.num_slots


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose limits: a tenant, or one of its keys. `name` is for messages, `key` for the store."""

    name: str
    key: str
    limits: Limits


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request has to wait, and for how long; 0 s when only an estimate can be given."""

    kind: LimitKind
    scope: int
    retry_after_s: float
    has_tripped: bool = False


def scopes_of(principal: Principal) -> tuple[Scope, ...]:
    """Those scopes of the principal that have a bound to count for: its tenant, its key, both or none."""
    tenant_id = principal.tenant.tenant_id
    candidates = (
        Scope(f"tenant {tenant_id}", f"t:{tenant_id}", principal.tenant.limits),
        Scope(f"key {principal.key_id}", f"k:{tenant_id}:{principal.key_id}", principal.limits),
    )
    return tuple(scope for scope in candidates if any(bound >= 0 for bound in bounds_of(scope.limits)))


def bounds_of(limits: Limits) -> tuple[float, float, float, float, float]:
    """The counted bounds in the order of `LimitKind`, usd in nano-usd; -1 where there is none."""
    nano = None if limits.usd_per_hour is None else math.floor(limits.usd_per_hour * NANO)
    counted = (limits.requests_per_minute, limits.tokens_per_minute, limits.tokens_per_day, limits.max_streams, nano)
    requests, tokens, day, streams, usd = (-1.0 if bound is None else float(bound) for bound in counted)
    return requests, tokens, day, streams, usd


def nano_usd(usd: float | None) -> int:
    """Money as a whole number, so that sums do not drift; rounded up. What has no price costs nothing here."""
    return 0 if usd is None else math.ceil(usd * NANO)


def check_whole_limits(scopes: Iterable[Scope], num_tokens: int, usd: float | None, *, is_stream: bool) -> None:
    """Lets a request pass that could ever pass.

    Raises:
        ExceedsLimit: it alone is larger than a whole limit, which the message names.
    """
    for scope in scopes:
        sizes = (1, num_tokens, num_tokens, 1 if is_stream else 0, nano_usd(usd))
        for kind, bound, size in zip(LimitKind, bounds_of(scope.limits), sizes, strict=True):
            if 0 <= bound < size:
                name, whole, asked = LIMIT_NAMES[kind], amount(kind, bound), amount(kind, size)
                raise ExceedsLimit(f"the request asks for {asked}; {name} of {scope.name} is {whole} in all")


def check_cost_cap(principal: Principal, usd: float | None) -> None:
    """Lets a request pass whose expected cost is within the tenant's and the key's cap.

    Raises:
        ExceedsLimit: it would cost more than one request may.
    """
    cap, own = principal.tenant.limits.usd_per_request, principal.limits.usd_per_request
    if cap is None or (own is not None and own < cap):
        cap = own
    if usd is not None and cap is not None and usd > cap:
        raise ExceedsLimit(
            f"the request would cost about {usd:.6g} usd; usd_per_request is {cap:.6g}", code=ErrorCode.COST_CAP
        )


def amount(kind: LimitKind, size: float) -> str:
    """An amount in its unit, for messages."""
    if kind is LimitKind.USD_PER_HOUR:
        return f"{size / NANO:.6g} usd"
    words = {LimitKind.REQUESTS_PER_MINUTE: "requests", LimitKind.STREAMS: "streams"}
    return f"{size:.0f} {words.get(kind, 'tokens')}"


def stream_estimate_s(mean_s: float | None, num_streams: float) -> float:
    """When one of `num_streams` streams ends, from how long they take in the mean."""
    expected_s = UNKNOWN_STREAM_S if mean_s is None else mean_s / max(num_streams, 1.0)
    return min(max(expected_s, 1.0), LONGEST_ESTIMATE_S)


def reset_text(seconds: float) -> str:
    """A duration as OpenAI's headers write it: `120ms`, `1s`, `6m0s`, `1h0m3s`."""
    milliseconds = max(math.ceil(seconds * 1000), 0)
    if milliseconds < 1000:
        return f"{milliseconds}ms"
    return _whole_seconds_text(math.ceil(milliseconds / 1000))


@lru_cache(256)  # a window has about sixty of them, and each answer tells two
def _whole_seconds_text(whole: int) -> str:
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours}h{minutes}m{rest}s"
    return f"{minutes}m{rest}s" if minutes else f"{rest}s"


@value
class Seen:
    """What was counted of a scope at a time (Unix seconds), the request that asked included."""

    at_s: float = -math.inf
    requests: float = 0.0
    tokens: float = 0.0
    tokens_today: float = 0.0
    nano_usd: float = 0.0


NUM_COUNTS = 4
"""Counts of a scope: the fields of `Seen` but its time."""


class RateHeaders:
    """`x-ratelimit-{limit,remaining,reset}-{requests,tokens}` as OpenAI's clients read them, of the tightest scope.

    Tokens are those of the minute or of the day, whichever has less left. What has no bound has no header. Made ahead
    as far as they are the same for all requests of a principal.
    """

    def __init__(self, scopes: Sequence[Scope], settings: LimitSettings) -> None:
        self._slot_s = settings.slot_s
        self._num_slots = settings.num_slots
        self._day_s = settings.day_s
        self._requests: list[_Bound] = []
        self._tokens: list[_Bound] = []
        for at, scope in enumerate(scopes):
            requests, tokens, day, *_ = bounds_of(scope.limits)
            place = at * NUM_COUNTS
            if requests >= 0:
                self._requests.append(_Bound(place, requests, b"requests"))
            if tokens >= 0:
                self._tokens.append(_Bound(place + 1, tokens, b"tokens"))
            if day >= 0:
                self._tokens.append(_Bound(place + 2, day, b"tokens", is_day=True))

    def of(self, seen: Sequence[Seen]) -> list[tuple[bytes, bytes]]:
        """The headers, by what is known of each scope, in the order of the scopes."""
        at_s = max((one.at_s for one in seen), default=-math.inf)
        counts = [count for one in seen for count in (one.requests, one.tokens, one.tokens_today, one.nano_usd)]
        return self.of_counts(at_s, counts)

    def of_counts(self, at_s: float, counts: Sequence[float]) -> list[tuple[bytes, bytes]]:
        """As `of`, by the counts of all scopes in a row, each scope's in the order of `Seen`."""
        found: list[tuple[bytes, bytes]] = []
        known_s, text = -1.0, b""  # requests and tokens mostly leave their windows at the same time
        for bounds in (self._requests, self._tokens):
            tightest, least = None, math.inf
            for bound in bounds:
                left = bound.size - counts[bound.place]
                if tightest is None or left < least or (left == least and bound.size < tightest.size):
                    tightest, least = bound, left
            if tightest is not None:
                used = counts[tightest.place]
                reset_s = self._day_reset_s(at_s) if tightest.is_day else self._window_reset_s(at_s, used)
                found.append(tightest.limit)
                found.append((tightest.remaining, b"%d" % (least if least > 0 else 0)))
                if reset_s != known_s:
                    known_s, text = reset_s, reset_text(reset_s).encode()
                found.append((tightest.reset, text))
        return found

    def _window_reset_s(self, at_s: float, used: float) -> float:
        """Until all that counts has left the window, the last of it having come just now."""
        if used <= 0 or not math.isfinite(at_s):
            return 0.0
        return (math.floor(at_s / self._slot_s) + self._num_slots + 1) * self._slot_s - at_s

    def _day_reset_s(self, at_s: float) -> float:
        if not math.isfinite(at_s):
            return 0.0
        return self._day_s - at_s % self._day_s


class _Bound:
    """A bound, the place of its count among all scopes' counts, and its headers."""

    __slots__ = ("is_day", "limit", "place", "remaining", "reset", "size")

    def __init__(self, place: int, size: float, what: bytes, *, is_day: bool = False) -> None:
        self.place = place
        self.size = size
        self.is_day = is_day
        self.limit = b"x-ratelimit-limit-" + what, b"%d" % size
        self.remaining = b"x-ratelimit-remaining-" + what
        self.reset = b"x-ratelimit-reset-" + what
