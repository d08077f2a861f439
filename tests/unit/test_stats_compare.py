"""Paired comparison, its plan, and shares and ratios with their intervals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats as distributions

from workbench import stats
from workbench.stats import Reason, Refusal, Verdict


@pytest.mark.parametrize("size", [6, 9, 12])
def test_the_signed_rank_test_is_the_exact_one(size: int):
    rng = stats.named_rng(1, f"exact/{size}")
    for _ in range(20):
        differences = rng.normal(0.4, 1.0, size=size)
        expected = distributions.wilcoxon(differences, method="exact").pvalue
        assert stats.shift(differences).p == pytest.approx(expected)


@given(st.lists(st.floats(-1.0, 1.0), min_size=6, max_size=14), st.sampled_from([0.9, 0.95]))
def test_the_interval_leaves_out_0_exactly_when_the_test_rejects(differences: list[float], confidence: float):
    found = stats.shift(differences)
    low, high = found.interval(confidence)
    assert low <= found.centre <= high
    assert (low > 0.0 or high < 0.0) == (found.p <= 1.0 - confidence)


def test_signs_by_coins_make_false_alarms_exactly_as_rare_as_said():
    magnitudes = np.array([0.01, 0.02, 0.03, 0.05, 0.08, 0.9, 7.0])  # whatever bursts there are
    rejected = [stats.shift(magnitudes * signs).p <= 0.05 for signs in itertools.product([-1.0, 1.0], repeat=7)]
    assert sum(rejected) == 6  # of 128: the largest number that is not above 0.05


@pytest.mark.parametrize(("confidence", "needed"), [(0.95, 6), (1 - 0.05 / 3, 7), (1 - 0.05 / 6, 8)])
def test_fewest_pairs(confidence: float, needed: int):
    assert stats.min_pairs(confidence) == needed
    assert stats.shift([1.0] * (needed - 1)).interval(confidence) is None
    assert stats.shift([1.0] * needed).interval(confidence) == (1.0, 1.0)


def test_holm_stops_at_the_first_that_fails():
    steps = stats.holm({"a": 0.04, "b": 0.001, "c": 0.03, "d": 0.012}, 0.05)
    assert {name: step.rejects for name, step in steps.items()} == {"a": False, "b": True, "c": False, "d": True}
    assert steps["b"].level == pytest.approx(0.0125)
    assert steps["a"].level == steps["c"].level == pytest.approx(0.025)


def pairs(effect: float, count: int, spread: float = 0.02, name: str = "pairs") -> list[tuple[float, float]]:
    values = stats.named_rng(2, name).lognormal(0.0, spread, size=(count, 2)) * [100.0, 100.0 * effect]
    return [(float(a), float(b)) for a, b in values]


def test_directions_and_refusals_side_by_side():
    rate, wait = pairs(1.2, 8), pairs(1.2, 8, name="wait")
    zero, few = [(0.0, 1.0)] * 8, pairs(1.2, 5)
    higher = {"rate": True, "wait": False, "zero": True, "few": True}
    found = stats.compare({"rate": rate, "wait": wait, "zero": zero, "few": few}, higher)
    assert {one.metric: one.verdict for one in found.compared} == {"rate": Verdict.BETTER, "wait": Verdict.WORSE}
    assert {name: refusal.reason for name, refusal in found.refused.items()} == {
        "zero": Reason.NOT_POSITIVE,
        "few": Reason.TOO_FEW_PAIRS,
    }
    assert found.is_worse
    assert all(one.low > 1.0 and one.low < 1.2 < one.high for one in found.compared)


def test_figures_that_are_all_alike_are_no_difference():
    (one,) = stats.compare({"share": [(1.0, 1.0)] * 8}, {"share": True}).compared
    assert (one.ratio, one.low, one.high, one.verdict) == (1.0, 1.0, 1.0, Verdict.NO_DIFFERENCE)
    assert stats.compare({}, {}) == stats.Comparison((), {})


def test_the_planned_effect_is_found_with_its_power():
    spread, count = 0.03, 10
    repeats = stats.named_rng(3, "repeats").lognormal(0.0, spread, size=400)
    planned = stats.plan(repeats, num_pairs=[5, count])
    assert isinstance(planned, stats.Plan)
    assert [row.num_pairs for row in planned.rows] == [count]  # five carry no verdict
    effect = math.log1p(planned.rows[0].effect_frac)
    rng = stats.named_rng(4, "power")
    found = [stats.shift(rng.normal(effect, spread * math.sqrt(2), size=count)).p <= 0.05 for _ in range(500)]
    assert sum(found) / 500 == pytest.approx(0.8, abs=0.07)
    assert planned.spread_frac == pytest.approx(spread, rel=0.1)
    assert planned.pairs_for(1.0) == count and planned.pairs_for(1e-6) is None


def test_pairing_takes_out_what_drifts():
    drift = np.exp(np.linspace(0.0, 0.5, 40) + stats.named_rng(5, "drift").normal(0.0, 0.01, size=40))
    planned = stats.plan(drift)
    assert isinstance(planned, stats.Plan)
    assert planned.memory > 0.8
    assert planned.pair_spread_frac < planned.spread_frac / 5
    assert planned.rows[-1].effect_frac < planned.rows[0].effect_frac < 0.1


def test_more_metrics_and_fewer_pairs_find_less():
    residuals = stats.named_rng(6, "r").normal(0.0, 0.03, size=50)
    effects = [stats.detectable_effect(residuals, count) for count in (8, 32, 200)]
    assert effects[0] > effects[1] > effects[2]
    assert stats.detectable_effect(residuals, 8, confidence=0.99) > effects[0]
    assert isinstance(stats.detectable_effect(residuals, 5), Refusal)
    assert isinstance(stats.plan([1.0, 1.1]), Refusal)


def test_orders_are_coins():
    orders = stats.pair_orders(400, stats.named_rng(7, "orders"))
    share = sum(first is stats.Side.BASELINE for first, _ in orders) / 400
    assert 0.4 < share < 0.6
    assert all({first, second} == set(stats.Side) for first, second in orders)


def test_a_percentile_is_refused_with_what_it_takes():
    refused = stats.percentile(list(range(100)), 0.99)
    assert isinstance(refused, Refusal)
    assert (refused.reason, refused.found, refused.needed) == (Reason.TOO_FEW_VALUES, 100, 368)
    carried = stats.percentile(list(range(500)), 0.99)
    assert isinstance(carried, stats.Percentile)
    assert carried.low <= carried.value == 494 <= carried.high
    few = stats.clustered_percentile([[1.0, 2.0]] * 3, 0.5, stats.named_rng(8, "c"))
    assert isinstance(few, Refusal) and few.reason is Reason.TOO_FEW_CLUSTERS


def test_the_exact_interval_of_a_share_holds_wilsons():
    wilson, exact = (stats.share_interval(18, 20, method=method) for method in stats.ShareMethod)
    assert exact == pytest.approx((0.6830, 0.9877), abs=1e-4)  # Clopper and Pearson
    assert exact[0] < wilson[0] and wilson[1] < exact[1]


def test_a_ratio_of_sums_covers_the_truth():
    rng = stats.named_rng(9, "sums")
    hits = 0
    for _ in range(400):
        tokens = rng.uniform(50.0, 150.0, size=12)
        found = stats.ratio_of_sums(2.0 * tokens * rng.lognormal(0.0, 0.05, size=12), tokens)
        hits += found.low <= 2.0 * math.exp(0.05**2 / 2) <= found.high
    assert hits / 400 >= 0.91
    with pytest.raises(ValueError, match="at least 2 pieces"):
        stats.ratio_of_sums([1.0], [1.0])
