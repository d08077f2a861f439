"""A worker's share of limits, counted in its memory while the store is away.

The windows are the store's (`serving/store/limit_scripts.py`): slots, of which an amount counts for the window's length
and up to one slot more. The cost breaker opens and closes by itself; probes are for the store, which sees them all.
"""

from __future__ import annotations

import math

from serving.core.policies.limits import LimitKind, LimitSettings, Refusal, Scope, Seen, bounds_of

# So that no rounding ends a wait too early.
_ROUNDING_S = 0.001


class SlidingWindow:
    """Amounts of the last `num_slots` slots and the one that runs.

    An amount counts for the window's length and up to one slot more, so that over no window more passes than the limit,
    and over a long time at most one part in `num_slots` less.
    """

    __slots__ = ("_amounts", "_keep", "_slot_s", "total")

    def __init__(self, slot_s: float, num_slots: int) -> None:
        self.total = 0.0
        self._slot_s = slot_s
        self._keep = num_slots
        self._amounts: dict[int, float] = {}

    def slot(self, now_s: float) -> int:
        """The slot that runs."""
        return math.floor(now_s / self._slot_s)

    def turn(self, now_s: float) -> None:
        """Lets go of what is older than the window."""
        oldest = self.slot(now_s) - self._keep
        while self._amounts and next(iter(self._amounts)) < oldest:
            self.total -= self._amounts.pop(next(iter(self._amounts)))

    def add(self, slot: int, more: float) -> None:
        """Adds to a slot that runs or still counts; what is over is left alone."""
        if slot in self._amounts or not self._amounts or slot > next(reversed(self._amounts)):
            self._amounts[slot] = self._amounts.get(slot, 0.0) + more
            self.total += more

    def wait_s(self, now_s: float, over: float) -> float:
        """Seconds until `over` less is in the window."""
        last = self.slot(now_s)
        for slot, held in self._amounts.items():
            over -= held
            if over <= 0:
                last = slot
                break
        return (last + self._keep + 1) * self._slot_s - now_s + _ROUNDING_S


