"""Cost to serve on a replica at its load: usd, TTFT and TPOT with an interval; the SLO filter; who pays for what."""

from __future__ import annotations

from collections import Counter

import pytest

from serving.core.chance import Chance
from serving.core.decisions import Route
from serving.core.fleet import Fleet
from serving.core.policies import routing
from serving.core.policies.cost import RowState, curve_for
from serving.core.policies.quote import Quote, point_at, quote
from serving.core.prefix_index import Prefix
from serving.core.state import CostRow, RequestView, Tier, TierSlo
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request, a_row, a_snapshot


def quoted(
    request: RequestView,
    *rows: CostRow,
    num_requests: int = 0,
    queued: int = 0,
    cached: int = 0,
    quantile: float = 0.99,
) -> Quote:
    curve = curve_for(request, rows, NOW_S)
    assert curve is not None
    return quote(
        request,
        point_at(curve, num_requests + 1, quantile),
        queued_prompt_tokens=queued,
        num_cached_tokens=cached,
        num_devices=1,
    )


def test_the_rows_own_request_gets_the_rows_figures():
    found = quoted(a_request(), a_row())
    assert found.state is RowState.FRESH
    assert found.usd == pytest.approx((100 * 1.0 + 100 * 10.0) / 1e6)
    assert (found.ttft_s, found.ttft_high_s) == (pytest.approx(0.1), pytest.approx(0.2))
    assert (found.tpot_s, found.tpot_high_s) == (pytest.approx(0.02), pytest.approx(0.03))


def test_what_is_ahead_and_a_longer_prompt_take_their_time_and_cached_tokens_spare_it():
    row = a_row()  # 500 prompt tokens a second
    plain = quoted(a_request(num_prompt_tokens=200), row)
    assert plain.ttft_s == pytest.approx(0.1 + 100 / 500)
    assert quoted(a_request(num_prompt_tokens=200), row, queued=500).ttft_s == pytest.approx(plain.ttft_s + 1.0)
    cached = quoted(a_request(num_prompt_tokens=200), row, cached=150)
    assert cached.ttft_s == pytest.approx(0.1 - 50 / 500 + 0.02, abs=0.021)
    assert cached.usd == pytest.approx((50 * 1.0 + 150 * 0.1 + 100 * 10.0) / 1e6)
    assert quoted(a_request(num_prompt_tokens=1), row).ttft_s == 0.02, "a step is the least"


def test_the_load_decides_and_the_quantile_widens():
    rows = (a_row(), a_row(concurrency=16, ttft_p50_s=0.4, ttft_p99_s=1.6, tpot_p50_s=0.05, tpot_p99_s=0.06))
    assert quoted(a_request(), *rows, num_requests=15).tpot_s == pytest.approx(0.05)
    assert 0.02 < quoted(a_request(), *rows, num_requests=3).tpot_s < 0.05
    high = [quoted(a_request(), *rows, num_requests=15, quantile=share).ttft_high_s for share in (0.5, 0.9, 0.99)]
    assert high == sorted(high)
    assert (high[0], high[2]) == (pytest.approx(0.4), pytest.approx(1.6))


def test_rows_without_times_price_all_the_same_and_a_price_that_is_none_says_nothing():
    silent = quoted(a_request(), a_row(ttft_p50_s=None, tpot_p50_s=None))
    assert silent.usd is not None
    assert (silent.ttft_s, silent.ttft_high_s, silent.tpot_s) == (None, None, None)
    assert quoted(a_request(), a_row(usd_per_million_input_tokens=float("nan"))).state is RowState.UNMEASURED


SLO = {"interactive": TierSlo(0.5, 0.025), "batch": TierSlo(60.0, 1.0)}
PAYS = {"interactive": {"latency": 1.0}, "batch": {"cost": 1.0}}
FAST = a_row(
    engine_fingerprint="fast", ttft_p50_s=0.05, ttft_p99_s=0.1, tpot_p50_s=0.01, tpot_p99_s=0.015,
    usd_per_million_output_tokens=30.0,
)  # fmt: skip


def mixed_fleet(**policy: object) -> Fleet:
    return a_fleet(
        a_pool("cheap", a_replica("cheap")),
        a_pool("fast", a_replica("fast"), engine_fingerprint="fast"),
        rows=(a_row(), FAST),
        **policy,
    )


def choose(fleet: Fleet, prefix: Prefix | None = None, seed: int = 0, **request: object) -> Route:
    asked = a_request(**request)
    decision = routing.route(asked, fleet.view(asked, NOW_S, prefix), Chance(seed))
    assert isinstance(decision, Route)
    return decision


def test_interactive_pays_for_latency_and_batch_for_price():
    assert choose(mixed_fleet()).pool_id == "cheap"
    fleet = mixed_fleet(tier_weights=PAYS)
    assert choose(fleet, tier=Tier.INTERACTIVE).pool_id == "fast"
    assert choose(fleet, tier=Tier.INTERACTIVE).reason == "latency"
    assert choose(fleet, tier=Tier.BATCH).pool_id == "cheap"


