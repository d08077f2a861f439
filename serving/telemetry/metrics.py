"""The gateway's metrics, in Prometheus' terms.

After `shared_folder.share(folder)`, any worker's page shows the sum over all workers that share it; a worker that
was killed keeps its counts and loses its gauges.

Labels: `model` and `pool` are names from the routing table, empty where a request did not get that far; never
anything that a client wrote.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.multiprocess import MultiProcessCollector, mark_process_dead

from serving.core.policies.cost import RowState
from serving.telemetry import shared_folder
from serving.telemetry.tally import CountTally, SpreadTally, TalliesBy, Tally

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_OverWorkers = Literal["livesum", "livemin", "livemax"]

_TTFT_BUCKETS_S = (0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.5, 5.0, 10.0, 30.0)
_E2E_BUCKETS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 120.0, 300.0)


class GatewayMetrics:
    """Every metric of a gateway worker. Several may live in a process (tests): each has a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._pools: frozenset[str] = frozenset()
        self.num_in_flight = 0
        self._of_pool: dict[tuple[str, str], PoolMetrics] = {}
        self._make_counters()
        self._make_histograms()
        self._make_gauges()

    def _make_counters(self) -> None:
        def counter(name: str, text: str, *labels: str) -> Counter:
            return Counter(f"workbench_{name}", text, labels, registry=self._registry)

        by_pool = ("model", "pool")
        self.requests = counter(
            "requests",
            "Requests answered, by HTTP status and error code; a stream that broke off has status 200 and its code.",
            *by_pool,
            "endpoint",
            "status",
            "code",
        )
        self.prompt_tokens = counter("prompt_tokens", "Prompt tokens of answers.", *by_pool)
        self.cached_tokens = counter("cached_tokens", "Prompt tokens that came from the prefix cache.", *by_pool)
        self.output_tokens = counter("output_tokens", "Tokens generated.", *by_pool)
        self.inexact_usage = counter(
            "inexact_usage", "Answers whose tokens were counted here: the engine's report did not come.", *by_pool
        )
        self.usd = counter("usd", "Cost of answers by the cost table; pools without measured rows add none.", *by_pool)
        self.clients_gone = counter(
            "clients_gone", "Clients that left before their answer was complete.", "model", "phase"
        )
        self.route_decisions = counter(
            "route_decisions", "Routing decisions: what set the replica apart, or why none was.", *by_pool, "reason"
        )
        self.guardrails = counter(
            "guardrail_finds",
            "Checks that found something or failed, and what came of it.",
            "check",
            "outcome",
        )
        self.breaker_trips = counter("cost_breaker_trips", "Tenants' cost breakers that tripped.")
        self.idempotency = counter("idempotency_claims", "Requests with a key, and what they met.", "outcome")
        self.retries = counter("dispatch_retries", "Requests sent on to another replica.", *by_pool, "cause")

    def _make_histograms(self) -> None:
        def histogram(name: str, text: str, buckets_s: tuple[float, ...]) -> Histogram:
            name = f"workbench_{name}_seconds"
            return Histogram(name, text, ("model", "pool"), buckets=buckets_s, registry=self._registry)

        self.ttft = histogram(
            "time_to_first_token", "From a request's arrival to its first token (streams).", _TTFT_BUCKETS_S
        )
        self.duration = histogram(
            "request_duration", "From a request's arrival to the end of its answer.", _E2E_BUCKETS_S
        )

    def _make_gauges(self) -> None:
        def gauge(name: str, text: str, *labels: str, over_workers: _OverWorkers) -> Gauge:
            return Gauge(f"workbench_{name}", text, labels, registry=self._registry, multiprocess_mode=over_workers)

        self.in_flight = gauge("requests_in_flight", "Requests now in the gateway.", over_workers="livesum")
        self.table_epoch = gauge(
            "routing_table_epoch",
            "Epoch of the routing table in use; the lowest of the workers.",
            over_workers="livemin",
        )
        self.store_up = gauge(
            "store_up", "1 while the store answers; the lowest of the workers.", over_workers="livemin"
        )
        self.spool_backlog = gauge(
            "usage_events_waiting", "Usage events that the disk has not taken yet.", over_workers="livesum"
        )
        self.usage_events_lost = gauge(
            "usage_events_lost",
            "Usage events lost since the start: the disk took none.",
            over_workers="livesum",
        )
        self.cost_rows_state = gauge(
            "cost_rows_state",
            "1 for the state of each pool's cost rows; any but 'fresh' is routed by load alone.",
            "pool",
            "state",
            over_workers="livemax",
        )

    def count_guardrail(self, check: str, outcome: str) -> None:
        """Counts what came of a check that found something or failed."""
        self.guardrails.labels(check, outcome).inc()

    def show_spool(self, num_backlog: int, num_lost: int) -> None:
        """Shows how the usage spool is."""
        self.spool_backlog.set(num_backlog)
        self.usage_events_lost.set(num_lost)

    def count_trip(self, tenant_id: str) -> None:
        """Counts that a tenant's cost breaker tripped; which tenant's is in the log, for tenants are many."""
        self.breaker_trips.inc()

    def count_idempotency(self, outcome: str) -> None:
        """Counts what a request with an Idempotency-Key met."""
        self.idempotency.labels(outcome).inc()

    def of_pool(self, model: str, pool: str) -> PoolMetrics:
        """What every request to the pool counts; kept, for finding a labelled counter costs more than adding to it."""
        found = self._of_pool.get((model, pool))
        if found is None:
            found = self._of_pool[model, pool] = PoolMetrics(self, model, pool)
        return found

    def set_cost_states(self, states: Mapping[str, RowState]) -> None:
        """Shows the state of each pool's cost rows; pools that are gone show none."""
        for pool in self._pools | states.keys():
            for state in RowState:
                self.cost_rows_state.labels(pool, state).set(states.get(pool) is state)
        self._pools = frozenset(states)

    def flush(self) -> None:
        """Adds what was counted since the last time; `page` does it too, for this worker."""
        self.in_flight.set(self.num_in_flight)
        for pool in self._of_pool.values():
            pool.flush()

    def page(self) -> bytes:
        """The metrics as text; of all workers when they share a folder."""
        self.flush()
        folder = shared_folder.folder()
        if folder is None:
            return generate_latest(self._registry)
        for pid in _dead(shared_folder.pids_with_gauges(folder)):
            mark_process_dead(pid, str(folder))
        merged = CollectorRegistry()
        MultiProcessCollector(merged, str(folder))
        return generate_latest(merged)


