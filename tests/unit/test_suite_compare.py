"""Two evaluations side by side: what the pool says, when a task objects, when nothing can be said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from evals import results
from evals.results import Evaluation, ItemResult
from evals.suite_compare import compare_suites, holm
from evals.tasks import Scoring
from serving.core.sequential import Verdict


def an_evaluation(right: dict[str, float], num: int = 1000, **changes: object) -> Evaluation:
    """The first part of each task's items is right."""
    items = tuple(
        ItemResult(f"{task}-{number}", f"{task}-{number}", task, Scoring.GENERATE, float(number < frac * num), "x")
        for task, frac in right.items()
        for number in range(num)
    )
    made = Evaluation("m", "1", "gate", 0, "digest", "engine", 8, None, "2026-01-01", dict.fromkeys(right, 1.0), items)
    return replace(made, **changes)


CHAMPION = an_evaluation({"copying": 0.5, "arithmetic": 0.4, "format": 0.9})


def test_the_same_answers_pass():
    found = compare_suites(CHAMPION, CHAMPION, again=CHAMPION)
    assert found.verdict is Verdict.PASS
    assert found.pool.num_items == 2000
    assert found.noise_floor is not None
    assert found.noise_floor.discordant_frac == 0.0


def test_a_task_beyond_85_percent_is_reported_and_does_not_count():
    worse = an_evaluation({"copying": 0.5, "arithmetic": 0.4, "format": 0.2})
    found = compare_suites(CHAMPION, worse)
    assert found.verdict is Verdict.PASS
    assert found.tasks["format"].p_holm is None
    assert found.tasks["format"].comparison.effect == pytest.approx(-0.7)


def test_a_drop_of_one_task_alone_is_a_fail_that_says_which():
    found = compare_suites(CHAMPION, an_evaluation({"copying": 0.47, "arithmetic": 0.43, "format": 0.9}))
    assert found.pool.effect == pytest.approx(0.0)
    assert found.verdict is Verdict.FAIL
    assert found.reasons == ("copying dropped by 3.0 points",)


def test_a_champion_worse_than_itself_makes_it_inconclusive():
    found = compare_suites(CHAMPION, CHAMPION, again=an_evaluation({"copying": 0.3, "arithmetic": 0.4, "format": 0.9}))
    assert found.verdict is Verdict.INCONCLUSIVE
    assert "worse than itself" in found.reasons[0]


def test_few_items_are_inconclusive():
    few = an_evaluation({"copying": 0.5}, num=20)
    assert compare_suites(few, few).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("other", "why"),
    [
        (replace(CHAMPION, digest="other"), "same suite and seed"),
        (replace(CHAMPION, concurrency=16), "concurrency 8 and 16"),
    ],
)
def test_what_cannot_be_compared_is_refused(other: Evaluation, why: str):
    with pytest.raises(ValueError, match=why):
        compare_suites(CHAMPION, other)


def test_no_task_that_counts_is_refused():
    sure = an_evaluation({"format": 0.95})
    with pytest.raises(ValueError, match="no task counts"):
        compare_suites(sure, sure)


def test_holm_corrects_step_by_step():
    assert holm({"a": 0.01, "b": 0.04, "c": 0.03}) == pytest.approx({"a": 0.03, "c": 0.06, "b": 0.06})
    assert holm({"a": 0.9, "b": 0.8}) == {"a": 1.0, "b": 1.0}


def test_an_evaluation_is_kept_and_read_back(tmp_path: Path):
    path = tmp_path / "m" / "one.json"
    results.write(CHAMPION, path)
    assert results.read(path) == CHAMPION
    path.write_text("{}")
    with pytest.raises(ValueError, match="holds no evaluation"):
        results.read(path)