def test_a_pool_that_misses_the_slo_is_left_out_and_counted():
    fleet = mixed_fleet(slos=SLO, weights={"cost": 1.0})
    decision = choose(fleet, tier=Tier.INTERACTIVE)
    assert (decision.pool_id, decision.num_filtered) == ("fast", {"slo_missed": 1})
    assert choose(fleet, tier=Tier.BATCH).pool_id == "cheap"
    assert choose(fleet, tier=Tier.DEFAULT).pool_id == "cheap", "a tier without an SLO is not filtered"


def test_where_all_miss_the_least_late_is_chosen_and_said():
    fleet = mixed_fleet(slos={"interactive": TierSlo(0.01, 0.001)}, weights={"cost": 1.0})
    decision = choose(fleet, tier=Tier.INTERACTIVE)
    assert (decision.pool_id, decision.reason) == ("fast", "slo_missed")


def test_an_expired_row_is_routed_by_load_and_never_filtered():
    fleet = a_fleet(
        a_pool("old", a_replica("old")),
        a_pool("fast", a_replica("fast"), engine_fingerprint="fast"),
        rows=(a_row(expires_at_s=NOW_S - 1), FAST),
        slos={"default": TierSlo(0.01, 0.001)},
    )
    decision = choose(fleet)
    assert decision.replica_id == "old"
    assert decision.cost_state is RowState.EXPIRED


def test_a_candidate_without_room_in_its_kv_cache_is_left_out():
    fleet = a_fleet(a_pool("p", a_replica("full"), a_replica("free")), weights={"in_flight": 1.0})
    fleet.on_snapshot(a_snapshot("full", kv_cache_usage_frac=0.99))
    fleet.on_snapshot(a_snapshot("free", num_running=50))
    decision = choose(fleet)
    assert (decision.replica_id, decision.num_filtered) == ("free", {"kv_full": 1})


def test_who_holds_the_prompt_is_a_candidate_and_yields_when_it_is_much_busier():
    replicas = [a_replica(f"r{number}") for number in range(40)]
    fleet = a_fleet(a_pool("p", *replicas), weights={"prefix": 1.0, "in_flight": 0.2}, max_imbalance=8)
    prompt = Prefix((1, 2), 50.0)
    fleet.on_dispatched("r7", a_request("before"), NOW_S, prompt)
    assert {choose(fleet, prompt, seed).replica_id for seed in range(20)} == {"r7"}
    assert choose(fleet, prompt).reason == "prefix"
    others = Counter(choose(fleet, None, seed).replica_id for seed in range(200))
    assert others["r7"] < 20
    for number in range(12):
        fleet.on_dispatched("r7", a_request(f"more{number}"), NOW_S)
    assert "r7" not in {choose(fleet, prompt, seed).replica_id for seed in range(20)}


def test_queued_prompt_tokens_are_those_without_a_first_token():
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_dispatched("a", a_request("one", num_prompt_tokens=300), NOW_S)
    fleet.on_dispatched("a", a_request("two", num_prompt_tokens=200), NOW_S)
    assert fleet.replicas[0].queued_prompt_tokens == 500
    fleet.on_first_token("a", "one")
    fleet.on_first_token("a", "one")
    fleet.on_first_token("a", "never")
    assert fleet.replicas[0].queued_prompt_tokens == 200
    fleet.on_finished("a", "one", NOW_S)
    fleet.on_finished("a", "two", NOW_S)
    assert fleet.replicas[0].queued_prompt_tokens == 0


def test_preemptions_lower_the_score_and_fade():
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")), weights={"preemptions": 1.0}, stale_after_s=100.0)
    for name, total in (("a", 5), ("b", 0)):
        fleet.on_snapshot(a_snapshot(name, observed_at_s=NOW_S - 3, num_preemptions_total=5))
        fleet.on_snapshot(a_snapshot(name, observed_at_s=NOW_S - 2, num_preemptions_total=5 + total))
    assert choose(fleet).replica_id == "b"
    recent = {view.replica_id: view.num_recent_preemptions for view in fleet.replicas}
    assert recent == {"a": 5.0, "b": 0.0}
    fleet.on_snapshot(a_snapshot("a", observed_at_s=NOW_S + 28, num_preemptions_total=10))
    assert fleet.replicas[0].num_recent_preemptions == pytest.approx(0.249, abs=0.01)


def test_a_loaded_adapter_draws_its_requests():
    fleet = a_fleet(
        a_pool("p", a_replica("a"), a_replica("b"), adapters=("poet",)), weights={"adapter": 1.0, "in_flight": 0.1}
    )
    fleet.on_snapshot(a_snapshot("a", adapters=("poet",), num_running=4))
    assert choose(fleet, adapter="poet").replica_id == "a"
    assert choose(fleet).replica_id == "b"