class PoolMetrics:
    """What the requests to one model and pool count."""

    def __init__(self, metrics: GatewayMetrics, model: str, pool: str) -> None:
        self.prompt_tokens = CountTally(metrics.prompt_tokens.labels(model, pool))
        self.cached_tokens = CountTally(metrics.cached_tokens.labels(model, pool))
        self.output_tokens = CountTally(metrics.output_tokens.labels(model, pool))
        self.inexact_usage = CountTally(metrics.inexact_usage.labels(model, pool))
        self.usd = CountTally(metrics.usd.labels(model, pool))
        self.ttft = SpreadTally(metrics.ttft.labels(model, pool))
        self.duration = SpreadTally(metrics.duration.labels(model, pool))
        self.requests = TalliesBy(partial(metrics.requests.labels, model, pool))
        self.decisions = TalliesBy(partial(metrics.route_decisions.labels, model, pool))
        self._all: tuple[Tally, ...] = (
            *(self.prompt_tokens, self.cached_tokens, self.output_tokens, self.inexact_usage, self.usd),
            *(self.ttft, self.duration, self.requests, self.decisions),
        )

    def flush(self) -> None:
        """Adds what was counted to the metrics."""
        for tally in self._all:
            tally.flush()


def _dead(pids: Iterable[int]) -> list[int]:
    return [pid for pid in pids if not shared_folder.is_alive(pid)]
