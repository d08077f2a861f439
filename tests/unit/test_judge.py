"""What a version's tags amount to: a missing verdict is no pass, and an approval is of this evidence or of none."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from serving.control.judge import RegistryJudge, judgement
from serving.core.sequential import Verdict

PASSED = {f"gate.{name}": "pass" for name in ("performance", "cost", "quality", "drift", "safety")}
DIGEST = "0123456789abcdef" * 4


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"gate.cost": "fail"}, Verdict.FAIL),
        ({"gate.cost": "fail", "gate.quality": "inconclusive"}, Verdict.FAIL),
        ({"gate.quality": "inconclusive"}, Verdict.INCONCLUSIVE),
        ({"gate.quality": "PASS"}, Verdict.INCONCLUSIVE),
        ({"gate.quality": ""}, Verdict.INCONCLUSIVE),
    ],
)
def test_only_a_pass_of_every_gate_is_a_pass(changes: dict[str, str], verdict: Verdict) -> None:
    assert judgement(PASSED | changes).verdict is verdict


@pytest.mark.parametrize("gate", PASSED)
def test_a_gate_that_said_nothing_is_inconclusive(gate: str) -> None:
    tags = {name: said for name, said in PASSED.items() if name != gate}
    assert judgement(tags).verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(
    ("approval", "is_approved"),
    [
        (DIGEST[:16], True),
        (DIGEST, True),
        (DIGEST[:15], False),
        ("f" + DIGEST[:16], False),
        (DIGEST + "0", False),
        (DIGEST[:16].upper(), False),
        ("", False),
        ("approved, thank you", False),
    ],
)
def test_an_approval_is_of_this_evidence_by_16_hex_digits_or_more(approval: str, is_approved: bool) -> None:
    assert judgement(PASSED | {"gate.evidence": DIGEST, "approval": approval}).is_approved is is_approved


def test_nothing_is_approved_without_evidence() -> None:
    found = judgement(PASSED | {"approval": DIGEST[:16]})
    assert not found.is_approved and found.digest is None


def test_a_rejection_stands_beside_any_verdict() -> None:
    assert judgement(PASSED | {"approval.rejected": "too slow in German"}).is_rejected


def test_the_judge_reads_the_tags_of_the_version_it_is_asked_for() -> None:
    asked: list[tuple[str, str]] = []

    def read(model: str, version: str) -> Mapping[str, str]:
        asked.append((model, version))
        return PASSED

    assert RegistryJudge(read).judge("m", "2").verdict is Verdict.PASS
    assert asked == [("m", "2")]
