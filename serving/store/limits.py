"""Limits counted in the store, exact over all gateway workers: the calls of one worker.

    reserve ──▶ a request's tokens, money and stream count from now on, or it is refused, in one step
    settle  ──▶ the true numbers take their place; posted, never waited for
    beat    ──▶ this worker lives; gives back what dead ones had reserved

All three may be repeated: a reservation has a number and is settled once (`limit_scripts.py`). A call's bytes are made
ahead as far as they are the same for all requests of a principal.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from struct import Struct

from serving.core.policies.limits import NUM_COUNTS, LimitKind, LimitSettings, Refusal, Scope, Seen, bounds_of
from serving.store.connection import KEY_PREFIX, StoreUnavailable
from serving.store.limit_scripts import ADD, BEAT, RELEASE, RESERVE, SCRIPTS, SETTLE
from serving.store.pipelined import StorePipe
from serving.store.resp import Part, Reply, StoreRefused

LIMITS_PREFIX = f"{KEY_PREFIX}limits:"
WORKERS_KEY = f"{LIMITS_PREFIX}workers"
LAST_BEAT_KEY = f"{LIMITS_PREFIX}last-beat"
RESERVED_PREFIX = f"{LIMITS_PREFIX}reserved:"
# Records given back in one call at most: the store serves nobody else meanwhile.
MAX_GIVEN_BACK = 500

_SETTINGS = Struct("<6d")
_BOUNDS = Struct("<5d")
_REQUEST = Struct("<4d")
_SETTLED = Struct("<8d")
_ADDED = Struct("<4d")
_BEAT = Struct("<4d")
_REPLIES = {1: Struct("<13d"), 2: Struct("<17d")}
AT_S, NUM_HEAD = 3, 9
"""In a reply: the place of the store's time, and where the counts of the scopes begin."""
_REQUEST_HEAD = b"$%d\r\n" % _REQUEST.size
_SETTLED_HEAD = b"$%d\r\n" % _SETTLED.size


@dataclass(slots=True)
class LimitPlan:
    """What is the same for all requests of a principal: its scopes and the beginning of its calls."""

    scopes: tuple[Scope, ...]
    reserve_head: bytes
    settle_head: bytes
    reply: Struct


@dataclass(slots=True)
class Reserved:
    """A reservation in the store, as `settle` needs it; `values` are the reply, for `seen_in`."""

    number: int
    num_tokens: int
    nano_usd: int
    is_stream: bool
    values: tuple[float, ...]

    @property
    def at_s(self) -> float:
        """The store's time."""
        return self.values[AT_S]

    @property
    def counts(self) -> tuple[float, ...]:
        """What was counted of all scopes, the request included; four of each, in the order of `Seen`."""
        return self.values[NUM_HEAD:]


@dataclass(frozen=True, slots=True)
class Refused:
    """The store refused. `values` are the reply, for `seen_in`."""

    refusal: Refusal
    values: tuple[float, ...]

    @property
    def at_s(self) -> float:
        """The store's time."""
        return self.values[AT_S]


@dataclass(frozen=True, slots=True)
class Beat:
    """What a heartbeat told: the store's time, the workers that live, what was given back, whether there is more."""

    at_s: float
    num_workers: int
    num_given_back: int
    has_more: bool


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """What was counted of a scope while the store was away. `day` as the store numbers days."""

    scope: Scope
    day: int
    num_requests: int
    num_tokens: int
    nano_usd: int


def seen_in(values: Sequence[float], at: int) -> Seen:
    """What a reply says of the scope at place `at`."""
    begin = NUM_HEAD + NUM_COUNTS * at
    return Seen(values[AT_S], *values[begin : begin + NUM_COUNTS])


