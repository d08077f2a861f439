"""Benchmarks of planted faults, without engines: which faults, which items, and what a trial is held to."""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import pytest

from benchmarks.harness import Mode
from benchmarks.planted_engines import BASE, QUICK_KINDS, Planted, planted
from benchmarks.planted_trials import Found, Trial, bars, slices
from evals.fault_effects import EFFECTS, Effect
from evals.suites import suite_of
from serving.core.sequential import Verdict

TRIAL = Trial(
    planted=Planted("dropped-layer"),
    outcome="rolled_back",
    reason="the gates' verdict is fail",
    largest_share=0.0,
    needed_approval=False,
    num_served=(50, 0),
    num_failed=0,
    verdicts={"quality": "fail", "drift": "fail"},
    drift="block",
    kl_mean=0.2,
    found_by_prompts=7,
    first_difference=8,
    quality=Found(Verdict.FAIL, -0.1, (-0.2, -0.01), 200),
    seconds=100.0,
)


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    effect = Effect("block", 0.2, 7, 0.0, 8, "2026-12-01", (-8.0, -10.0, -6.0))
    monkeypatch.setitem(EFFECTS, "dropped-layer", effect)
    monkeypatch.setitem(EFFECTS, "wrong-rope", replace(effect, accuracy_points=(-0.5, -1.5, 0.5)))


def said(trial: Trial) -> list[bool | None]:
    return [bar.ok for bar in bars(trial)]


def test_the_quick_form_has_three_faults_and_the_full_one_draws_some_under_three_seeds():
    assert {one.kind for one in planted(Mode.QUICK)} == set(QUICK_KINDS)
    full = planted(Mode.FULL)
    assert len(full) == len(set(full))
    assert [one.seed for one in full if one.kind == "noise-weak"] == [0, 1, 2]
    assert [one.seed for one in full if one.kind == "dropped-layer"] == [0]


def test_no_source_is_asked_twice_and_the_smoke_suite_comes_first():
    found = list(slices())
    sources = [item.source for part in found for item in part]
    assert len(sources) == len(set(sources))
    assert all(len({item.task for item in part}) == 1 for part in found)
    first = {item.id for part in islice(found, 6) for item in part}
    assert first <= {item.id for item in suite_of("smoke").items(0)}


def test_a_fault_past_the_tolerance_must_not_reach_everybody():
    assert said(TRIAL) == [True, True]
    assert said(replace(TRIAL, largest_share=1.0)) == [True, False]
    assert said(replace(TRIAL, planted=Planted("wrong-rope"), largest_share=1.0)) == [True, None]


def test_a_lost_request_fails_any_trial():
    assert said(replace(TRIAL, num_failed=1)) == [False, True]


def test_the_sound_model_must_come_to_serve_everybody():
    base = replace(TRIAL, planted=Planted(BASE), outcome="promoted", drift="same", largest_share=1.0)
    assert said(base) == [True, True, True]
    assert said(replace(base, outcome="held")) == [False, True, True]


def test_a_change_that_is_not_worse_is_never_the_same_and_never_unapproved():
    int8 = replace(TRIAL, planted=Planted("int8-channel"), outcome="promoted", drift="label", needed_approval=True)
    assert said(int8) == [True, True]
    assert said(replace(int8, needed_approval=False)) == [True, False]
    assert said(replace(int8, drift="same")) == [True, False]
