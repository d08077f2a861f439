"""Drift tripwires: divergence, test, bands, and what they decide together."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from evals.drift import Action, band, compare, first_difference, kl, permutation_p
from evals.drift_due import Checked, due
from evals.readings import PROMPTS, Answer, Reading


def distribution(*probabilities: float) -> dict[int, float]:
    return {token: math.log(p) for token, p in enumerate(probabilities)}


def reading(shift: float = 0.0, **changes: object) -> Reading:
    rng = np.random.default_rng(1)
    tops = []
    for _ in PROMPTS:
        logits = rng.normal(size=30)
        logits[0] += shift
        p = np.exp(logits) / np.exp(logits).sum()
        tops.append({int(token): math.log(p[token]) for token in np.argsort(-p)[:20]})
    answers = tuple(Answer((n, n + 1, n + 2), "stop") for n in range(32))
    long = tuple(number >= 45 for number in range(len(PROMPTS)))
    return replace(Reading("p", "t", "s", long, tuple(tops), answers), **changes)  # type: ignore[arg-type]


def test_kl_of_equal_distributions_is_zero_and_grows_with_the_difference():
    p = distribution(0.7, 0.2)
    assert kl(p, p) == 0.0
    expected = 0.7 * math.log(0.7 / 0.6) + 0.2 * math.log(0.2 / 0.3)
    assert kl(p, distribution(0.6, 0.3)) == pytest.approx(expected)


def test_kl_takes_tokens_that_the_other_does_not_show_as_its_least_likely():
    assert kl({1: math.log(0.9)}, {2: math.log(0.9), 3: math.log(0.05)}) > 1.0


def test_kl_of_nothing_is_refused():
    with pytest.raises(ValueError, match="without a token"):
        kl({}, distribution(1.0))


def test_the_test_is_exact_for_few_pairs():
    assert permutation_p([1.0] * 10, [0.0] * 10) == 2.0**-10
    assert permutation_p([0.0] * 10, [0.0] * 10) == 1.0


def test_the_test_alarms_at_its_level_when_nothing_changed():
    rng = np.random.default_rng(0)
    alarms = sum(permutation_p(rng.exponential(size=10), rng.exponential(size=10)) <= 0.05 for _ in range(400))
    assert alarms / 400 <= 0.09  # 0.05 and four standard errors


@pytest.mark.parametrize(
    ("mean", "action"),
    [(0.0, Action.SAME), (0.0029, Action.SAME), (0.003, Action.LABEL), (0.03, Action.FULL_GATE), (0.1, Action.BLOCK)],
)
def test_bands(mean: float, action: Action):
    assert band(mean) is action


def test_the_same_reading_is_the_same():
    drift = compare(reading(), reading(), reading())
    assert (drift.action, drift.reasons, drift.kl_p, drift.agreement_frac) == (Action.SAME, (), 1.0, 1.0)
    assert drift.first_difference is None
    assert drift.found_by_prompts is None


def test_other_next_tokens_block_and_are_found_early():
    drift = compare(reading(), reading(), reading(shift=3.0))
    assert drift.action is Action.BLOCK
    assert drift.found_by_prompts is not None
    assert drift.found_by_prompts <= 10


@pytest.mark.parametrize("name", ["token_ids", "settings"])
def test_a_changed_hash_asks_for_the_full_gate(name: str):
    drift = compare(reading(), reading(), reading(**{name: "other"}))
    assert drift.action is Action.FULL_GATE


def test_what_nobody_can_see_is_said_and_not_passed_over():
    assert compare(reading(), reading(), reading(settings=None)).not_seen == ("settings",)


def test_other_answers_are_labelled():
    answers = tuple(replace(answer, finish_reason="length") for answer in reading().answers)
    drift = compare(reading(), reading(), reading(answers=answers))
    assert (drift.action, drift.agreement_frac, drift.first_difference) == (Action.LABEL, 0.0, 4)


def test_the_first_difference_counts_tokens_over_answers():
    same, other = Answer((1, 2, 3), "stop"), Answer((1, 9, 3), "stop")
    assert first_difference([same, same], [same, other]) == 5


def test_readings_of_other_prompts_are_refused():
    with pytest.raises(ValueError, match="take the reference anew"):
        compare(reading(), reading(), reading(protocol="other"))


def test_a_check_is_due_when_idle_and_new_changed_or_old():
    last = Checked("e", 100.0)
    assert due(None, "e", is_idle=True, now_s=0.0, every_s=60.0).now
    assert due(last, "f", is_idle=True, now_s=101.0, every_s=60.0).now
    assert due(last, "e", is_idle=True, now_s=160.0, every_s=60.0).now
    assert not due(last, "e", is_idle=True, now_s=159.0, every_s=60.0).now
    assert not due(None, "e", is_idle=False, now_s=0.0, every_s=60.0).now
