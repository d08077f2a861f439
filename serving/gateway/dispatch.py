"""From a checked call to an answer that a replica has begun: choose, count, send, try another.

choose ── Reject ────────────────────────────▶ 503 with Retry-After
  └─ Route ── count ── send ── not connected ▶ another replica, twice at most
                          ├── queue full ────▶ another replica, once; then 429 with Retry-After
                          └── begun ─────────▶ Dispatched; `close()` takes it off the count, whatever its end
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from serving.core.chance import Chance
from serving.core.decisions import Reject, Route
from serving.core.errors import ErrorCode, NotFound, Overloaded, ServingError, Unavailable
from serving.core.fleet import Fleet
from serving.core.policies import routing
from serving.core.ports import Clock
from serving.core.state import PoolView, RouteView
from serving.core.values import value
from serving.engine.client import ConnectFailed, EngineResponse
from serving.gateway.connections import Connections
from serving.gateway.http_errors import ENGINE_BUSY_RETRY_AFTER_S, EngineBusy
from serving.gateway.relay import Answer, open_answer
from serving.gateway.request import Call
from serving.telemetry.decision_log import DecisionLog
from serving.telemetry.metrics import GatewayMetrics

MAX_CONNECT_FAILURES = 3
MAX_BUSY = 2
UNREACHABLE_RETRY_AFTER_S = 2.0
TARGET_HEADER = "x-target-replica"
MAX_NAMED = 16
"""Replicas that an error names as the choice there is."""


@value
class Choice:
    """A route, the pool that it leads to, when it was chosen (Unix seconds), and the table it was chosen by."""

    route: Route
    pool: PoolView
    at_s: float
    epoch: int
    cost_table_run_id: str | None

    @property
    def num_requests(self) -> int:
        """Requests that were on the replica already."""
        chosen = self.route.replica_id
        for candidate in self.route.candidates:
            if candidate.replica_id == chosen:
                return candidate.num_requests
        raise AssertionError("a route leads to one of its candidates")

    @property
    def served_by(self) -> bytes:
        """Value of the header x-served-by: pool; version; table epoch and cost table run."""
        return f"{self.route.pool_id}; {self.route.version}; {self.epoch}/{self.cost_table_run_id or '-'}".encode()


class Dispatched:
    """A request on a replica. `close()` it exactly when done with it: that stops the engine's work if any is left."""

    def __init__(self, fleet: Fleet, clock: Clock, choice: Choice, call: Call) -> None:
        self.choice = choice
        self.answer: Answer | None = None
        self._fleet = fleet
        self._clock = clock
        self._request_id = call.view.request_id
        self._upstream: EngineResponse | None = None
        fleet.on_dispatched(choice.route.replica_id, call.view, choice.at_s)

    async def begin(self, connections: Connections, call: Call, timeout_s: float) -> None:
        """Sends the call and waits until the engine has begun. Raises ConnectFailed and what `open_answer` does."""
        headers = [(b"content-type", b"application/json"), (b"x-request-id", self._request_id.encode())]
        if call.timeout_s is not None:
            headers.append((b"x-request-timeout-ms", b"%d" % (call.timeout_s * 1000)))
        if call.traceparent is not None:
            headers.append((b"traceparent", call.traceparent))
        self._upstream = await connections.client(self.choice.route.url).request(
            "POST",
            call.endpoint,
            headers=headers,
            body=call.body,
            timeout_s=timeout_s,
        )
        self.answer = await open_answer(self._upstream, call)
        if call.stream:  # a unary answer came whole, and is taken off the count at once
            self._fleet.on_first_token(self.choice.route.replica_id, self._request_id)

    def close(self) -> None:
        """Takes the request off the replica; the engine is told when its answer was not read to the end."""
        if self._upstream is not None:
            self._upstream.abort()
        self._fleet.on_finished(self.choice.route.replica_id, self._request_id, self._clock.now_s())


