"""The contract that every scorer keeps: broken inputs decide all the same, and a score is in [0, 1] or unknown."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from serving.core.chance import Chance
from serving.core.decisions import Decision, Reject, Route
from serving.core.policies import routing
from serving.core.state import PoolView, ReplicaState, ReplicaView, RouteView, RoutingPolicy
from tests.unit.core_examples import NOW_S, a_pool, a_replica, a_request, a_row

NAN, INF = float("nan"), float("inf")
BROKEN = {
    "cache use is NaN": {"kv_cache_usage_frac": NAN},
    "cache use is infinite": {"kv_cache_usage_frac": INF},
    "cache use is negative": {"kv_cache_usage_frac": -3.0},
    "capacity is NaN": {"kv_cache_capacity_tokens": NAN},
    "capacity is zero": {"kv_cache_capacity_tokens": 0},
    "running is NaN": {"num_running": NAN},
    "waiting is infinite": {"num_waiting": INF},
    "own tokens are NaN": {"num_in_flight": 1, "in_flight_tokens": NAN},
    "since the scrape is NaN": {"num_requests_since_scrape": NAN, "num_tokens_since_scrape": NAN},
    "since the scrape is negative": {"num_requests_since_scrape": -99, "num_tokens_since_scrape": -99},
    "scraped at NaN": {"observed_at_s": NAN},
    "never scraped": {"observed_at_s": None},
}
PRICES = {"measured": 1.0, "free": 0.0, "NaN": NAN, "infinite": INF, "negative": -1.0}


def replica(name: str, **changes: object) -> ReplicaView:
    view = ReplicaView(name, f"http://127.0.0.1/{name}", ReplicaState.READY, NOW_S, kv_cache_capacity_tokens=10_000)
    return replace(view, **changes)  # type: ignore[arg-type]


def pool(*ready: ReplicaView, usd: float = 1.0, **not_ready: int) -> PoolView:
    rows = tuple(
        a_row(concurrency=number, usd_per_million_input_tokens=usd, usd_per_million_output_tokens=usd)
        for number in (1, 8)
    )
    return PoolView(a_pool("p", *(a_replica(view.replica_id) for view in ready)), ready, not_ready, rows)


def decide(scorer: str, *pools: PoolView, seed: int = 0) -> Decision:
    view = RouteView(now_s=NOW_S, epoch=1, policy=RoutingPolicy(weights={scorer: 1.0}), pools=pools)
    return routing.route(a_request(), view, Chance(seed))


def assert_sound(decision: Decision, scorer: str) -> None:
    assert isinstance(decision, Route)
    for candidate in decision.candidates:
        assert candidate.scores.keys() == {scorer}
        for score in (candidate.score, *candidate.scores.values()):
            assert score is None or 0.0 <= score <= 1.0, f"{scorer} scores {score}"
        assert candidate.usd is None or math.isfinite(candidate.usd)
    assert decision.usd is None or math.isfinite(decision.usd)


every_scorer = pytest.mark.parametrize("scorer", sorted(routing.SCORERS))


@every_scorer
@pytest.mark.parametrize("changes", BROKEN.values(), ids=BROKEN)
def test_a_broken_scrape_decides_and_leaks_nothing(scorer: str, changes: dict[str, object]):
    assert_sound(decide(scorer, pool(replica("a", **changes), replica("b"))), scorer)
    assert_sound(decide(scorer, pool(replica("a", **changes))), scorer)


@every_scorer
@pytest.mark.parametrize("usd", PRICES.values(), ids=PRICES)
def test_a_broken_price_decides_and_leaks_nothing(scorer: str, usd: float):
    assert_sound(decide(scorer, pool(replica("a"), usd=usd), pool(replica("b"), usd=2.0)), scorer)
    assert_sound(decide(scorer, pool(replica("a"), usd=usd)), scorer)


@every_scorer
def test_a_scrape_that_is_no_number_does_not_keep_a_good_replica_from_being_chosen(scorer: str):
    broken = replica("a", kv_cache_usage_frac=NAN, num_running=NAN)
    chosen = {decide(scorer, pool(broken, replica("b")), seed=seed).replica_id for seed in range(40)}  # type: ignore[union-attr]
    assert "b" in chosen


@every_scorer
@pytest.mark.parametrize(
    "pools",
    [(), (pool(),), (pool(draining=3),), (pool(draining=1), pool(down=2, reserved=1))],
    ids=["no pool", "empty pool", "all draining", "none ready in two pools"],
)
def test_nothing_ready_is_a_reject(scorer: str, pools: tuple[PoolView, ...]):
    decision = decide(scorer, *pools)
    assert isinstance(decision, Reject)
    assert decision.retry_after_s > 0
    assert decision.num_filtered == {
        state: sum(view.num_not_ready.get(state, 0) for view in pools)
        for state in {state for view in pools for state in view.num_not_ready}
    }


@every_scorer
def test_one_replica_is_chosen(scorer: str):
    decision = decide(scorer, pool(replica("only", num_running=10**9, kv_cache_usage_frac=1.0)))
    assert_sound(decision, scorer)
    assert isinstance(decision, Route)
    assert (decision.replica_id, decision.reason) == ("only", "only_candidate")


@every_scorer
def test_ties_go_either_way_by_the_seed_alone(scorer: str):
    decisions = [decide(scorer, pool(replica("a"), replica("b")), seed=seed) for seed in range(40)]
    assert {decision.replica_id for decision in decisions if isinstance(decision, Route)} == {"a", "b"}
    assert decisions == [decide(scorer, pool(replica("a"), replica("b")), seed=seed) for seed in range(40)]
