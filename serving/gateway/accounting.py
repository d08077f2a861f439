"""What a request came to: its metrics, its usage event, its line in the log. Metadata only."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from serving.core.errors import (
    BadRequest,
    ClientGone,
    DeadlineExceeded,
    NotFound,
    Overloaded,
    ServingError,
    Unavailable,
)
from serving.core.policies.cost import most_tokens_done
from serving.core.policies.pricing import Prices, Tokens
from serving.core.ports import Clock
from serving.core.state import PoolView
from serving.core.tenancy import Principal
from serving.gateway.dispatch import Choice
from serving.gateway.http_errors import Headers
from serving.gateway.limits import Hold
from serving.gateway.relay import Answer
from serving.gateway.request import Asked, Call
from serving.gateway.usage import Usage
from serving.metering.events import UsageEvent, Waste, waste_of
from serving.metering.spool import UsageSpool
from serving.settings import AccessLog
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger("serving.gateway.access")


@dataclass(slots=True)
class Outcome:
    """A request as far as it has come. Times are time.perf_counter(), but for `started_at_s`, in Unix seconds.

    `event_id` is the internal key: of the usage event and of the engine's request. `path` is what was asked for.
    `asked` is known of a request that was let in. `replayed`: by the answer of an earlier request, no engine worked.
    `kept`: the answer came to its end and is there for who comes again, whether or not its client stayed.
    """

    request_id: str
    event_id: str
    path: str
    arrived_at_s: float
    started_at_s: float
    principal: Principal | None = None
    asked: Asked | None = None
    replayed: bool = False
    kept: bool = False
    call: Call | None = None
    hold: Hold | None = None
    choice: Choice | None = None
    answer: Answer | None = None
    status: int = 0
    error: ServingError | None = None

    def on_choice(self, choice: Choice) -> None:
        """Called for each replica tried; the last one counts."""
        self.choice = choice

    @property
    def served_by(self) -> Headers:
        """The header that says by which pool, version and table; to admins also why."""
        if self.choice is None:
            return []
        found = [(b"x-served-by", self.choice.served_by)]
        if self.principal is not None and self.principal.is_admin:
            found.append((b"x-router-reason", self.choice.route.reason.encode()))
        return found

    def summary(self, usd: float | None) -> dict[str, Any]:
        """What an answer of our own API says beside its text."""
        assert self.call is not None and self.answer is not None and self.choice is not None
        usage = self.answer.usage
        return {
            "model": self.call.view.model,
            "version": self.choice.route.version,
            "adapter": self.call.view.adapter,
            "finish_reason": self.answer.finish_reason,
            "usage": {
                "num_prompt_tokens": usage.num_prompt_tokens,
                "num_cached_tokens": usage.num_cached_tokens,
                "num_output_tokens": usage.num_output_tokens,
                "usd": usd,
            },
        }

    @property
    def usage(self) -> Usage | None:
        """Tokens to count: as reported or seen; the estimated prompt when an engine had it and never answered."""
        if self.answer is not None:
            return self.answer.usage
        if self.call is not None and self.is_worked_on:
            return Usage(self.call.view.num_prompt_tokens)
        return None

    @property
    def is_worked_on(self) -> bool:
        """Whether an engine may have worked for it: it was sent there, and not turned away."""
        return self.choice is not None and not isinstance(self.error, _TURNED_AWAY)

    def num_tokens_to_settle(self, usage: Usage | None, now_s: float) -> int:
        """For the limits: what was used; the most that can have been where the client ended it before an answer came.

        Else who ends requests shortly before their answers would have them for nothing.
        """
        if usage is None:
            return 0
        call, choice = self.call, self.choice
        is_unreported = self.answer is None and isinstance(self.error, ClientGone | DeadlineExceeded)
        if is_unreported and call is not None and choice is not None:
            return most_tokens_done(call.view, choice.pool.cost_rows, now_s - choice.at_s, call.num_choices)
        return usage.num_prompt_tokens + usage.num_output_tokens

    @property
    def ttft_s(self) -> float | None:
        """From arrival to the first token of a stream."""
        if self.call is None or not self.call.stream or self.answer is None or self.answer.first_token_at_s is None:
            return None
        return self.answer.first_token_at_s - self.arrived_at_s

    @property
    def gone_phase(self) -> str:
        """How far a request had come whose client left."""
        if self.call is None:
            return "sending"
        if not self.call.stream:
            return "unary"
        return "before_first_chunk" if self.answer is None else "mid_stream"


Observe = Callable[["Accounts", Outcome, Usage | None, float | None], None]

_TURNED_AWAY = (BadRequest, NotFound, Overloaded, Unavailable)


class Accounts:
    """Closes requests: what was reserved, metrics, the usage event, the line in the log.

    Args:
        metrics: of this worker.
        spool: takes the usage events; None writes none.
        clock: ends requests.
        access_log: which requests get a line.
        observe: told by whom, of each request that has ended, its usage and its price; None tells nobody.
    """

    def __init__(
        self,
        metrics: GatewayMetrics,
        spool: UsageSpool | None,
        clock: Clock,
        access_log: AccessLog,
        observe: Observe | None = None,
    ) -> None:
        self._observe = observe
        self._metrics = metrics
        self._spool = spool
        self.clock = clock
        self._access_log = access_log
        self._prices = Prices()

    def usd(self, outcome: Outcome) -> float | None:
        """What the request has cost so far by the cost table, at the load in which it was dispatched."""
        return self._usd(outcome, outcome.usage, self.clock.now_s())

    def _usd(self, outcome: Outcome, usage: Usage | None, now_s: float) -> float | None:
        choice = outcome.choice
        if usage is None or choice is None:
            return None
        used = Tokens(usage.num_prompt_tokens, usage.num_cached_tokens, usage.num_output_tokens)
        return self._prices.usd(choice.pool, used, num_requests=choice.num_requests, now_s=now_s).usd

    def most_usd(self, call: Call, pools: Sequence[PoolView]) -> float | None:
        """The most that the call can cost in any of the pools; None when none is measured."""
        return self._prices.most_usd(
            call.view,
            pools,
            max_output_tokens=call.max_output_tokens,
            num_choices=call.num_choices,
            now_s=self.clock.now_s(),
        )

    def close(self, outcome: Outcome) -> None:
        """Counts and writes down a request that has ended, however it ended."""
        ended_at_s = self.clock.monotonic_s()
        usage, now_s = outcome.usage, self.clock.now_s()
        usd = self._usd(outcome, usage, now_s)
        if outcome.hold is not None:
            outcome.hold.settle(outcome.num_tokens_to_settle(usage, now_s), usd)
        code = "ok" if outcome.error is None else str(outcome.error.code)
        self._count(outcome, usage, usd, code, ended_at_s)
        if self._spool is not None and outcome.asked is not None:
            self._spool.append(_event(outcome, usage, usd, now_s))
        if self._observe is not None:
            self._observe(self, outcome, usage, usd)
        is_wanted = self._access_log is AccessLog.ALL or (
            self._access_log is AccessLog.ERRORS and outcome.error is not None
        )
        if is_wanted:
            logger.info("request", extra={"fields": _fields(outcome, usage, code, ended_at_s)})

    def write_down(self, outcome: Outcome, waste: Waste) -> None:
        """Writes the usage event of work that no client asked for; nothing where no engine worked."""
        usage, now_s = outcome.usage, self.clock.now_s()
        if self._spool is not None and outcome.principal is not None and usage is not None:
            usd = self._usd(outcome, usage, now_s)
            self._spool.append(replace(_event(outcome, usage, usd, now_s), waste=waste))

    def _count(self, outcome: Outcome, usage: Usage | None, usd: float | None, code: str, ended_at_s: float) -> None:
        model = "" if outcome.call is None else outcome.call.view.model
        pool = "" if outcome.choice is None else outcome.choice.route.pool_id
        counters = self._metrics.of_pool(model, pool)
        counters.requests(outcome.path, str(outcome.status), code).amount += 1
        counters.duration.observe(ended_at_s - outcome.arrived_at_s)
        if outcome.call is not None and outcome.call.stream and (ttft_s := outcome.ttft_s) is not None:
            counters.ttft.observe(ttft_s)
        if isinstance(outcome.error, ClientGone):
            self._metrics.clients_gone.labels(model, outcome.gone_phase).inc()
        if usage is not None:
            counters.prompt_tokens.amount += usage.num_prompt_tokens
            if usage.num_cached_tokens:
                counters.cached_tokens.amount += usage.num_cached_tokens
            counters.output_tokens.amount += usage.num_output_tokens
            if not usage.exact:
                counters.inexact_usage.amount += 1
        if usd is not None:
            counters.usd.amount += usd


def _event(outcome: Outcome, usage: Usage | None, usd: float | None, ended_at_s: float) -> UsageEvent:
    assert outcome.principal is not None and outcome.asked is not None
    route = None if outcome.choice is None else outcome.choice.route
    return UsageEvent(
        id=outcome.event_id,
        tenant=outcome.principal.tenant.tenant_id,
        request_id=outcome.request_id,
        key_id=outcome.principal.key_id,
        model=outcome.asked.model,
        version="" if route is None else route.version,
        adapter=outcome.asked.adapter,
        pool="" if route is None else route.pool_id,
        replica="" if route is None else route.replica_id,
        tier=outcome.asked.tier,
        num_prompt_tokens=0 if usage is None else usage.num_prompt_tokens,
        num_cached_tokens=0 if usage is None else usage.num_cached_tokens,
        num_output_tokens=0 if usage is None else usage.num_output_tokens,
        finish_reason=None if outcome.answer is None else outcome.answer.finish_reason,
        usd=0.0 if usage is None else usd,
        cost_table_run_id=None if outcome.choice is None else outcome.choice.cost_table_run_id,
        status=outcome.status,
        started_at_s=outcome.started_at_s,
        ended_at_s=ended_at_s,
        waste=None if usage is None or outcome.error is None else waste_of(outcome.error),
        exact=usage is None or usage.exact,
        replayed=outcome.replayed,
    )


def _fields(outcome: Outcome, usage: Usage | None, code: str, ended_at_s: float) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "request_id": outcome.request_id,
        "event_id": outcome.event_id,
        "endpoint": outcome.path,
        "status": outcome.status,
        "code": code,
        "e2e_s": round(ended_at_s - outcome.arrived_at_s, 6),
        "ttft_s": None if outcome.ttft_s is None else round(outcome.ttft_s, 6),
    }
    if outcome.call is not None:
        view = outcome.call.view
        fields |= {"model": view.model, "tier": view.tier, "stream": outcome.call.stream}
    if outcome.choice is not None:
        route = outcome.choice.route
        fields |= {"pool": route.pool_id, "version": route.version, "replica": route.replica_id, "reason": route.reason}
    if usage is not None:
        fields |= {
            "num_prompt_tokens": usage.num_prompt_tokens,
            "num_cached_tokens": usage.num_cached_tokens,
            "num_output_tokens": usage.num_output_tokens,
            "usage_exact": usage.exact,
        }
    if outcome.answer is not None:
        fields["finish_reason"] = outcome.answer.finish_reason
    return fields
