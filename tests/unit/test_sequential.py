"""Sequential tests: fair bets, clusters, stopping at the first look that suits, families."""

from __future__ import annotations

import itertools
import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.sequential import (
    Capital,
    ClusteredMean,
    PairedTest,
    Verdict,
    alarms,
    detectable_effect,
)  # fmt: skip

ALPHA = 0.05


def expected_capital(outcomes: list[tuple[list[float], float]], claim: float, lowest: float, num: int) -> float:
    """The mean of the capital over all sequences of `num` clusters, each drawn from (items, chance)."""
    size = max(len(items) for items, _ in outcomes)
    expected = 0.0
    for sequence in itertools.product(outcomes, repeat=num):
        capital = Capital(claim, lowest, size)
        for items, _ in sequence:
            capital.add(sum(items), len(items))
        expected += math.prod(chance for _, chance in sequence) * math.exp(capital.log_e)
    return expected


@pytest.mark.parametrize("num", [1, 2, 4])
def test_a_bet_on_a_true_claim_is_fair(num: int) -> None:
    single = [([1.0], 0.1), ([-1.0], 0.1), ([0.0], 0.8)]
    assert expected_capital(single, 0.0, -1.0, num) == pytest.approx(1.0)
    # The mean over items is 0 although that over clusters is not: one bad cluster of three, three good ones of one.
    uneven = [([-1.0, -1.0, -1.0], 0.25), ([1.0], 0.75)]
    assert expected_capital(uneven, 0.0, -1.0, num) == pytest.approx(1.0)
    assert expected_capital([([1.0], 0.05), ([0.0], 0.95)], 0.2, 0.0, num) < 1.0


def clusters(rng: random.Random, num: int, size: int, drop: float) -> list[list[float]]:
    """Differences of paired yes-or-no items; all of a cluster mostly go the same way."""
    drawn = []
    for _ in range(num):
        moved = rng.random() < 0.2
        sign = -1.0 if rng.random() < 0.5 + 2.5 * drop else 1.0
        drawn.append([sign if moved and rng.random() < 0.95 else 0.0 for _ in range(size)])
    return drawn


def share_of_fails(num_runs: int, *, drop: float, is_clustered: bool) -> float:
    fails = 0
    for seed in range(num_runs):
        test = PairedTest(max_cluster_size=5 if is_clustered else 1)
        for cluster in clusters(random.Random(seed), 300, 5, drop):
            for piece in [cluster] if is_clustered else [[item] for item in cluster]:
                test.add(piece)
            if test.verdict is not Verdict.INCONCLUSIVE:
                break
        fails += test.verdict is Verdict.FAIL
    return fails / num_runs


def test_false_alarms_stay_rare_however_often_one_looks() -> None:
    assert share_of_fails(200, drop=0.0, is_clustered=True) <= ALPHA


def test_clustered_items_taken_for_single_ones_would_alarm_falsely() -> None:
    assert share_of_fails(200, drop=0.0, is_clustered=False) > 2 * ALPHA


def test_a_real_drop_is_found() -> None:
    assert share_of_fails(50, drop=0.1, is_clustered=True) >= 0.9


@pytest.mark.long
def test_false_alarms_of_4000_runs() -> None:
    share = share_of_fails(4000, drop=0.0, is_clustered=True)
    print(f"{share:.2%} false alarms")
    assert share <= ALPHA


def test_the_same_answers_pass_once_there_are_enough() -> None:
    test = PairedTest(tolerance=0.02)
    verdicts = [test.add([0.0]) for _ in range(1000)]
    assert verdicts[0] is Verdict.INCONCLUSIVE and verdicts[-1] is Verdict.PASS
    report = test.report()
    assert report.mean == 0.0 and report.log_e_within >= math.log(1 / ALPHA) > report.log_e_drop


def test_no_item_is_no_pass() -> None:
    report = PairedTest().report()
    assert (report.verdict, report.mean, report.interval) == (Verdict.INCONCLUSIVE, None, (-1.0, 1.0))


