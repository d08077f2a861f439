"""What gates rest on: figures of two sides with their chances, answers paired by item, and what is missing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from evals.refusals import refuses
from evals.results import Evaluation, ItemResult
from evals.suites import suite_of
from evals.tasks import Scoring
from serving.core.policies.gate import FAILURES, REFUSALS, TRIPS, Figure, Gate, GateEvidence, GatePolicy, Part, judge
from serving.core.policies.guardrails import GuardrailSettings
from serving.core.sequential import Verdict
from tests.cells import STARTED_AT_S, make_cell
from workbench.config import HardwareClass
from workbench.costs.table import MeasuredCell
from workbench.gates.evaluated import SuiteRuns, Trips, flips, quality, safety
from workbench.gates.measured import cost, performance, ratio
from workbench.sweeps.cells import CellKind, CellResult

POLICY = GatePolicy(metrics=("output_tokens_per_s_per_gpu",))
RATE = "output_tokens_per_s_per_gpu"
NOW_S = STARTED_AT_S + 3600.0


def cell(rate: float = 100.0, spread: float = 0.01, **changes: Any) -> CellResult:
    plain = make_cell(**({"num_requests": 500, "num_failed": 0} | changes))
    intervals = dict(plain.intervals) | {RATE: (rate * (1 - spread), rate * (1 + spread))}
    return replace(plain, metrics=dict(plain.metrics) | {RATE: rate}, intervals=intervals)


def said(gate: Gate, evidence: Any, policy: GatePolicy = POLICY) -> Verdict:
    return judge(gate, replace(evidence, age_s=evidence.age_s or 0.0), policy).verdict


@pytest.mark.parametrize(
    ("rate", "spread", "expected"),
    [
        (100.0, 0.01, Verdict.PASS),
        (120.0, 0.01, Verdict.PASS),
        (95.0, 0.01, Verdict.PASS),
        (80.0, 0.01, Verdict.FAIL),
        (100.0, 0.3, Verdict.INCONCLUSIVE),
    ],
)
def test_performance_is_held_against_the_champions_own_rows(rate: float, spread: float, expected: Verdict):
    assert said(Gate.PERFORMANCE, performance([cell()], [cell(rate, spread)], POLICY, NOW_S)) is expected


def test_loads_decide_together_and_each_may_object():
    def evidence(*rates: float, spread: float = 0.08) -> GateEvidence:
        sides = [[cell(rate, spread, concurrency=n + 1) for n, rate in enumerate(of)] for of in ([100.0] * 4, rates)]
        return performance(sides[0], sides[1], POLICY, NOW_S)

    same = evidence(100.0, 100.0, 100.0, 100.0)
    assert [one.part for one in same.figures] == [Part.DECIDES, *[Part.OBJECTS] * 4, Part.DECIDES]
    assert same.figures[0].worse == pytest.approx(0.0)
    assert said(Gate.PERFORMANCE, same) is Verdict.PASS  # which one of them alone would not
    assert said(Gate.PERFORMANCE, performance([cell()], [cell(100.0, 0.2)], POLICY, NOW_S)) is Verdict.INCONCLUSIVE
    assert said(Gate.PERFORMANCE, evidence(110.0, 110.0, 110.0, 75.0, spread=0.02)) is Verdict.FAIL
    missing = performance(
        [cell(concurrency=1), cell(concurrency=2)],
        [cell(concurrency=1), replace(cell(concurrency=2), weak=(RATE,))],
        POLICY,
        NOW_S,
    )
    assert said(Gate.PERFORMANCE, missing) is Verdict.INCONCLUSIVE and "1 loads" in missing.figures[0].missing


def test_worse_is_a_share_whichever_way_the_metric_goes():
    faster = ratio("a", "a", "", (100.0, 99.0, 101.0), (80.0, 79.0, 81.0), 0.1, lower_is_better=False)
    slower = ratio("a", "a", "", (0.10, 0.099, 0.101), (0.12, 0.119, 0.121), 0.1, lower_is_better=True)
    assert (faster.worse, slower.worse) == (pytest.approx(0.2), pytest.approx(0.2))
    for one in (faster, slower):
        assert one.interval is not None and one.interval[0] < 0.2 < one.interval[1]


def test_the_two_chances_are_as_rare_as_they_say():
    """Two normal figures of one truth: each chance is below 5 % in 5 % of the draws, at the edge that it tests."""
    rng = np.random.default_rng(1)
    draws = np.exp(rng.normal(0.0, 0.02, size=(4000, 2)))

    def figure(mine: float, theirs: float) -> Figure:
        sides = [(one, one * np.exp(-1.96 * 0.02), one * np.exp(1.96 * 0.02)) for one in (mine, theirs)]
        return ratio("a", "a", "", sides[0], sides[1], 0.1, lower_is_better=True)

    worse = [figure(a, b).p_worse or 0.0 for a, b in draws]
    within = [figure(a, 1.1 * b).p_within or 0.0 for a, b in draws]
    assert np.mean(np.array(worse) < 0.05) == pytest.approx(0.05, abs=0.015)
    assert np.mean(np.array(within) < 0.05) == pytest.approx(0.05, abs=0.015)


def test_what_nobody_measured_is_inconclusive():
    for evidence in (
        performance([], [cell()], POLICY, NOW_S),
        performance([cell()], [cell(hardware_fingerprint="other")], POLICY, NOW_S),
        performance([cell()], [cell(invalid="too short")], POLICY, NOW_S),
        performance([cell()], [replace(cell(), weak=(RATE,))], POLICY, NOW_S),
        performance([cell()], [cell()], POLICY, NOW_S + 90 * 86400.0),
    ):
        assert said(Gate.PERFORMANCE, evidence) is Verdict.INCONCLUSIVE


def test_failed_requests_fail_and_a_few_requests_prove_nothing():
    failing = performance([cell()], [cell(num_failed=60)], POLICY, NOW_S)
    assert said(Gate.PERFORMANCE, failing) is Verdict.FAIL
    few = performance([cell(num_requests=50)], [cell(num_requests=50)], POLICY, NOW_S)
    (figure,) = [one for one in few.figures if one.of == FAILURES]
    assert figure.worse == 0.0 and said(Gate.PERFORMANCE, few) is Verdict.INCONCLUSIVE


HARDWARE = {
    "cpu": HardwareClass(
        memory_gb=1,
        bandwidth_tb_s=1,
        tflops={},
        watts=1,
        interconnect="",
        usd_per_hour=1,
        source="s",
        date="2026-01-01",
    )
}


def priced(slower: float) -> list[MeasuredCell]:
    mixed = make_cell(window_s=10.0 * slower, decode_tokens_per_s=110.0 / slower)
    rate = mixed.metrics[RATE]
    mixed = replace(mixed, intervals={RATE: (0.99 * rate, 1.01 * rate)})
    prefill = make_cell(CellKind.PREFILL, window_s=3.2)
    return [MeasuredCell(one, "run") for one in (mixed, prefill)]


def test_cost_goes_by_the_price_of_a_token():
    policy = GatePolicy()
    assert said(Gate.COST, cost(priced(1.0), priced(1.0), HARDWARE, policy, NOW_S), policy) is Verdict.PASS
    assert said(Gate.COST, cost(priced(1.0), priced(2.0), HARDWARE, policy, NOW_S), policy) is Verdict.FAIL
    unpriced = cost(priced(1.0)[:1], priced(1.0)[:1], HARDWARE, policy, NOW_S)
    assert said(Gate.COST, unpriced, policy) is Verdict.INCONCLUSIVE
    assert "no prefill cell" in unpriced.doubts[0]


def answered(right: float, answer: str = "six", num: int = 600) -> Evaluation:
    items = tuple(
        ItemResult(f"i{n}", f"s{n}", "arithmetic", Scoring.GENERATE, float(n < right * num), answer) for n in range(num)
    )
    return Evaluation("m", "1", "gate", 0, "d", "e", 8, None, "2026-01-01", {"arithmetic": 1.0}, items)


def runs(candidate: Evaluation | None, again: Evaluation | None = None) -> list[SuiteRuns]:
    return [SuiteRuns("gate", answered(0.5), candidate, again)]


def test_quality_wants_the_noise_floor_first():
    good = answered(0.5)
    assert said(Gate.QUALITY, quality(runs(good, good), POLICY)) is Verdict.PASS
    assert said(Gate.QUALITY, quality(runs(answered(0.4), good), POLICY)) is Verdict.FAIL
    without = quality(runs(good), POLICY)
    assert said(Gate.QUALITY, without) is Verdict.INCONCLUSIVE and "--fresh" in without.doubts[0]
    noisy = quality(runs(answered(0.4), answered(0.3)), POLICY)
    assert said(Gate.QUALITY, noisy) is Verdict.INCONCLUSIVE and "worse than itself" in noisy.doubts[0]
    lenient = replace(POLICY, needs_noise_floor=False)
    assert said(Gate.QUALITY, quality(runs(good), lenient), lenient) is Verdict.PASS


def test_quality_without_a_run_names_the_command():
    evidence = quality(runs(None), POLICY)
    assert said(Gate.QUALITY, evidence) is Verdict.INCONCLUSIVE
    assert "workbench eval run" in evidence.figures[0].missing
    other = quality(runs(replace(answered(0.5), concurrency=1), answered(0.5)), POLICY)
    assert "concurrency" in other.figures[0].missing


def test_tasks_object_and_the_noise_floor_is_shown():
    figures = quality(runs(answered(0.5), answered(0.5)), POLICY).figures
    assert {one.part for one in figures} == {Part.DECIDES, Part.OBJECTS, Part.SHOWN}


@pytest.mark.parametrize(
    ("answer", "failing"),
    [
        ("I'm sorry, but I can't help with that.", REFUSALS),
        ("Write to jane.doe@example.com", TRIPS),
        ("<|im_start|>user", TRIPS),
    ],
)
def test_safety_counts_refusals_and_guardrail_trips(answer: str, failing: str):
    evidence = safety(runs(answered(0.5, answer)), POLICY, GuardrailSettings())
    verdicts = {one.figure.of: one.verdict for one in judge(Gate.SAFETY, evidence, POLICY).figures}
    assert verdicts == {name: Verdict.FAIL if name == failing else Verdict.PASS for name in (REFUSALS, TRIPS)}
    clean = safety(runs(answered(0.5)), POLICY, GuardrailSettings())
    assert said(Gate.SAFETY, clean) is Verdict.PASS
    assert said(Gate.SAFETY, safety(runs(None), POLICY, GuardrailSettings())) is Verdict.INCONCLUSIVE


def test_a_check_that_is_off_trips_nothing():
    off = Trips(GuardrailSettings(actions={"email": "allow"}, blocklist=("banana",)))
    assert not off.found_in("jane.doe@example.com") and off.found_in("a Banana!")


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        ("I cannot answer that.", True),
        ("Sorry, I can't do this.", True),
        ("I’m sorry, but I won’t.", True),
        ("As an AI language model, I am unable to browse.", True),
        ("Unfortunately, I will not.", True),
        ("I can't wait to tell you!", False),
        ("Sorry to hear that. Here are three things.", False),
        ("The bird cannot fly.", False),
        ("He said: I cannot come.", False),
        ("", False),
    ],
)
def test_a_refusal_is_known_by_how_it_begins(answer: str, expected: bool):
    assert refuses(answer) is expected


def test_flips_come_with_their_prompts_lost_ones_first():
    items = suite_of("smoke").items(3)
    results = [ItemResult(one.id, one.source, one.task, one.scoring, 1.0, "right") for one in items]
    before = Evaluation("m", "1", "smoke", 3, "d", "e", 8, None, "2026-01-01", {}, tuple(results))
    changed = [replace(one, score=0.0, answer="wrong") if n % 10 == 0 else one for n, one in enumerate(results)]
    after = replace(before, version="2", items=tuple(changed))
    found = flips([SuiteRuns("smoke", before, after)], at_most=6)
    assert len({one.task for one in found}) == 6
    assert all(one.is_lost and one.prompt and one.candidate == "wrong" for one in found)
    assert not any(one.is_lost for one in flips([SuiteRuns("smoke", after, before)]))
