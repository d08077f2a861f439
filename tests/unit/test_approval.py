"""Who may go on: the record's verdict, an approval of that very evidence, and every way to claim either without it."""

from __future__ import annotations

from dataclasses import replace

import pytest

from serving.core.approval import Alarm, Claim, Freeze, ReleasePolicy, Ruling, is_reserved, rule, tags_of, verdict_of
from serving.core.policies.gate import Gate
from serving.core.releases import MAX_EVIDENCE, Evidence, ReleaseBook, appointed, recorded
from serving.core.sequential import Verdict

DAY_S = 86_400.0
PASSED = {gate.tag: Verdict.PASS for gate in Gate}
OLD, NEW = "0123456789abcdef" * 4, "fedcba9876543210" * 4
EVIDENCE = Evidence("2", NEW, "abc", "gate/evidence.json", PASSED, "sha256:w2", recorded_at_s=1000.0)
BEFORE = replace(EVIDENCE, digest=OLD, recorded_at_s=500.0)
BOOK = recorded(recorded(ReleaseBook(), "m", BEFORE), "m", EVIDENCE)
SHOWN = tags_of(EVIDENCE) | {"weights.digest": "sha256:w2"}
APPROVED = SHOWN | {"approval": NEW[:16]}
POLICY = ReleasePolicy()


def ruling(
    tags: dict[str, str],
    *,
    book: ReleaseBook = BOOK,
    found: str | None = NEW,
    policy: ReleasePolicy = POLICY,
    now_s: float = 2000.0,
) -> Ruling:
    return rule(Claim("m", "2", tags, found), book, policy, now_s)


def alarms(found: Ruling) -> list[Alarm]:
    return [one.alarm for one in found.findings]


@pytest.mark.parametrize("digits", [16, 17, 64])
def test_an_approval_is_the_beginning_of_the_recorded_digest(digits: int) -> None:
    found = ruling(SHOWN | {"approval": NEW[:digits]})
    assert found.judgement.is_approved and found.judgement.verdict is Verdict.PASS
    assert (found.findings, found.put_back, found.judgement.why) == ((), {}, None)


def test_without_an_approval_the_digest_to_approve_is_named() -> None:
    found = ruling(SHOWN)
    assert (found.judgement.verdict, found.judgement.is_approved) == (Verdict.PASS, False)
    assert found.judgement.why == f"nobody approved {NEW[:16]}" and found.findings == ()


@pytest.mark.parametrize("approval", [NEW[:15], NEW[:16].upper(), NEW + "0", "f" * 16, "", "approved, thank you", "*"])
def test_a_wrong_approval_counts_for_nothing_and_is_taken_away(approval: str) -> None:
    found = ruling(SHOWN | {"approval": approval})
    assert not found.judgement.is_approved
    assert (alarms(found), found.put_back) == ([Alarm.APPROVAL_WRONG], {"approval": None})


def test_an_approval_of_older_evidence_is_stale() -> None:
    found = ruling(SHOWN | {"approval": OLD[:20]})
    assert not found.judgement.is_approved
    assert (alarms(found), found.put_back) == ([Alarm.APPROVAL_STALE], {"approval": None})


