"""Series in time: blocks, the steady part, growing queues, changes of level."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.signal import lfilter

from workbench import stats
from workbench.stats import Reason, Refusal


def remembering(rng: np.random.Generator, size: int, r: float, rows: int) -> np.ndarray:
    """AR(1) noise with deviation 1."""
    noise = rng.normal(size=(rows, size + 100))
    return lfilter([1.0], [1.0, -r], noise, axis=1)[:, 100:] * np.sqrt(1.0 - r * r)


@pytest.mark.parametrize(("r", "size"), [(0.0, 60), (0.5, 120), (0.7, 300)])
def test_block_intervals_cover_the_mean_of_a_series_that_remembers(r: float, size: int):
    rows = 100.0 + 5.0 * remembering(stats.named_rng(1, f"blocks/{r}"), size, r, 150)
    found = [
        stats.block_bootstrap_interval(row, lambda x: float(x.mean()), stats.named_rng(i, "b"), num_resamples=150)
        for i, row in enumerate(rows)
    ]
    carried = [interval for interval in found if not isinstance(interval, Refusal)]
    assert len(carried) > 140
    assert sum(low <= 100.0 <= high for low, high in carried) / len(carried) >= 0.87  # 0.95 less 4 standard errors
    if r == 0.7:  # what takes the values for independent covers half as often as it says
        naive = [stats.mean_interval(row) for row in rows]
        assert sum(low <= 100.0 <= high for low, high in naive) / len(naive) < 0.75


def test_a_series_of_few_blocks_is_refused():
    row = remembering(stats.named_rng(2, "short"), 40, 0.95, 1)[0]
    refused = stats.block_bootstrap_interval(row, lambda x: float(x.mean()), stats.named_rng(1, "b"))
    assert isinstance(refused, Refusal)
    assert refused.reason is Reason.TOO_FEW_BLOCKS
    assert "measure longer" in str(refused)


def test_blocks_grow_with_memory_and_size():
    short, long = (remembering(stats.named_rng(3, "size"), size, 0.7, 1)[0] for size in (100, 1000))
    flat = remembering(stats.named_rng(3, "flat"), 1000, 0.0, 1)[0]
    assert stats.block_length(flat) <= 2 < stats.block_length(short) < stats.block_length(long)
    assert stats.block_length([1.0] * 10) == 1


@pytest.mark.parametrize("r", [0.0, 0.5])
def test_warm_up_and_cool_down_are_cut_and_noise_is_not(r: float):
    noise = 100.0 + 5.0 * remembering(stats.named_rng(4, f"warm/{r}"), 120, r, 60)
    plain = [stats.steady(row) for row in noise]
    assert np.mean([one.size for one in plain if isinstance(one, stats.Steady)]) > 115
    assert sum(isinstance(one, Refusal) for one in plain) <= 2
    ramped = noise.copy()
    ramped[:, :15] -= np.linspace(60.0, 5.0, 15)
    ramped[:, 110:] -= 50.0
    cut = [one for one in (stats.steady(row) for row in ramped) if isinstance(one, stats.Steady)]
    assert len(cut) >= 54
    assert np.mean([10 <= one.first <= 30 for one in cut]) > 0.8
    assert np.mean([100 <= one.end <= 110 for one in cut]) > 0.8
    assert "slots of warm-up" in cut[0].cuts[0]


def test_the_ramp_of_requests_in_flight_is_cut():
    in_flight = [*range(0, 16, 4), *[16.0] * 60, 12, 5, 1]
    rate = [10.0 * load + (index % 3) for index, load in enumerate(in_flight)]
    found = stats.steady(rate, in_flight)
    assert isinstance(found, stats.Steady)
    assert (found.first, found.end) == (4, 64)
    assert found.cuts == ("4 slots of ramp up", "3 slots of running out")


def test_what_never_settles_or_is_too_short_is_refused():
    growing = stats.steady(np.arange(100.0))
    assert isinstance(growing, Refusal) and growing.reason is Reason.NOT_SETTLED
    short = stats.steady([1.0] * 20)
    assert isinstance(short, Refusal) and short.reason is Reason.TOO_FEW_VALUES


def in_system(rng: np.random.Generator, offered_rps: float, served_rps: float, length_s: int = 120) -> np.ndarray:
    """Requests in an M/M/1 queue at each second."""
    arrivals = np.cumsum(rng.exponential(1.0 / offered_rps, size=int(2 * offered_rps * length_s)))
    arrivals = arrivals[arrivals < length_s]
    ends, last = [], 0.0
    for arrival, service in zip(arrivals, rng.exponential(1.0 / served_rps, size=len(arrivals)), strict=True):
        last = max(last, arrival) + service
        ends.append(last)
    at_s = np.arange(length_s) + 0.5
    return (np.searchsorted(arrivals, at_s) - np.searchsorted(ends, at_s)).astype(float)


@pytest.mark.parametrize(("use", "low", "high"), [(0.7, 0.0, 0.05), (0.95, 0.0, 0.1), (1.4, 0.9, 1.0)])
def test_a_queue_that_only_grows_is_saturation(use: float, low: float, high: float):
    rng = stats.named_rng(5, f"queue/{use}")
    found = [stats.saturation(in_system(rng, 5.0, 5.0 / use), 1.0, 5.0) for _ in range(40)]
    share = np.mean([one.is_saturated for one in found if isinstance(one, stats.Saturation)])
    assert low <= share <= high


def test_saturation_says_how_fast_and_refuses_a_glance():
    found = stats.saturation([2.0 * second for second in range(60)], 1.0, 10.0)
    assert isinstance(found, stats.Saturation) and found.is_saturated
    assert found.growth_rps == pytest.approx(2.0)
    assert found.growth_frac == pytest.approx(0.2)
    assert isinstance(stats.saturation([1.0] * 10, 1.0, 10.0), Refusal)
    with pytest.raises(ValueError, match="above 0"):
        stats.saturation([1.0] * 100, 1.0, 0.0)


@pytest.mark.parametrize("r", [0.0, 0.6])
def test_changes_of_level_are_found_where_they_are_and_hardly_elsewhere(r: float):
    noise = 100.0 + 5.0 * remembering(stats.named_rng(6, f"change/{r}"), 120, r, 60)
    assert np.mean([bool(stats.change_points(row)) for row in noise]) <= 0.1
    changed = noise.copy()
    changed[:, 40:80] -= 25.0
    found = [stats.change_points(row) for row in changed]
    assert np.mean([{round(one.index, -1) for one in points} >= {40, 80} for points in found]) > 0.7
    clear = next(points for points in found if len(points) == 2)
    assert clear[0].before > clear[0].after < clear[1].after


def test_a_constant_or_short_series_has_no_change():
    assert stats.change_points([3.0] * 200) == []
    assert stats.change_points([1.0, 9.0] * 5) == []
