"""Limits at the door: reserve before any work, settle when it is over, whoever ended it.

The store counts for all workers. While it is away each worker counts for itself, within its share of each limit; what
it let through then is added to the store's counts when the store is back, and so is what could not be settled. Each is
added once: a settlement by its reservation's number, a sum by a number of its own.

A principal without bounds costs no store call. A heartbeat renews the lease of all that this worker has reserved.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import secrets
import socket
from collections.abc import Callable
from dataclasses import dataclass

from serving.core.errors import ExceedsLimit
from serving.core.policies.limits import (
    LimitSettings,
    RateHeaders,
    Refusal,
    Scope,
    Seen,
    bounds_of,
    check_whole_limits,
    nano_usd,
    scopes_of,
)
from serving.core.policies.local_limits import LocalScope
from serving.core.ports import Clock
from serving.core.tenancy import Principal
from serving.gateway.http_errors import Headers
from serving.gateway.limit_errors import LargerThanLimit, LimitReached, limit_reached
from serving.gateway.limit_lease import Lease
from serving.store.connection import StoreUnavailable
from serving.store.limits import AT_S, NUM_HEAD, LimitPlan, Refused, Reserved, StoreLimits, seen_in
from serving.store.pipelined import StorePipe

logger = logging.getLogger(__name__)

MAX_ACCOUNTS = 20_000
_NEWEST_WEIGHT = 0.1


@dataclass(slots=True)
class _Meter:
    """What this worker itself knows of a scope, whoever counts its limits."""

    num_streams: int = 0
    mean_stream_s: float | None = None
    values: tuple[float, ...] = ()  # the store's last reply about it, in which it stands at place `at`
    at: int = 0
    local: LocalScope | None = None

    def seen(self, now_s: float) -> Seen:
        """What counts, by whoever counts now."""
        if self.local is not None:
            return self.local.seen(now_s)
        return seen_in(self.values, self.at) if self.values else Seen()


@dataclass(slots=True)
class _Account:
    """A principal whose requests are counted, with all that is the same for each of them."""

    principal: Principal
    scopes: tuple[Scope, ...]
    meters: tuple[_Meter, ...]
    rate_headers: RateHeaders
    plan: LimitPlan | None
    most_tokens: float
    most_nano: float
    needs_check: bool


@dataclass(slots=True)
class _Local:
    """A reservation that only this worker counts."""

    at_s: float
    num_tokens: int
    nano_usd: int
    scopes: tuple[LocalScope, ...]


class Hold:
    """What a request has reserved, until it is settled."""

    __slots__ = ("_account", "_began_s", "_is_stream", "_keeper", "_reserved")

    def __init__(
        self,
        keeper: LimitKeeper | None,
        account: _Account | None,
        reserved: Reserved | _Local | None,
        is_stream: bool,
        began_s: float,
    ) -> None:
        self._keeper = keeper
        self._account = account
        self._reserved = reserved
        self._is_stream = is_stream
        self._began_s = began_s

    @property
    def headers(self) -> Headers:
        """The x-ratelimit-* headers as of the reservation; none where nothing is limited. Read before `settle`."""
        account, reserved = self._account, self._reserved
        if account is None or reserved is None:
            return []
        if isinstance(reserved, Reserved):
            values = reserved.values
            return account.rate_headers.of_counts(values[AT_S], values[NUM_HEAD:])
        return account.rate_headers.of([scope.seen(reserved.at_s) for scope in reserved.scopes])

    @property
    def at_s(self) -> float | None:
        """When it was reserved, by the clock of who counts it."""
        return None if self._reserved is None else self._reserved.at_s

    def settle(self, num_tokens: int, usd: float | None) -> None:
        """Puts the true numbers in place of what was reserved. Never waits, never raises; a second call does nothing.

        Args:
            num_tokens: prompt and output tokens that were worked on; 0 when no engine had it.
            usd: what it cost; None when that is not known.
        """
        keeper, account, reserved = self._keeper, self._account, self._reserved
        if keeper is None or account is None or reserved is None:
            return
        self._account = self._reserved = None
        keeper._settle(account, reserved, num_tokens, nano_usd(usd), self._began_s if self._is_stream else None)


NOTHING_HELD = Hold(None, None, None, False, 0.0)


class LimitKeeper:
    """Keeps the limits of all principals for one worker.

    Args:
        pipe: to the store; None where there is none, and this worker counts for itself.
        clock: for leases, and for windows while the store is away.
        settings: equal in all workers of a store.
        num_workers: among how many limits are divided until the store has told how many there are.
        worker: a name that no other worker ever had; made when None.
        on_trip: called with the tenant's id when its cost breaker trips; once in the fleet for each time.
    """

    def __init__(
        self,
        pipe: StorePipe | None,
        clock: Clock,
        *,
        settings: LimitSettings | None = None,
        num_workers: int = 1,
        worker: str | None = None,
        on_trip: Callable[[str], None] | None = None,
    ) -> None:
        self._settings = settings or LimitSettings()
        self._clock = clock
        self._on_trip = on_trip
        self._num_workers = num_workers
        self._lease: Lease | None = None
        if pipe is not None:
            name = worker or f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(4)}"
            store = StoreLimits(pipe, name, self._settings)
            self._lease = Lease(store, clock, self._settings.lease_s, self._on_leased)
        self._accounts: dict[tuple[str, str], _Account | None] = {}
        self._principals: dict[tuple[str, str], Principal] = {}
        self._meters: dict[str, _Meter] = {}

    @property
    def is_local(self) -> bool:
        """Whether this worker counts for itself: there is no store, or it is away."""
        return self._lease is None or not self._lease.is_valid

    @property
    def num_workers(self) -> int:
        """Workers last seen, this one included."""
        return self._num_workers

    async def start(self) -> None:
        """Takes the lease and keeps it from then on; a store that is away does not stop it."""
        if self._lease is not None:
            await self._lease.start()

    async def stop(self) -> None:
        """Ends the heartbeat; what is still reserved expires with the lease."""
        if self._lease is not None:
            await self._lease.stop()

    async def renew(self) -> bool:
        """A heartbeat now; False when the store is away, and then this worker counts for itself."""
        return self._lease is not None and await self._lease.renew()

    async def reserve(self, principal: Principal, num_tokens: int, usd: float | None, *, is_stream: bool) -> Hold:
        """Counts a request against its tenant's and its key's limits, all or none of them.

        Args:
            principal: who asks.
            num_tokens: that the request may come to, prompt and output.
            usd: its expected cost; None when nothing is known.
            is_stream: whether it counts as a running stream.

        Raises:
            LargerThanLimit: it alone is larger than a whole limit (an ExceedsLimit).
            LimitReached: no room now; `retry_after_s` says when (a RateLimited).
        """
        account = self._account(principal)
        if account is None:
            return NOTHING_HELD
        nano = nano_usd(usd)
        if account.needs_check or num_tokens > account.most_tokens or nano > account.most_nano:
            self._check_whole(account, num_tokens, usd, is_stream)
        reply = await self._ask(account, num_tokens, nano, is_stream)
        if isinstance(reply, Refused):
            seen = [seen_in(reply.values, at) for at in range(len(account.scopes))]
            raise self._refused(account, reply.refusal, seen, num_tokens)
        reserved = reply or self._reserve_locally(account, num_tokens, nano, is_stream)
        if is_stream:
            for meter in account.meters:
                meter.num_streams += 1
        return Hold(self, account, reserved, is_stream, self._clock.monotonic_s() if is_stream else 0.0)

    def last_seen(self, principal: Principal) -> Headers:
        """The x-ratelimit-* headers by what was last heard of the principal, for answers that reserve nothing."""
        account = self._account(principal)
        return [] if account is None else account.rate_headers.of(self._seen(account))

    # ---- accounts

    def _account(self, principal: Principal) -> _Account | None:
        name = principal.tenant.tenant_id, principal.key_id
        known = self._principals.get(name)
        if known is principal:
            return self._accounts[name]
        if known is None or known.limits != principal.limits or known.tenant.limits != principal.tenant.limits:
            if len(self._accounts) >= MAX_ACCOUNTS:
                self._accounts.clear()
                self._principals.clear()
            self._accounts[name] = self._make_account(principal)
        self._principals[name] = principal
        return self._accounts[name]

    def _make_account(self, principal: Principal) -> _Account | None:
        scopes = scopes_of(principal)
        if not scopes:
            return None
        bounds = [bounds_of(scope.limits) for scope in scopes]
        meters = tuple(self._meters.setdefault(scope.key, _Meter()) for scope in scopes)
        for scope, meter in zip(scopes, meters, strict=True):
            if meter.local is not None:
                meter.local.change(scope)
        return _Account(
            principal=principal,
            scopes=scopes,
            meters=meters,
            rate_headers=RateHeaders(scopes, self._settings),
            plan=None if self._lease is None else self._lease.store.plan(scopes),
            most_tokens=min([bound for row in bounds for bound in row[1:3] if bound >= 0], default=math.inf),
            most_nano=min([row[4] for row in bounds if row[4] >= 0], default=math.inf),
            needs_check=any(bound == 0 for row in bounds for bound in row),
        )

    def _check_whole(self, account: _Account, num_tokens: int, usd: float | None, is_stream: bool) -> None:
        try:
            check_whole_limits(account.scopes, num_tokens, usd, is_stream=is_stream)
        except ExceedsLimit as exceeds:
            raise LargerThanLimit(exceeds.message, account.rate_headers.of(self._seen(account))) from exceeds

    def _seen(self, account: _Account) -> list[Seen]:
        now_s = self._clock.now_s()
        return [meter.seen(now_s) for meter in account.meters]

    # ---- the store counts

    async def _ask(self, account: _Account, num_tokens: int, nano: int, is_stream: bool) -> Reserved | Refused | None:
        """The store's answer; None when it has none."""
        lease, plan = self._lease, account.plan
        if lease is None or plan is None or not (lease.is_valid or await lease.take()):
            return None
        number = lease.store.next_number()
        try:
            reply = await lease.store.reserve(plan, number, num_tokens, nano, is_stream)
        except StoreUnavailable:
            lease.undo_later(number)
            return None
        except asyncio.CancelledError:
            lease.undo(number)
            raise
        for at, meter in enumerate(account.meters):
            meter.values, meter.at = reply.values, at
        return reply

    def _on_leased(self, num_workers: int) -> None:
        """The store counts from now on, and knows all that was counted here."""
        self._num_workers = num_workers
        for meter in self._meters.values():
            meter.local = None

    def _settle(
        self, account: _Account, reserved: Reserved | _Local, num_tokens: int, nano: int, stream_began_s: float | None
    ) -> None:
        """Called by the hold."""
        if stream_began_s is not None:
            took_s = self._clock.monotonic_s() - stream_began_s
            for meter in account.meters:
                meter.num_streams -= 1
                mean_s = took_s if meter.mean_stream_s is None else meter.mean_stream_s
                meter.mean_stream_s = mean_s + _NEWEST_WEIGHT * (took_s - mean_s)
        if isinstance(reserved, _Local):
            self._settle_locally(account, reserved, num_tokens, nano)
        elif self._lease is not None and account.plan is not None:
            self._lease.post(self._lease.store.settle(account.plan, reserved, num_tokens, nano))

    # ---- this worker counts

    def _reserve_locally(self, account: _Account, num_tokens: int, nano: int, is_stream: bool) -> _Local:
        now_s = self._clock.now_s()
        scopes: list[LocalScope] = []
        refusals: list[Refusal] = []
        for at, (scope, meter) in enumerate(zip(account.scopes, account.meters, strict=True)):
            if meter.local is None:
                meter.local = LocalScope(scope, self._settings, self._num_workers, meter.seen(now_s), now_s)
            scopes.append(meter.local)
            refusal = meter.local.check(at, now_s, num_tokens, nano, meter.num_streams if is_stream else None)
            if refusal is not None:
                refusals.append(refusal)
        if refusals:
            worst = max(refusals, key=lambda refusal: refusal.retry_after_s)
            raise self._refused(account, worst, [scope.seen(now_s) for scope in scopes], num_tokens)
        for counted in scopes:
            counted.take(now_s, num_tokens, nano)
        return _Local(now_s, num_tokens, nano, tuple(scopes))

    def _settle_locally(self, account: _Account, reserved: _Local, num_tokens: int, nano: int) -> None:
        for counted in reserved.scopes:
            counted.correct(reserved.at_s, num_tokens - reserved.num_tokens, nano - reserved.nano_usd)
        if self._lease is not None:
            day = math.floor(reserved.at_s / self._settings.day_s)
            for scope in account.scopes:
                self._lease.carry(scope, day, num_tokens, nano)

    # ---- refusing

    def _refused(self, account: _Account, refusal: Refusal, seen: list[Seen], num_tokens: int) -> LimitReached:
        scope, meter = account.scopes[refusal.scope], account.meters[refusal.scope]
        if refusal.has_tripped:
            self._alarm(account.principal.tenant.tenant_id)
        return limit_reached(refusal, scope, num_tokens, meter.mean_stream_s, account.rate_headers.of(seen))

    def _alarm(self, tenant_id: str) -> None:
        logger.warning("the cost breaker of tenant %s tripped: its usd_per_hour is spent", tenant_id)
        if self._on_trip is not None:
            self._on_trip(tenant_id)