class Dispatcher:
    """Puts calls on replicas."""

    def __init__(
        self,
        fleet: Fleet,
        connections: Connections,
        metrics: GatewayMetrics,
        clock: Clock,
        rng: random.Random,
        *,
        upstream_timeout_s: float,
        decisions: DecisionLog | None = None,
    ) -> None:
        self._fleet = fleet
        self._connections = connections
        self._metrics = metrics
        self._clock = clock
        self._rng = rng
        self._upstream_timeout_s = upstream_timeout_s
        self._decisions = decisions

    def pools_of(self, call: Call) -> Sequence[PoolView]:
        """The pools of the call's model version. Raises NotFound, BadRequest as `dispatch`."""
        return self._fleet.pools_of(call.view)

    async def dispatch(self, call: Call, on_choice: Callable[[Choice], None]) -> Dispatched:
        """Puts the call on a replica that has begun to answer it; `on_choice` is told each one tried.

        Raises:
            NotFound: no such model or version, or its target replica takes no requests.
            Unavailable: no replica takes requests, or none could be reached.
            Overloaded: the replicas tried have full queues.
            BadRequest: the engine refused the request.
            UpstreamError: the engine failed.
        """
        excluded: set[str] = set()
        failures: list[ServingError] = []
        while True:
            choice = self._choose(call, excluded, failures)
            on_choice(choice)
            dispatched = Dispatched(self._fleet, self._clock, choice, call)
            begun = False
            try:
                await dispatched.begin(self._connections, call, self._upstream_timeout_s)
                begun = True
                return dispatched
            except (ConnectFailed, EngineBusy) as error:
                failures.append(error)
                excluded.add(choice.route.replica_id)
                self._give_up_or_count(call, choice, failures)
            finally:
                if not begun:
                    dispatched.close()

    def _choose(self, call: Call, excluded: set[str], failures: list[ServingError]) -> Choice:
        request = call.view
        view = self._fleet.view(request, self._clock.now_s())
        seed = self._rng.getrandbits(48)
        decision = routing.route(request, view, Chance(seed), excluded)
        if self._decisions is not None:
            self._decisions.offer(request, view, seed, excluded, decision)
        if isinstance(decision, Reject):
            self._metrics.of_pool(request.model, "").decisions(decision.reason).amount += 1
            raise _rejected(call, decision, failures, view)
        self._metrics.of_pool(request.model, decision.pool_id).decisions(decision.reason).amount += 1
        for pool in view.pools:
            if pool.pool.pool_id == decision.pool_id:
                return Choice(decision, pool, view.now_s, view.epoch, view.cost_table_run_id)
        raise AssertionError("a route leads to one of the view's pools")

    def _give_up_or_count(self, call: Call, choice: Choice, failures: list[ServingError]) -> None:
        busy = sum(isinstance(failure, EngineBusy) for failure in failures)
        if busy >= MAX_BUSY or len(failures) - busy >= MAX_CONNECT_FAILURES:
            raise _exhausted(call, failures)
        cause = "busy" if isinstance(failures[-1], EngineBusy) else "unreachable"
        self._metrics.retries.labels(call.view.model, choice.route.pool_id, cause).inc()


def _rejected(call: Call, reject: Reject, failures: list[ServingError], view: RouteView) -> ServingError:
    if failures:  # there were replicas; those tried are the only ones
        return _exhausted(call, failures)
    if reject.code is ErrorCode.REPLICA_NOT_FOUND:
        return _no_target(call, view)
    seen = ", ".join(f"{number} {state}" for state, number in sorted(reject.num_filtered.items())) or "it has none"
    return Unavailable(
        f"no replica of {call.view.model} takes requests now ({seen})",
        code=reject.code,
        retry_after_s=reject.retry_after_s,
    )


def _no_target(call: Call, view: RouteView) -> NotFound:
    """The target takes no requests for this model: why, and which replicas do."""
    target, pools = call.view.target_replica, [p for p in view.pools if call.view.may_run_in(p.pool.region)]
    states = [replica.state for pool in pools for replica in pool.pool.replicas if replica.replica_id == target]
    why = f"is {states[0]}" if states else f"is no replica of {call.view.model} that you may use"
    ready = [replica.replica_id for pool in pools for replica in pool.ready]
    names = ", ".join(ready[:MAX_NAMED]) or "none"
    more = f" and {len(ready) - MAX_NAMED} more" if len(ready) > MAX_NAMED else ""
    return NotFound(
        f"replica {target!r} {why}; those that take requests: {names}{more}",
        code=ErrorCode.REPLICA_NOT_FOUND,
        param=TARGET_HEADER,
    )


def _exhausted(call: Call, failures: list[ServingError]) -> ServingError:
    if any(isinstance(failure, EngineBusy) for failure in failures):
        return Overloaded(
            f"the replicas of {call.view.model} have full queues; try again later",
            retry_after_s=ENGINE_BUSY_RETRY_AFTER_S,
        )
    return Unavailable(
        f"no replica of {call.view.model} could be reached ({failures[-1].message})",
        retry_after_s=UNREACHABLE_RETRY_AFTER_S,
    )