def test_a_verdict_stays() -> None:
    test = PairedTest()
    while test.add([-1.0]) is Verdict.INCONCLUSIVE:
        pass
    for _ in range(500):
        assert test.add([1.0]) is Verdict.FAIL


@given(st.lists(st.lists(st.sampled_from([-1.0, 0.0, 0.5, 1.0]), min_size=1, max_size=3), min_size=1, max_size=40))
def test_an_interval_holds_the_mean_and_mirrors(drawn: list[list[float]]) -> None:
    seen, mirrored = ClusteredMean(-1.0, 1.0, 3), ClusteredMean(-1.0, 1.0, 3)
    for cluster in drawn:
        seen.add(cluster)
        mirrored.add([-item for item in cluster])
    low, high = seen.interval()
    assert seen.mean is not None and -1.0 <= low <= seen.mean + 1e-9 and seen.mean - 1e-9 <= high <= 1.0
    assert mirrored.interval() == pytest.approx((-high, -low))
    assert seen.log_e_above(0.1) == pytest.approx(mirrored.log_e_below(-0.1))
    claims = [step / 10 for step in range(-9, 10)]
    evidence = [seen.log_e_above(claim) for claim in claims]
    assert all(before >= after - 1e-12 for before, after in itertools.pairwise(evidence)), "falls as more is claimed"


def test_intervals_shrink_and_hold() -> None:
    rng = random.Random(7)
    seen = ClusteredMean(0.0, 1.0)
    widths, held = [], True
    for number in range(1, 1001):
        seen.add([float(rng.random() < 0.3)])
        if number % 100 == 0:
            low, high = seen.interval()
            widths.append(high - low)
            held &= low <= 0.3 <= high
    assert held and widths[-1] < widths[0] / 2


def test_the_detectable_effect_is_about_what_is_found_half_the_time() -> None:
    num, sd = 400, math.sqrt(0.2)
    effect = detectable_effect(num, sd)
    found = 0
    for seed in range(100):
        rng = random.Random(seed)
        test = PairedTest(tolerance=0.5)
        for _ in range(num):
            chance = rng.random()
            worse = (0.2 + effect) / 2
            test.add([-1.0 if chance < worse else 1.0 if chance < 0.2 else 0.0])
        found += test.report().log_e_drop >= math.log(1 / ALPHA)
    assert 25 <= found <= 90
    assert detectable_effect(0, sd) == math.inf


def closed_testing(log_es: dict[str, float], alpha: float) -> set[str]:
    """By the definition: every set that holds the metric must be rejected."""
    sets = [chosen for size in range(1, len(log_es) + 1) for chosen in itertools.combinations(log_es, size)]
    averages = {chosen: sum(math.exp(log_es[name]) for name in chosen) / len(chosen) for chosen in sets}
    return {name for name in log_es if min(averages[chosen] for chosen in sets if name in chosen) >= 1 / alpha}


@given(st.dictionaries(st.sampled_from("abcde"), st.floats(-5, 8), max_size=5))
def test_alarms_are_those_of_closed_testing(log_es: dict[str, float]) -> None:
    assert alarms(log_es) == closed_testing(log_es, ALPHA)


def test_overwhelming_evidence_overflows_nothing() -> None:
    assert alarms({"quality": 5000.0, "length": -5000.0}) == {"quality"}


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: ClusteredMean(1.0, 1.0), "bounds"),
        (lambda: ClusteredMean(0.0, math.inf), "bounds"),
        (lambda: ClusteredMean(0.0, 1.0, 0), "one item or more"),
        (lambda: ClusteredMean(0.0, 1.0).add([]), "1 to 1 items"),
        (lambda: ClusteredMean(0.0, 1.0).add([0.0, 0.0]), "1 to 1 items"),
        (lambda: ClusteredMean(0.0, 1.0).add([math.nan]), "got nan"),
        (lambda: ClusteredMean(0.0, 1.0).add([1.1]), "from 0.0 to 1.0"),
        (lambda: PairedTest(tolerance=0.0), "tolerance"),
        (lambda: PairedTest(alpha=1.0), "alpha"),
    ],
)
def test_what_cannot_be_tested_is_refused(make: object, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        make()  # type: ignore[operator]