class StoreLimits:
    """The limits' calls of one worker.

    Args:
        pipe: to the store.
        worker: a name that no other worker has had: reservations hang on it.
        settings: equal in all workers of a store.

    Attributes:
        post: sends what `settle` or `release` made, without waiting (`StorePipe.post`).
    """

    def __init__(self, pipe: StorePipe, worker: str, settings: LimitSettings) -> None:
        pipe.register(*SCRIPTS)
        self._pipe = pipe
        self.post = pipe.post
        self._worker = worker
        self._lease_s = settings.lease_s
        self._reserved_key = f"{RESERVED_PREFIX}{worker}"
        self._number = 0
        self._settings = _SETTINGS.pack(
            settings.slot_s,
            settings.num_slots,
            settings.hour_slot_s,
            settings.num_slots,
            settings.day_s,
            settings.breaker_open_s,
        )

    @property
    def is_up(self) -> bool:
        """Whether the store can be asked now."""
        return self._pipe.is_up

    def plan(self, scopes: Sequence[Scope]) -> LimitPlan:
        """Prepares the calls for these scopes, one or two."""
        keys = [self._reserved_key, *(f"{LIMITS_PREFIX}{scope.key}" for scope in scopes)]
        bounds = [_BOUNDS.pack(*bounds_of(scope.limits)) for scope in scopes]
        return LimitPlan(
            scopes=tuple(scopes),
            reserve_head=RESERVE.head(keys, [self._settings, *bounds], 1) + _REQUEST_HEAD,
            settle_head=SETTLE.head(keys, [self._settings], 1) + _SETTLED_HEAD,
            reply=_REPLIES[len(scopes)],
        )

    def next_number(self) -> int:
        """A number for a reservation; each is used once."""
        self._number += 1
        return self._number

    async def reserve(
        self, plan: LimitPlan, number: int, num_tokens: int, nano_usd: int, is_stream: bool
    ) -> Reserved | Refused:
        """Reserves or is refused, by all scopes together.

        Raises:
            StoreUnavailable: it may have been reserved or not: `release` the number.
        """
        command = plan.reserve_head + _REQUEST.pack(num_tokens, nano_usd, is_stream, number) + b"\r\n"
        try:
            reply = await self._pipe.send(command)
        except StoreRefused as refused:
            if refused.reason != "NOSCRIPT":
                raise
            await self.load()
            reply = await self._pipe.send(command)
        if not isinstance(reply, bytes):
            raise StoreUnavailable("the store answered a reservation with something else")
        values = plan.reply.unpack(reply)
        kind = values[0]
        if kind == 0:
            return Reserved(number, num_tokens, nano_usd, is_stream, values)
        if kind < 0:
            raise StoreUnavailable("the reservation was given up before the store came to it")
        refusal = Refusal(LimitKind(int(kind)), int(values[1]) - 1, values[2], bool(values[8]))
        return Refused(refusal, values)

    def settle(self, plan: LimitPlan, reserved: Reserved, num_tokens: int, nano_usd: int) -> bytes:
        """The call that puts the true numbers in place; `post` it, as often as needed."""
        _, _, _, _, slot, hour_slot, day, masks, *_ = reserved.values
        numbers = _SETTLED.pack(
            reserved.number,
            slot,
            hour_slot,
            day,
            num_tokens - reserved.num_tokens,
            nano_usd - reserved.nano_usd,
            -1 if reserved.is_stream else 0,
            masks,
        )
        return plan.settle_head + numbers + b"\r\n"

    def release(self, number: int) -> bytes:
        """The call that undoes a reservation of which nobody knows whether it was made; `post` it."""
        return RELEASE.command([self._reserved_key], [self._settings, number])

    async def add(self, number: int, elsewhere: Iterable[Elsewhere]) -> Reply:
        """Adds what was counted elsewhere, once for each `number`; 0 when that was done. Raises StoreUnavailable."""
        amounts = list(elsewhere)
        keys = [self._reserved_key, *(f"{LIMITS_PREFIX}{one.scope.key}" for one in amounts)]
        packed = [_ADDED.pack(one.day, one.num_requests, one.num_tokens, one.nano_usd) for one in amounts]
        return await self._pipe.script(ADD, keys, [self._settings, number, *packed])

    async def load(self) -> None:
        """Brings the scripts to a store that has forgotten them. Raises StoreUnavailable."""
        await self._pipe.load(*SCRIPTS)

    async def beat(self) -> Beat:
        """Renews this worker's lease and gives back what one dead worker had reserved. Raises StoreUnavailable."""
        args: list[Part] = [self._settings, self._worker, self._lease_s, RESERVED_PREFIX, MAX_GIVEN_BACK]
        reply = await self._pipe.script(BEAT, [WORKERS_KEY, LAST_BEAT_KEY], args)
        if not isinstance(reply, bytes):
            raise StoreUnavailable("the store answered a heartbeat with something else")
        now_s, num_workers, num_given_back, has_more = _BEAT.unpack(reply)
        return Beat(now_s, int(num_workers), int(num_given_back), bool(has_more))