class LocalScope:
    """One worker's share of a scope's limits, counted in memory while the store is away.

    The share is limit / workers. A request larger than the share, though not than the limit, passes when nothing else
    counts: else it never would.

    Args:
        scope: whose limits.
        settings: the windows.
        num_workers: among how many the limits are divided.
        seen: what the store last knew; this worker's share of it counts from the start.
        now_s: Unix seconds.
    """

    def __init__(self, scope: Scope, settings: LimitSettings, num_workers: int, seen: Seen, now_s: float) -> None:
        self._bounds = bounds_of(scope.limits)
        self._num_workers = num_workers
        self._settings = settings
        self._requests = SlidingWindow(settings.slot_s, settings.num_slots)
        self._tokens = SlidingWindow(settings.slot_s, settings.num_slots)
        self._usd = SlidingWindow(settings.hour_slot_s, settings.num_slots)
        self._day = math.floor(now_s / settings.day_s)
        self._tokens_today = 0.0
        self._open_until_s = 0.0
        if now_s - seen.at_s < settings.window_s:
            self._requests.add(self._requests.slot(now_s), math.ceil(seen.requests / num_workers))
            self._tokens.add(self._tokens.slot(now_s), math.ceil(seen.tokens / num_workers))
        if now_s - seen.at_s < settings.hour_s:
            self._usd.add(self._usd.slot(now_s), math.ceil(seen.nano_usd / num_workers))
        if math.isfinite(seen.at_s) and math.floor(seen.at_s / settings.day_s) == self._day:
            self._tokens_today = math.ceil(seen.tokens_today / num_workers)

    def change(self, scope: Scope) -> None:
        """Takes up the scope's new limits; what was counted still counts."""
        self._bounds = bounds_of(scope.limits)

    def seen(self, now_s: float) -> Seen:
        """What counts now, in terms of the whole limits: this worker's count times the number of workers."""
        self._turn(now_s)
        counts = (self._requests.total, self._tokens.total, self._tokens_today, self._usd.total)
        return Seen(now_s, *(count * self._num_workers for count in counts))

    def share(self, kind: LimitKind) -> float:
        """This worker's part of a limit; at least one request or stream, so that something passes."""
        part = self._bounds[kind - 1] / self._num_workers
        return max(math.floor(part), 1) if kind in (LimitKind.REQUESTS_PER_MINUTE, LimitKind.STREAMS) else part

    def check(self, at: int, now_s: float, num_tokens: int, nano: int, num_streams: int | None) -> Refusal | None:
        """What refuses a request now, the longest wait of all; None when it fits.

        Args:
            at: the scope's place, for the refusal.
            now_s: Unix seconds.
            num_tokens: it reserves.
            nano: its cost in nano-usd.
            num_streams: that this worker runs for the scope; None when the request is no stream.
        """
        self._turn(now_s)
        midnight_s = (self._day + 1) * self._settings.day_s - now_s + _ROUNDING_S
        refusals = [
            Refusal(kind, at, midnight_s if window is None else window.wait_s(now_s, used + size - self.share(kind)))
            for kind, window, used, size in (
                (LimitKind.REQUESTS_PER_MINUTE, self._requests, self._requests.total, 1),
                (LimitKind.TOKENS_PER_MINUTE, self._tokens, self._tokens.total, num_tokens),
                (LimitKind.TOKENS_PER_DAY, None, self._tokens_today, num_tokens),
            )
            if self._is_over(kind, used, size)
        ]
        if num_streams is not None and self._is_over(LimitKind.STREAMS, num_streams, 1):
            refusals.append(Refusal(LimitKind.STREAMS, at, 0.0))
        broken = self._check_breaker(at, now_s, nano)
        if broken is not None:
            refusals.append(broken)
        return max(refusals, key=lambda refusal: refusal.retry_after_s, default=None)

    def take(self, now_s: float, num_tokens: int, nano: int) -> None:
        """Counts a request that was let through."""
        self._requests.add(self._requests.slot(now_s), 1)
        self._tokens.add(self._tokens.slot(now_s), num_tokens)
        self._usd.add(self._usd.slot(now_s), nano)
        self._tokens_today += num_tokens

    def correct(self, at_s: float, more_tokens: int, more_nano: int) -> None:
        """Puts right what a request that was let through at `at_s` had reserved."""
        self._tokens.add(self._tokens.slot(at_s), more_tokens)
        self._usd.add(self._usd.slot(at_s), more_nano)
        if math.floor(at_s / self._settings.day_s) == self._day:
            self._tokens_today += more_tokens

    def _is_over(self, kind: LimitKind, used: float, size: float) -> bool:
        return self._bounds[kind - 1] >= 0 and used > 0 and used + size > self.share(kind)

    def _check_breaker(self, at: int, now_s: float, nano: int) -> Refusal | None:
        if now_s < self._open_until_s:
            return Refusal(LimitKind.USD_PER_HOUR, at, self._open_until_s - now_s)
        if not self._is_over(LimitKind.USD_PER_HOUR, self._usd.total, nano):
            self._open_until_s = 0.0
            return None
        over = self._usd.total + nano - self.share(LimitKind.USD_PER_HOUR)
        wait_s = max(self._usd.wait_s(now_s, over), self._settings.breaker_open_s)
        has_tripped, self._open_until_s = self._open_until_s == 0.0, now_s + wait_s
        return Refusal(LimitKind.USD_PER_HOUR, at, wait_s, has_tripped)

    def _turn(self, now_s: float) -> None:
        self._requests.turn(now_s)
        self._tokens.turn(now_s)
        self._usd.turn(now_s)
        day = math.floor(now_s / self._settings.day_s)
        if day > self._day:
            self._day, self._tokens_today = day, 0.0