@pytest.mark.parametrize("now_there", [None, OLD])
def test_evidence_that_was_overwritten_or_taken_away_after_the_approval_voids_both(now_there: str | None) -> None:
    found = ruling(APPROVED, found=now_there)
    assert (found.judgement.verdict, found.judgement.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert (alarms(found), found.put_back) == ([Alarm.EVIDENCE_CHANGED], {"approval": None})


def test_tags_of_a_version_that_no_gate_judged_are_taken_away() -> None:
    forged = dict.fromkeys(PASSED, "pass") | {"gate.evidence": NEW, "approval": NEW, "weights.digest": "sha256:w2"}
    found = ruling(forged, book=ReleaseBook())
    assert (found.judgement.verdict, found.judgement.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert alarms(found) == [Alarm.TAGS_UNRECORDED]
    assert found.put_back == dict.fromkeys([*PASSED, "gate.evidence", "approval"])
    assert ruling({"weights.digest": "sha256:w2", "task": "generate"}, book=ReleaseBook()).findings == ()


def test_verdicts_come_from_the_record_and_their_tags_are_put_right() -> None:
    failed = replace(EVIDENCE, verdicts=PASSED | {"gate.quality": Verdict.FAIL})
    found = ruling(APPROVED, book=recorded(BOOK, "m", failed))
    assert found.judgement.verdict is Verdict.FAIL
    assert (alarms(found), found.put_back) == ([Alarm.TAGS_CHANGED], {"gate.quality": "fail"})


def test_tags_that_are_missing_or_of_the_run_before_are_put_right_without_an_alarm() -> None:
    found = ruling({"weights.digest": "sha256:w2"})
    assert (found.findings, found.put_back) == ((), tags_of(EVIDENCE))
    assert found.judgement.verdict is Verdict.PASS
    earlier = replace(BEFORE, verdicts=PASSED | {"gate.cost": Verdict.FAIL})
    found = ruling(tags_of(earlier) | {"weights.digest": "sha256:w2"})
    assert (found.findings, found.put_back) == ((), {"gate.evidence": NEW, "gate.cost": "pass"})


def test_other_weights_than_those_that_were_judged_are_nothing_that_was_approved() -> None:
    found = ruling(APPROVED | {"weights.digest": "sha256:other"})
    assert (found.judgement.verdict, found.judgement.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert alarms(found) == [Alarm.WEIGHTS_CHANGED]
    assert found.put_back == {"approval": None, "weights.digest": "sha256:w2"}


def test_evidence_grows_old_and_an_approval_with_it() -> None:
    policy = ReleasePolicy(evidence_valid_s=DAY_S)
    assert ruling(APPROVED, policy=policy, now_s=1000.0 + DAY_S).judgement.is_approved
    found = ruling(APPROVED, policy=policy, now_s=1001.0 + DAY_S)
    assert (found.judgement.verdict, found.judgement.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert "older than 1 days" in (found.judgement.why or "") and found.findings == ()


def test_a_rejection_counts_with_its_reason_whoever_wrote_it_and_with_any_evidence() -> None:
    for book in (BOOK, ReleaseBook()):
        found = ruling(SHOWN | {"approval.rejected": "too slow in German"}, book=book).judgement
        assert (found.is_rejected, found.rejection) == (True, "too slow in German")
    assert not ruling(APPROVED | {"approval.rejected": ""}).judgement.is_rejected


def test_a_freeze_holds_the_models_that_it_names_for_its_time() -> None:
    def frozen(models: tuple[str, ...], now_s: float) -> str | None:
        policy = ReleasePolicy(freezes=(Freeze(2000.0, 3000.0, "holidays", models),))
        return ruling(APPROVED, policy=policy, now_s=now_s).judgement.frozen

    assert frozen((), 2000.0) == frozen(("m",), 2999.0) == "holidays"
    assert frozen((), 1999.0) is frozen((), 3000.0) is frozen(("other",), 2500.0) is None


@pytest.mark.parametrize(
    ("changes", "verdict"),
    [
        ({}, Verdict.PASS),
        ({"gate.cost": Verdict.FAIL, "gate.quality": Verdict.INCONCLUSIVE}, Verdict.FAIL),
        ({"gate.quality": Verdict.INCONCLUSIVE}, Verdict.INCONCLUSIVE),
        ({"gate.of_ours": Verdict.FAIL}, Verdict.FAIL),
        ({"gate.of_ours": Verdict.PASS}, Verdict.PASS),
    ],
)
def test_only_passes_all_round_are_a_pass(changes: dict[str, Verdict], verdict: Verdict) -> None:
    assert verdict_of(PASSED | changes) is verdict


@pytest.mark.parametrize("gate", PASSED)
def test_a_gate_that_said_nothing_is_inconclusive(gate: str) -> None:
    assert verdict_of({name: said for name, said in PASSED.items() if name != gate}) is Verdict.INCONCLUSIVE


def test_what_is_judged_by_is_reserved() -> None:
    assert all(map(is_reserved, ["gate.quality", "gate.evidence", "approval", "approval.rejected", "weights.digest"]))
    assert not any(map(is_reserved, ["task", "approvals", "owner", "gateway"]))


def test_the_book_remembers_the_champion_before_and_so_much_evidence() -> None:
    book = appointed(ReleaseBook(), "m", "1", "sha256:w1", 1.0, "first")
    assert appointed(book, "m", "1", "sha256:w1", 2.0, "again") is book
    champion = appointed(book, "m", "2", "sha256:w2", 2.0, "rollout r1").of("m").champion
    assert champion is not None and (champion.version, champion.previous) == ("2", "1")
    for number in range(MAX_EVIDENCE + 5):
        book = recorded(book, "m", replace(EVIDENCE, digest=f"{number:064x}"))
    digests = [one.digest for one in book.of("m").evidence_of("2")]
    assert (len(digests), digests[0]) == (MAX_EVIDENCE, f"{MAX_EVIDENCE + 4:064x}")
    again = recorded(book, "m", replace(EVIDENCE, digest=digests[-1], recorded_at_s=9.0)).of("m").evidence_of("2")
    assert (len(again), again[0].recorded_at_s) == (MAX_EVIDENCE, 9.0)


@pytest.mark.parametrize("change", [{"digest": "abc"}, {"run_id": "../x"}, {"path": ""}])
def test_evidence_that_cannot_be_is_refused(change: dict[str, str]) -> None:
    assert EVIDENCE.place == "runs:/abc/gate/evidence.json"
    with pytest.raises(ValueError, match="evidence"):
        replace(EVIDENCE, **change)
