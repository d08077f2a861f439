"""Invariants of routing under a closed loop on a virtual clock: docs/invariants.md lists them."""

from __future__ import annotations

import heapq
import random
from collections import Counter
from dataclasses import asdict

import pytest

from serving.core.chance import Chance
from serving.core.decisions import Route, RouteRecord
from serving.core.policies import routing
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request, a_row


def closed_loop(seed: int, *, concurrency: int = 16, num_requests: int = 400) -> tuple[list[RouteRecord], Counter[str]]:
    """Routes `num_requests`, `concurrency` at a time, through engines that take one second a request."""
    fleet = a_fleet(
        a_pool("a", a_replica("a0"), a_replica("a1"), engine_fingerprint="a"),
        a_pool("b", a_replica("b0"), engine_fingerprint="b"),
        rows=(a_row(engine_fingerprint="a"), a_row(engine_fingerprint="b", usd_per_million_output_tokens=20.0)),
    )
    rng = random.Random(seed)
    events: list[tuple[float, int, str, str]] = []
    records: list[RouteRecord] = []
    now_s = NOW_S
    for number in range(num_requests):
        if len(events) >= concurrency:
            now_s, _, replica_id, request_id = heapq.heappop(events)
            fleet.on_finished(replica_id, request_id, now_s)
        request = a_request(f"r{number}")
        view = fleet.view(request, now_s)
        decision_seed = rng.getrandbits(64)
        decision = routing.route(request, view, Chance(decision_seed))
        assert isinstance(decision, Route)
        records.append(RouteRecord.of(request, view, decision_seed, (), decision))
        fleet.on_dispatched(decision.replica_id, request, now_s)
        heapq.heappush(events, (now_s + rng.expovariate(1.0), number, decision.replica_id, request.request_id))
    while events:
        at_s, _, replica_id, request_id = heapq.heappop(events)
        fleet.on_finished(replica_id, request_id, at_s)
    return records, Counter({r.replica_id: r.num_in_flight for r in fleet.replicas})


@pytest.mark.parametrize("seed", range(3))
def test_conservation_every_dispatch_is_finished(seed: int) -> None:
    _, left = closed_loop(seed)
    assert not any(left.values())


def test_same_seed_same_bytes() -> None:
    first, second, other = (repr([asdict(r) for r in closed_loop(seed)[0]]) for seed in (7, 7, 8))
    assert first == second
    assert first != other


def test_causality_a_decision_reads_only_what_happened_before_it() -> None:
    records, _ = closed_loop(1)
    for number, record in enumerate(records):
        in_flight = sum(replica.num_in_flight for pool in record.view.pools for replica in pool.ready)
        assert in_flight == min(number, 15)


def test_every_decision_of_a_run_replays() -> None:
    records, _ = closed_loop(2)
    assert all(routing.replay(record) == record.decision for record in records)
