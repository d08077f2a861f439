from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench import stats

FINITE = st.floats(-1e6, 1e6)


@pytest.mark.parametrize(
    ("values", "q", "expected"),
    [
        ([1.0], 0.5, 1.0),
        ([1, 2, 3, 4], 0.5, 2),
        ([1, 2, 3, 4, 5], 0.5, 3),
        (range(1, 101), 0.99, 99),
        (range(32), 0.99, 31),
    ],
)
def test_a_quantile_is_the_smallest_value_that_covers_its_share(values, q, expected):
    assert stats.quantile(list(values), q) == expected


@given(st.lists(FINITE, min_size=1), st.floats(0.01, 0.99))
def test_a_quantile_was_seen_and_covers_its_share(values, q):
    found = stats.quantile(values, q)
    assert found in values
    assert sum(value <= found for value in values) >= q * len(values) - 1e-9


@pytest.mark.parametrize(("q", "smallest"), [(0.5, 6), (0.9, 36), (0.99, 368)])
def test_a_quantile_has_an_interval_from_the_smallest_sample_that_carries_it(q, smallest):
    assert stats.min_sample(q) == smallest
    assert stats.quantile_interval(list(range(smallest - 1)), q) is None
    low, high = stats.quantile_interval(list(range(smallest)), q)
    assert low <= stats.quantile(list(range(smallest)), q) <= high


@pytest.mark.parametrize(("q", "size"), [(0.5, 30), (0.9, 120), (0.99, 500)])
def test_quantile_intervals_cover_the_truth_as_often_as_they_say(q, size):
    rng = stats.named_rng(1, f"coverage/{q}")
    truth = -math.log(1 - q)
    hits = 0
    for _ in range(600):
        low, high = stats.quantile_interval(rng.exponential(size=size), q)
        hits += low <= truth <= high
    assert hits / 600 >= 0.93  # order statistics are conservative; 0.93 is 2.2 standard errors under 0.95


def test_gaps_of_one_stream_count_as_one_draw():
    rng = stats.named_rng(2, "clusters")
    levels = rng.normal(10.0, 1.0, size=40)  # each stream has a level of its own: its 50 gaps are no 50 draws
    streams = [list(level + rng.normal(0.0, 0.01, size=50)) for level in levels]
    clustered = stats.clustered_quantile_interval(streams, 0.5, stats.named_rng(3, "bootstrap"))
    independent = stats.quantile_interval([gap for stream in streams for gap in stream], 0.5)
    assert clustered[1] - clustered[0] > 3 * (independent[1] - independent[0])
    assert clustered == stats.clustered_quantile_interval(streams, 0.5, stats.named_rng(3, "bootstrap"))
    assert stats.clustered_quantile_interval(streams[:5], 0.5, rng) is None
    assert stats.clustered_quantile_interval([[1.0, 2.0]] * 20, 0.99, rng) is None


def test_the_mean_of_blocks_is_covered_as_often_as_it_says():
    rng = stats.named_rng(4, "blocks")
    intervals = (stats.mean_interval(rng.normal(100.0, 5.0, size=5)) for _ in range(1000))
    assert 0.93 <= sum(low <= 100.0 <= high for low, high in intervals) / 1000 <= 0.97
    assert stats.mean_interval([1.0]) is None


def test_a_share_has_wilsons_interval():
    low, high = stats.share_interval(0, 20)
    assert low == 0.0
    assert high == pytest.approx(0.1611, abs=1e-4)  # Newcombe 1998, table I: 0 of 20


def test_a_bootstrap_interval_surrounds_its_statistic_and_repeats_itself():
    values = stats.named_rng(5, "values").exponential(size=200)
    low, high = stats.bootstrap_interval(values, lambda sample: float(np.mean(sample)), stats.named_rng(6, "b"))
    assert low < values.mean() < high
    again = stats.bootstrap_interval(values, lambda sample: float(np.mean(sample)), stats.named_rng(6, "b"))
    assert (low, high) == again


def test_a_ratio_finds_a_change_and_covers_the_truth():
    rng = stats.named_rng(7, "ratio")
    hits = 0
    for _ in range(1000):
        ratio = stats.mean_ratio(rng.normal(100, 4, size=6), rng.normal(110, 8, size=8))
        hits += ratio.low <= 1.1 <= ratio.high
    assert 0.93 <= hits / 1000 <= 0.97
    assert stats.mean_ratio([2.0, 2.0], [3.0, 3.0]) == stats.Ratio(1.5, 1.5, 1.5)


def test_the_smallest_detectable_effect_is_detected_with_its_power():
    rng = stats.named_rng(8, "power")
    spread, count = 0.03, 8
    sample = 1.0 + spread * np.array([-1.0, 1.0] * 500) * math.sqrt(999 / 1000)
    effect = stats.smallest_detectable_effect(sample, num_values=count)
    found = 0
    for _ in range(800):
        ratio = stats.mean_ratio(rng.normal(1, spread, size=count), rng.normal(1 + effect, spread, size=count))
        found += ratio.low > 1.0
    assert found / 800 == pytest.approx(0.8, abs=0.06)


def test_streams_of_chance_differ_by_name_and_seed():
    draws = {stats.named_rng(seed, name).integers(2**62) for seed in (1, 2) for name in ("a", "b")}
    assert len(draws) == 4


@pytest.mark.parametrize("values", [[], [math.nan], [1.0, math.inf]])
def test_what_would_become_nan_is_refused(values):
    for function in (lambda v: stats.quantile(v, 0.5), lambda v: stats.quantile_interval(v, 0.5), stats.mean_interval):
        with pytest.raises(ValueError, match="sample"):
            function(values)


def test_a_ratio_of_what_is_not_above_zero_is_refused():
    with pytest.raises(ValueError, match="above 0"):
        stats.mean_ratio([1.0, 0.0], [1.0, 1.0])
    with pytest.raises(ValueError, match="2 values"):
        stats.smallest_detectable_effect([1.0, 1.1], num_values=1)
    with pytest.raises(ValueError, match="between 0 and 1"):
        stats.quantile([1.0], 1.0)
