"""Routing: filters, sample, scores, and the policy's own contract."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.core.chance import Chance
from serving.core.decisions import Reject, Route
from serving.core.errors import ErrorCode
from serving.core.policies import routing
from serving.core.policies.cost import RowState
from serving.core.state import ReplicaState, RoutingPolicy
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request, a_row, a_snapshot


def decide(fleet: object, seed: int = 0, excluded: frozenset[str] = frozenset(), **request: object) -> Route | Reject:
    asked = a_request(**request)
    return routing.route(asked, fleet.view(asked, NOW_S), Chance(seed), excluded)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "pools",
    [
        (),
        (a_pool("empty"),),
        (a_pool("draining", a_replica("a", ReplicaState.DRAINING), a_replica("b", ReplicaState.DOWN)),),
        (a_pool("reserved", a_replica("a", ReplicaState.RESERVED)),),
    ],
)
def test_nothing_ready_is_a_reject_with_a_time_to_retry(pools: tuple) -> None:
    fleet = a_fleet(*pools or (a_pool("none"),))
    decision = decide(fleet)
    assert isinstance(decision, Reject)
    assert decision.retry_after_s > 0
    assert sum(decision.num_filtered.values()) == sum(len(p.replicas) for p in pools)


def test_one_replica_is_chosen_whatever_its_load() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_snapshot(a_snapshot("a", num_running=500, num_waiting=500, kv_cache_usage_frac=1.0))
    decision = decide(fleet)
    assert isinstance(decision, Route)
    assert (decision.replica_id, decision.reason) == ("a", "only_candidate")


def test_ties_are_broken_by_chance_and_evenly() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    chosen = Counter(decide(fleet, seed).replica_id for seed in range(400))  # type: ignore[union-attr]
    assert 150 < chosen["a"] < 250


def test_the_freer_kv_cache_wins() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    fleet.on_snapshot(a_snapshot("a", kv_cache_usage_frac=0.9))
    fleet.on_snapshot(a_snapshot("b", kv_cache_usage_frac=0.1))
    decision = decide(fleet)
    assert isinstance(decision, Route)
    assert (decision.replica_id, decision.reason) == ("b", "kv_headroom")


def test_own_dispatches_count_before_any_scrape_shows_them() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    chosen: Counter[str] = Counter()
    for number in range(40):
        decision = decide(fleet, number)
        assert isinstance(decision, Route)
        fleet.on_dispatched(decision.replica_id, a_request(f"r{number}"), NOW_S)
        chosen[decision.replica_id] += 1
    assert abs(chosen["a"] - chosen["b"]) <= 1


def test_a_stale_scrape_is_not_overload() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    fleet.on_snapshot(a_snapshot("a", observed_at_s=NOW_S - 60, num_running=999, kv_cache_usage_frac=1.0))
    fleet.on_snapshot(a_snapshot("b", num_running=5, kv_cache_usage_frac=0.2))
    decision = decide(fleet)
    assert isinstance(decision, Route)
    by_id = {c.replica_id: c for c in decision.candidates}
    assert by_id["a"].scores["kv_headroom"] is None
    assert decision.replica_id == "a"


def test_the_cheaper_pool_wins_at_equal_load_and_a_swap_of_prices_moves_it() -> None:
    pools = (
        a_pool("big", a_replica("a"), engine_fingerprint="big"),
        a_pool("small", a_replica("b"), engine_fingerprint="small"),
    )
    for cheap, dear, winner in (("big", "small", "a"), ("small", "big", "b")):
        rows = (
            a_row(engine_fingerprint=cheap),
            a_row(engine_fingerprint=dear, usd_per_million_output_tokens=30.0),
        )
        decision = decide(a_fleet(*pools, rows=rows))
        assert isinstance(decision, Route)
        assert (decision.replica_id, decision.reason) == (winner, "cost")
        assert decision.usd == pytest.approx((100 * 1.0 + 100 * 10.0) / 1e6)


def test_an_expired_row_stops_counting_and_says_so() -> None:
    pools = (
        a_pool("big", a_replica("a"), engine_fingerprint="big"),
        a_pool("small", a_replica("b"), engine_fingerprint="small"),
    )
    rows = (
        a_row(engine_fingerprint="big", usd_per_million_output_tokens=30.0),
        a_row(engine_fingerprint="small", expires_at_s=NOW_S - 1),
    )
    fleet = a_fleet(*pools, rows=rows)
    decision = decide(fleet)
    assert isinstance(decision, Route)
    states = {c.pool_id: (c.cost_state, c.scores["cost"]) for c in decision.candidates}
    assert states == {"big": (RowState.FRESH, 1.0), "small": (RowState.EXPIRED, None)}
    assert fleet.cost_states(NOW_S) == {"big": RowState.FRESH, "small": RowState.EXPIRED}


def test_the_cheap_pool_yields_when_it_is_full() -> None:
    pools = (
        a_pool("cheap", a_replica("a"), engine_fingerprint="cheap"),
        a_pool("dear", a_replica("b"), engine_fingerprint="dear"),
    )
    rows = (a_row(engine_fingerprint="cheap"), a_row(engine_fingerprint="dear", usd_per_million_output_tokens=20.0))
    fleet = a_fleet(*pools, rows=rows)
    for number in range(40):
        fleet.on_dispatched("a", a_request(f"r{number}"), NOW_S)
    fleet.on_snapshot(a_snapshot("a", num_running=40, kv_cache_usage_frac=0.9))
    fleet.on_snapshot(a_snapshot("b"))
    decision = decide(fleet)
    assert isinstance(decision, Route)
    assert decision.replica_id == "b"


def test_a_replica_that_already_failed_the_request_is_not_tried_again() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    decisions = [decide(fleet, seed, frozenset({"a"})) for seed in range(20)]
    assert {d.replica_id for d in decisions if isinstance(d, Route)} == {"b"}
    assert isinstance(decide(fleet, excluded=frozenset({"a", "b"})), Reject)


def test_a_request_that_names_its_replica_goes_there_or_nowhere() -> None:
    fleet = a_fleet(
        a_pool("p", *(a_replica(name) for name in "abcdef")),
        a_pool("q", a_replica("g", ReplicaState.STARTING), engine_fingerprint="q", region="eu"),
    )
    fleet.on_snapshot(a_snapshot("c", num_running=500, kv_cache_usage_frac=1.0))
    decisions = [decide(fleet, seed, target_replica="c") for seed in range(20)]
    assert {(d.replica_id, d.reason) for d in decisions if isinstance(d, Route)} == {("c", routing.TARGET)}
    assert decisions[0].num_filtered[routing.TARGET] == 5
    for refused in (
        decide(fleet, target_replica="nobody"),
        decide(fleet, target_replica="g"),
        decide(fleet, target_replica="c", regions=("eu",)),
        decide(fleet, excluded=frozenset("c"), target_replica="c"),
    ):
        assert isinstance(refused, Reject)
        assert (refused.code, refused.reason) == (ErrorCode.REPLICA_NOT_FOUND, routing.TARGET)


def test_every_pool_is_sampled_so_that_the_cheap_one_is_always_seen() -> None:
    many = [a_replica(f"a{i}") for i in range(50)]
    fleet = a_fleet(a_pool("many", *many), a_pool("few", a_replica("b")))
    decision = decide(fleet)
    assert isinstance(decision, Route)
    assert Counter(c.pool_id for c in decision.candidates) == {"many": 2, "few": 1}


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        (RoutingPolicy(weights={"kv_headrom": 1.0}), "unknown scorer 'kv_headrom'"),
        (RoutingPolicy(weights={"cost": float("nan")}), "finite"),
        (RoutingPolicy(weights={"cost": -1.0}), "not negative"),
        (RoutingPolicy(weights={}), "at least one"),
        (RoutingPolicy(weights={"cost": 0.0}), "all zero"),
        (RoutingPolicy(num_samples=0), "num_samples"),
    ],
)
def test_a_policy_that_cannot_decide_is_refused(policy: RoutingPolicy, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        routing.check(policy)


@pytest.mark.parametrize("name", sorted(routing.SCORERS))
@pytest.mark.parametrize(
    "snapshot", [{}, {"num_running": 10**6, "kv_cache_usage_frac": 1.7}, {"kv_cache_capacity_tokens": 0}]
)
def test_every_scorer_stays_in_its_range(name: str, snapshot: dict) -> None:
    free = a_row(usd_per_million_output_tokens=0.0)
    fleet = a_fleet(a_pool("p", a_replica("a"), adapters=("poet",)), rows=(free,), weights={name: 1.0})
    fleet.on_snapshot(a_snapshot("a", **snapshot))
    decision = decide(fleet, expected_output_tokens=10**6, adapter="poet")
    assert isinstance(decision, Route)
    score = decision.candidates[0].scores[name]
    assert score is not None
    assert 0.0 <= score <= 1.0


def test_only_pools_in_granted_regions_are_chosen() -> None:
    fleet = a_fleet(
        a_pool("here", a_replica("a"), region="eu"), a_pool("there", a_replica("b"), a_replica("c"), region="us")
    )
    for regions, allowed in {("eu",): {"a"}, ("us",): {"b", "c"}, ("eu", "us"): {"a", "b", "c"}}.items():
        chosen = {decide(fleet, seed, regions=regions).replica_id for seed in range(40)}  # type: ignore[union-attr]
        assert chosen == allowed
    decision = decide(fleet, regions=("eu",))
    assert decision.num_filtered == {"region": 2}
    assert decide(fleet, regions=("*",)).num_filtered == {}


@pytest.mark.parametrize(
    ("elsewhere", "granted", "reason"),
    [
        ((a_replica("b"),), (), "region"),
        ((), (), "no_ready_replica"),
        ((a_replica("b"),), (a_replica("a", ReplicaState.DOWN),), "region"),
        ((a_replica("b", ReplicaState.DOWN),), (a_replica("a", ReplicaState.DOWN),), "no_ready_replica"),
    ],
)
def test_a_reject_says_that_the_region_was_what_stood_in_the_way(elsewhere: tuple, granted: tuple, reason: str) -> None:
    fleet = a_fleet(a_pool("here", *granted, region="eu"), a_pool("there", *elsewhere, region="us"))
    decision = decide(fleet, regions=("eu",))
    assert isinstance(decision, Reject)
    assert decision.reason == reason


def test_a_tenant_without_any_region_of_the_model_is_told_so() -> None:
    decision = decide(a_fleet(a_pool("there", a_replica("b", ReplicaState.DOWN), region="us")), regions=("eu",))
    assert isinstance(decision, Reject)
    assert decision.reason == "region"
