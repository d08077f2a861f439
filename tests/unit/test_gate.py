"""Gates: each gets its planted failure and its inconclusive case right, and a missing figure never passes."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.gate_record import BrokenRecord, GateRecord, Source, Subject, digest, read
from serving.core.policies.gate import (
    DriftFound,
    Figure,
    Gate,
    GateEvidence,
    GatePolicy,
    Part,
    canonical,
    in_all,
    judge,
    judge_all,
)
from serving.core.policies.gate_cases import cases, self_test
from serving.core.sequential import Verdict

POLICY = GatePolicy()
CLEAN = {gate: evidence for gate, name, expected, evidence in cases(POLICY) if expected is Verdict.PASS}


def record(evidence: dict[Gate, GateEvidence] | None = None) -> GateRecord:
    return GateRecord(
        model="m",
        champion=Subject("1", "sha256:aa", "pypi:a==1", "engine-1"),
        candidate=Subject("2", "sha256:bb", None),
        policy=POLICY,
        evidence=CLEAN if evidence is None else evidence,
        gathered_at="2026-12-01T00:00:00+00:00",
        commit="abc",
        sources=(Source("evaluation", "gate of m@2", "0" * 64, "run"),),
        differences={"flags.max_num_seqs": ("4", "8")},
    )


@pytest.mark.parametrize("gate", Gate)
def test_every_gate_ships_a_planted_failure_an_inconclusive_and_a_clean_case(gate: Gate) -> None:
    assert {expected for own, _, expected, _ in cases(POLICY) if own is gate} == set(Verdict)


def test_the_gates_pass_their_own_test() -> None:
    assert self_test(POLICY) == ()
    assert self_test(GatePolicy(metrics=("e2e_s/p50",), suites=("smoke", "gate"), alpha=0.01)) == ()


def test_a_gate_that_gets_a_planted_case_wrong_says_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert judge_all(CLEAN, POLICY).verdict is Verdict.PASS
    said = judge_all(CLEAN, POLICY, ["quality says pass of a planted drop"])
    assert said.verdict is Verdict.INCONCLUSIVE
    assert all("planted drop" in found.reason for found in said.gates.values())


@pytest.mark.parametrize("gate", Gate)
def test_no_gate_passes_without_evidence(gate: Gate) -> None:
    assert judge(gate, GateEvidence(), POLICY, Verdict.PASS).verdict is Verdict.INCONCLUSIVE
    without = {name: evidence for name, evidence in CLEAN.items() if name is not gate}
    assert judge_all(without, POLICY).verdict is Verdict.INCONCLUSIVE


def test_a_failing_gate_outweighs_missing_ones() -> None:
    drop = next(evidence for gate, _, said, evidence in cases(POLICY) if gate is Gate.QUALITY and said is Verdict.FAIL)
    assert judge_all({Gate.QUALITY: drop}, POLICY).verdict is Verdict.FAIL


def test_an_objection_fails_only_where_it_is_real_and_as_large_as_the_tolerance() -> None:
    quality = CLEAN[Gate.QUALITY]
    task = Figure("gate", "cloze", worse=0.03, p_worse=0.001, part=Part.OBJECTS)
    for figure, expected in (
        (task, Verdict.FAIL),
        (replace(task, p_worse=0.2), Verdict.PASS),
        (replace(task, worse=0.01), Verdict.PASS),
    ):
        evidence = replace(quality, figures=(*quality.figures, figure))
        assert judge(Gate.QUALITY, evidence, POLICY).verdict is expected


def test_what_is_only_shown_decides_nothing() -> None:
    quality = CLEAN[Gate.QUALITY]
    shown = Figure("gate", "format", worse=0.5, p_worse=0.0, p_within=1.0, part=Part.SHOWN)
    assert judge(Gate.QUALITY, replace(quality, figures=(*quality.figures, shown)), POLICY).verdict is Verdict.PASS
    assert judge(Gate.QUALITY, replace(quality, figures=(shown,)), POLICY).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("action", "announced", "quality", "expected"),
    [
        ("same", "", Verdict.INCONCLUSIVE, Verdict.PASS),
        ("label", "", Verdict.INCONCLUSIVE, Verdict.PASS),
        ("full_gate", "", Verdict.PASS, Verdict.PASS),
        ("full_gate", "", Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
        ("block", "", Verdict.PASS, Verdict.FAIL),
        ("block", "another base model", Verdict.PASS, Verdict.PASS),
        ("block", "another base model", Verdict.INCONCLUSIVE, Verdict.INCONCLUSIVE),
    ],
)
def test_drift_says_how_much_must_have_been_evaluated(
    action: str, announced: str, quality: Verdict, expected: Verdict
) -> None:
    drift = DriftFound(action, 0.05, 0.001, 0.9, announced=announced)
    assert judge(Gate.DRIFT, GateEvidence(age_s=0.0, drift=drift), POLICY, quality).verdict is expected


def test_a_tripwire_may_be_missed_only_where_the_policy_says_so() -> None:
    unseen = GateEvidence(age_s=0.0, drift=DriftFound("same", 0.0, 1.0, 1.0, not_seen=("settings",)))
    assert judge(Gate.DRIFT, unseen, POLICY).verdict is Verdict.INCONCLUSIVE
    assert judge(Gate.DRIFT, unseen, GatePolicy(drift_may_miss=("settings",))).verdict is Verdict.PASS


@pytest.mark.parametrize("age_s", [None, float("nan"), -1.0, 31 * 86400.0])
def test_evidence_of_another_age_than_it_may_have_is_inconclusive(age_s: float | None) -> None:
    for gate, evidence in CLEAN.items():
        said = judge(gate, replace(evidence, age_s=age_s), POLICY, Verdict.PASS)
        assert said.verdict is Verdict.INCONCLUSIVE and "measured" in said.reason


@given(st.lists(st.sampled_from(Verdict)))
def test_in_all_nothing_passes_but_passes(verdicts: list[Verdict]) -> None:
    assert (in_all(verdicts) is Verdict.PASS) == (bool(verdicts) and set(verdicts) == {Verdict.PASS})


@pytest.mark.parametrize(
    "fields", [{"alpha": 0.0}, {"quality_tolerance": 1.0}, {"suites": ()}, {"metrics": ()}, {"max_age_days": 0.0}]
)
def test_a_policy_that_asks_for_nothing_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        GatePolicy(**fields)


def test_a_record_is_read_back_from_its_bytes_alone() -> None:
    data = record().as_bytes()
    assert read(data) == record()
    assert canonical(json.loads(data)) == data
    assert json.loads(data)["verdict"] == "pass"
    assert len(digest(data)) == 64


def test_a_record_whose_verdict_is_not_that_of_its_figures_is_refused() -> None:
    content = json.loads(record({}).as_bytes())
    assert content["verdict"] == "inconclusive"
    for forged in ({"verdict": "pass"}, {"verdicts": content["verdicts"] | {"quality": "pass"}}):
        with pytest.raises(BrokenRecord, match="do not follow"):
            read(canonical(content | forged))
    softer = content | {"policy": content["policy"] | {"quality_tolerance": 0.5}}
    with pytest.raises(BrokenRecord, match="do not follow"):
        read(canonical(softer))


@pytest.mark.parametrize("data", [b"", b"[]", b"{}", b'{"schema": "urn:workbench:gate:0"}', b"\xff"])
def test_other_bytes_are_no_record(data: bytes) -> None:
    with pytest.raises(BrokenRecord):
        read(data)


def test_a_figure_that_is_no_number_is_never_kept() -> None:
    broken = GateEvidence((Figure("gate", "gate", worse=float("nan")),))
    with pytest.raises(ValueError, match="JSON"):
        record({Gate.QUALITY: broken}).as_bytes()
