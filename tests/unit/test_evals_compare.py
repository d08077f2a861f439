"""Paired comparison of evaluation scores: exact where it can be, wary of clusters and of items that all agree."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from scipy import stats as distributions

from evals.compare import PairedItem, compare_paired, sign_flip_p
from serving.core.sequential import Verdict


def paired(differences: list[float], items_per_source: int = 1) -> list[PairedItem]:
    return [
        PairedItem(str(number), str(number // items_per_source), float(change < 0), float(change > 0))
        for number, change in enumerate(differences)
    ]


def drawn(rng: np.random.Generator, num: int, worse: float, better: float) -> list[float]:
    return list(rng.choice([-1.0, 1.0, 0.0], size=num, p=[worse, better, 1 - worse - better]))


@pytest.mark.parametrize(("lost", "won"), [(0, 0), (5, 0), (12, 3), (3, 12), (40, 30)])
def test_single_items_are_mcnemars_exact_test(lost: int, won: int) -> None:
    sums = np.array([-1.0] * lost + [1.0] * won + [0.0] * 100)
    expected = distributions.binomtest(lost, lost + won, 0.5, "greater").pvalue if lost + won else 1.0
    assert sign_flip_p(sums, np.random.default_rng(0)) == pytest.approx(expected)


def test_sources_of_several_items_flip_as_one() -> None:
    sums = np.array([-3.0, 2.0, -1.0, -4.0, 1.0])
    flips = [
        sum(s * abs(x) for s, x in zip(signs, sums, strict=True)) for signs in itertools.product((1, -1), repeat=5)
    ]
    expected = sum(flip <= sums.sum() for flip in flips) / len(flips)
    assert sign_flip_p(sums, np.random.default_rng(0)) == pytest.approx(expected)
    assert sign_flip_p(sums / 7.0, np.random.default_rng(0)) == pytest.approx(expected, abs=0.03)


def test_a_drop_fails_no_change_passes_and_few_items_say_nothing() -> None:
    rng = np.random.default_rng(1)
    worse = compare_paired(paired(drawn(rng, 1000, 0.12, 0.02)))
    assert worse.verdict is Verdict.FAIL and worse.interval[0] < worse.effect < worse.interval[1] < -0.02
    assert len(worse.worst) == 20
    same = compare_paired(paired([0.0] * 1000))
    assert (same.verdict, same.effect, same.p_drop) == (Verdict.PASS, 0.0, 1.0)
    few = compare_paired(paired([0.0] * 50))
    assert few.verdict is Verdict.INCONCLUSIVE and few.smallest_seen > 0.05


def test_a_true_drop_inside_the_tolerance_passes_when_it_is_known_well() -> None:
    items = paired([-1.0] * 40 + [0.0] * 19960)
    found = compare_paired(items, tolerance=0.02)
    assert found.p_drop < 0.001 and found.verdict is Verdict.PASS


def test_repeating_a_source_adds_no_evidence() -> None:
    once = compare_paired(paired([-1.0] * 4 + [0.0] * 96))
    thrice = compare_paired(paired([-1.0] * 12 + [0.0] * 288, items_per_source=3))
    assert thrice.p_drop == pytest.approx(once.p_drop)
    assert thrice.interval == pytest.approx(once.interval, abs=0.011)
    taken_apart = compare_paired(paired([-1.0] * 12 + [0.0] * 288))
    assert taken_apart.p_drop < once.p_drop / 10


@pytest.mark.parametrize(("num", "worse", "better"), [(150, 0.02, 0.0), (500, 0.02, 0.0), (800, 0.07, 0.05)])
def test_a_drop_of_the_tolerance_seldom_passes(num: int, worse: float, better: float) -> None:
    rng = np.random.default_rng(3)
    passes = sum(
        compare_paired(paired(drawn(rng, num, worse, better)), seed=run).verdict is Verdict.PASS for run in range(100)
    )
    assert passes <= 10, "5 expected; 10 or more of 100 come by chance in 3 of 100 tests"


def test_no_drop_seldom_fails() -> None:
    rng = np.random.default_rng(4)
    fails = sum(compare_paired(paired(drawn(rng, 300, 0.1, 0.1))).verdict is Verdict.FAIL for _ in range(100))
    assert fails <= 10


def test_it_reads_as_a_sentence() -> None:
    said = str(compare_paired(paired([-1.0] * 120 + [0.0] * 880)))
    assert said.startswith("fail: 12.0 → 0.0 %, -12.0 points [") and "1000 items of 1000 sources" in said


@pytest.mark.parametrize(
    ("items", "says"),
    [
        ([], "no item"),
        ([PairedItem("a", "s", 0.0, 1.0)] * 2, "twice"),
        ([PairedItem("a", "s", 0.0, math.nan)], "the challenger's is nan"),
        ([PairedItem("a", "s", 2.0, 1.0)], "the champion's is 2.0"),
    ],
)
def test_what_cannot_be_compared_is_refused(items: list[PairedItem], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        compare_paired(items)


def test_a_tolerance_is_a_share() -> None:
    with pytest.raises(ValueError, match="tolerance"):
        compare_paired(paired([0.0]), tolerance=2.0)
