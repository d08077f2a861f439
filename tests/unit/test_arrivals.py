from __future__ import annotations

import math
import random
from itertools import islice, pairwise, takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from workbench import stats
from workbench.loadgen import ClosedLoop, Constant, Diurnal, Gamma, Poisson, Profile, Replay

rates = st.floats(0.01, 500.0)
seeds = st.integers(0, 2**32)
cvs = st.floats(0.2, 3.0)


@st.composite
def diurnals(draw):
    mean = draw(rates)
    peak = min(mean * draw(st.floats(1.0, 2.0)), 2 * mean)
    return Diurnal(mean, peak, draw(st.floats(0.5, 1e5)), draw(st.floats(0, 0.99)))


@st.composite
def profiles(draw):
    lengths = draw(st.lists(st.floats(0.01, 100), min_size=1, max_size=5))
    values = draw(st.lists(st.floats(0, 50), min_size=len(lengths) + 1, max_size=len(lengths) + 1))
    ends = [math.fsum(lengths[:index]) for index in range(len(lengths) + 1)]
    values[0] = max(values[0], 0.1)
    return Profile(tuple(zip(ends, values, strict=True)))


@st.composite
def replays(draw):
    times = sorted(draw(st.lists(st.floats(0, 1e6), min_size=1, max_size=50)))
    return Replay(tuple(times), draw(st.floats(0.1, 100)))


schedules = st.one_of(
    st.builds(Constant, rates), st.builds(Poisson, rates), st.builds(Gamma, rates, cvs), diurnals(), profiles(),
    replays(),
)  # fmt: skip


@given(schedules, seeds)
def test_every_schedule_goes_forward_from_0_and_is_a_function_of_its_seed(schedule, seed):
    times, again = (list(islice(schedule.send_times_s(random.Random(seed)), 60)) for _ in range(2))
    assert times == again
    assert all(0 <= earlier <= later < math.inf for earlier, later in pairwise([0.0, *times]))


def gaps(schedule, number, seed=1):
    times = list(islice(schedule.send_times_s(random.Random(seed)), number + 1))
    assert times[0] == 0.0
    return [later - earlier for earlier, later in pairwise(times)]


@settings(max_examples=15, derandomize=True)  # a test of chance: the same draws each time
@given(rates, cvs, seeds)
def test_gamma_gaps_have_the_asked_rate_and_variation(rate, cv, seed):
    found = gaps(Gamma(rate, cv), 4000, seed)
    mean = sum(found) / len(found)
    # Five standard errors of the mean; the variance's own error grows with the fourth moment of the gaps.
    assert mean == pytest.approx(1 / rate, rel=5 * cv / math.sqrt(4000))
    spread = (sum((gap - mean) ** 2 for gap in found) / len(found)) ** 0.5
    assert spread / mean == pytest.approx(cv, rel=5 * math.sqrt((2 + 6 * cv**2) / 4000) / 2 + 0.02)


def test_poisson_gaps_are_exponential_with_the_asked_rate():
    found = gaps(Poisson(20.0), 20_000)
    low, high = stats.mean_interval(found)
    assert low <= 1 / 20.0 <= high
    mean = sum(found) / len(found)
    spread = (sum((gap - mean) ** 2 for gap in found) / len(found)) ** 0.5
    assert spread / mean == pytest.approx(1.0, abs=0.03)


@settings(max_examples=20)
@given(rates)
def test_constant_keeps_its_rate_over_any_number(rate):
    times = list(islice(Constant(rate).send_times_s(random.Random(1)), 10_001))
    assert times[-1] == pytest.approx(10_000 / rate, rel=1e-12)
    assert {round((later - earlier) * rate, 6) for earlier, later in pairwise(times)} == {1.0}


def counted(schedule, start_s, end_s, num_seeds):
    """How many sends of so many runs lie in the time from start to end."""
    return sum(
        sum(
            start_s <= at_s for at_s in takewhile(lambda at_s: at_s < end_s, schedule.send_times_s(random.Random(seed)))
        )
        for seed in range(num_seeds)
    )


@pytest.mark.parametrize(
    "schedule",
    [
        Diurnal(20.0, 35.0, 8.0),
        Diurnal(20.0, 40.0, 8.0, start_frac=0.5),
        Profile.ramp(2.0, 40.0, 8.0),
        Profile.ramp(40.0, 0.0, 8.0),
        Profile.steps([5.0, 0.0, 40.0, 10.0], 2.0),
    ],
    ids=repr,
)
def test_a_rate_that_changes_is_kept_in_every_part_of_the_run(schedule):
    num_runs = 30
    for start_s in range(8):
        steps = [schedule.rate_at(start_s + (index + 0.5) / 100) / 100 for index in range(100)]
        expected = num_runs * sum(steps)
        assert abs(counted(schedule, start_s, start_s + 1, num_runs) - expected) <= 5 * math.sqrt(expected)


@given(diurnals())
def test_a_day_has_its_peak_and_its_mean(day):
    found = [day.rate_at(day.period_s * index / 64) for index in range(64)]
    assert sum(found) / 64 == pytest.approx(day.mean_rps)
    assert max(found) <= day.peak_rps * (1 + 1e-9)
    assert day.rate_at(day.period_s * (0.5 - day.start_frac)) == pytest.approx(day.peak_rps)
    assert min(found) >= -1e-9 * day.mean_rps


@settings(derandomize=True)
@given(profiles(), seeds)
def test_a_profile_ends_and_sends_as_many_as_it_expects(profile, seed):
    times = list(profile.send_times_s(random.Random(seed)))
    assert all(0 <= at_s <= profile.length_s for at_s in times)
    assert abs(len(times) - profile.num_expected) <= 6 * math.sqrt(profile.num_expected) + 6


@given(replays())
def test_a_replay_keeps_the_traces_gaps_at_its_scale(replay):
    times = list(replay.send_times_s(random.Random(1)))
    assert times[0] == 0.0
    assert len(times) == len(replay.times_s)
    assert times[-1] == pytest.approx((replay.times_s[-1] - replay.times_s[0]) / replay.scale)


REFUSED = [
    (lambda: ClosedLoop(0), "at least 1"),
    (lambda: Constant(0.0), "above 0"),
    (lambda: Poisson(math.nan), "above 0"),
    (lambda: Poisson(1.0, max_in_flight=0), "at least 1"),
    (lambda: Gamma(1.0, 0.0), "cv is 0"),
    (lambda: Diurnal(2.0, 5.0, 60.0), "between that and 4"),
    (lambda: Diurnal(2.0, 1.0, 60.0), "between that and 4"),
    (lambda: Diurnal(2.0, 3.0, 60.0, start_frac=1.0), "share of the period"),
    (lambda: Profile(((0.0, 1.0),)), "two points"),
    (lambda: Profile(((0.0, 1.0), (2.0, 1.0), (1.0, 1.0))), "backwards"),
    (lambda: Profile.ramp(-1.0, 2.0, 3.0), "below 0"),
    (lambda: Profile.steps([0.0, 0.0], 3.0), "above 0"),
    (lambda: Replay(()), "at least one time"),
    (lambda: Replay((0.0, 2.0, 1.0)), r"times_s\[2\] is 1.0, before"),
    (lambda: Replay((0.0,), scale=0.0), "above 0"),
]


@pytest.mark.parametrize(("make", "why"), REFUSED)
def test_a_load_that_is_none_is_refused(make, why):
    with pytest.raises(ValueError, match=why):
        make()
