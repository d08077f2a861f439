"""Whether a version may go on: what the gates said, whether that is approved, and what in the registry is not true.

    record    what the control plane was told itself (releases.py): verdicts, the evidence document's digest
    tags      what stands in the registry now: a claim of whoever could write it
    found     the digest of the evidence document as it is read there now

The verdict is the record's. An approval counts only where it is the beginning of the recorded digest, 16 hex digits or
more, the document still has that digest, and it is not too old. What the tags say beyond that counts for nothing, is
put back, and is told as an alarm. A rejection counts whoever wrote it: a no is never dangerous.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from serving.core.gate_record import MIN_APPROVAL_DIGITS, TAG_EVIDENCE, TAG_RUN
from serving.core.policies.gate import DAY_S, Gate, in_all
from serving.core.policies.rollout import Judgement
from serving.core.releases import Evidence, ReleaseBook
from serving.core.sequential import Verdict

GATES = tuple(gate.tag for gate in Gate)
"""The verdicts that every gate run gives; more under `gate.` count as well where they are recorded."""
GATE_PREFIX = "gate."
TAG_APPROVAL, TAG_REJECTED = "approval", "approval.rejected"
TAG_WEIGHTS = "weights.digest"
CHAMPION = "champion"
_APPROVAL = re.compile(rf"[0-9a-f]{{{MIN_APPROVAL_DIGITS},64}}")


class Alarm(StrEnum):
    """What was found in the registry that nobody with the right to it can have meant."""

    ALIAS_FORGED = "alias_forged"
    TAGS_UNRECORDED = "tags_unrecorded"
    TAGS_CHANGED = "tags_changed"
    WEIGHTS_CHANGED = "weights_changed"
    APPROVAL_WRONG = "approval_wrong"
    APPROVAL_STALE = "approval_stale"
    EVIDENCE_CHANGED = "evidence_changed"


@dataclass(frozen=True, slots=True)
class Finding:
    """An alarm about a version, with words for people."""

    alarm: Alarm
    model: str
    version: str
    text: str


@dataclass(frozen=True, slots=True)
class Freeze:
    """A time in which no version goes on; going back is always free. `models` empty means all. Unix seconds."""

    from_s: float
    until_s: float
    why: str
    models: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ReleasePolicy:
    """For how long evidence, and an approval of it, counts; and when nothing goes on."""

    evidence_valid_s: float = 14 * DAY_S
    freezes: tuple[Freeze, ...] = ()

    def frozen(self, model: str, now_s: float) -> str | None:
        """Why the model stands still now, or None."""
        for freeze in self.freezes:
            if freeze.from_s <= now_s < freeze.until_s and (not freeze.models or model in freeze.models):
                return freeze.why or "a freeze"
        return None


@dataclass(frozen=True, slots=True)
class Claim:
    """What stands in the registry of one version.

    `found` is the digest of the document at the recorded evidence's place as read just now; None where there is none.
    """

    model: str
    version: str
    tags: Mapping[str, str]
    found: str | None = None


@dataclass(frozen=True, slots=True)
class Ruling:
    """What counts, what is alarming, and what each tag has to be; None takes the tag away."""

    judgement: Judgement
    findings: tuple[Finding, ...] = ()
    put_back: Mapping[str, str | None] = field(default_factory=dict)


def rule(claim: Claim, book: ReleaseBook, policy: ReleasePolicy, now_s: float) -> Ruling:
    """Judges a version by the record; the same arguments give the same ruling."""
    rejection = claim.tags.get(TAG_REJECTED) or None
    judgement = Judgement(
        is_rejected=rejection is not None, rejection=rejection, frozen=policy.frozen(claim.model, now_s)
    )
    remembered = book.of(claim.model).evidence_of(claim.version)
    if not remembered:
        findings, put_back = _unrecorded(claim)
        return Ruling(replace(judgement, why="no gate run of it was recorded"), findings, put_back)
    evidence, known = remembered[0], {one.digest for one in remembered}
    findings, put_back = _shown(claim, evidence, known)
    void, more = _void(claim, evidence, policy, now_s)
    verdict = Verdict.INCONCLUSIVE if void else verdict_of(evidence.verdicts)
    why, wrong = _approval(claim, evidence, known, void)
    if wrong is not None or (more and TAG_APPROVAL in claim.tags):
        put_back[TAG_APPROVAL] = None
    if any(one.alarm is Alarm.WEIGHTS_CHANGED for one in more):
        put_back[TAG_WEIGHTS] = evidence.weights_digest
    judgement = replace(judgement, verdict=verdict, is_approved=why is None, digest=evidence.digest, why=why)
    return Ruling(judgement, (*findings, *more, *([wrong] if wrong else ())), put_back)


def verdict_of(verdicts: Mapping[str, Verdict]) -> Verdict:
    """`fail` where one failed, `pass` where all of `GATES` and all others that were recorded passed."""
    return in_all([verdicts.get(gate, Verdict.INCONCLUSIVE) for gate in {*GATES, *verdicts}])


def tags_of(evidence: Evidence) -> dict[str, str]:
    """The tags by which the registry shows the evidence."""
    verdicts = {gate: str(verdict) for gate, verdict in evidence.verdicts.items()}
    return verdicts | {TAG_EVIDENCE: evidence.digest, TAG_RUN: evidence.run_id}


def is_reserved(tag: str) -> bool:
    """Whether a version's tag says something that this module judges by."""
    return tag.startswith(GATE_PREFIX) or tag == TAG_WEIGHTS or tag.partition(".")[0] == TAG_APPROVAL


def _unrecorded(claim: Claim) -> tuple[tuple[Finding, ...], dict[str, str | None]]:
    """Verdicts and approvals of a version that no gate run of ours is known of, such as tags sent with its creation."""
    forged = sorted(tag for tag in claim.tags if tag in (*GATES, TAG_EVIDENCE, TAG_RUN, TAG_APPROVAL))
    if not forged:
        return (), {}
    text = f"it has the tags {', '.join(forged)}, and no gate run of it was recorded"
    return (_finding(Alarm.TAGS_UNRECORDED, claim, text),), dict.fromkeys(forged)


def _shown(claim: Claim, evidence: Evidence, known: set[str]) -> tuple[tuple[Finding, ...], dict[str, str | None]]:
    """Tags that don't show the newest evidence. One that is missing, or shows a run before, is no alarm."""
    wanted: dict[str, str | None] = {**dict.fromkeys(GATES), **tags_of(evidence)}
    put_back = {tag: value for tag, value in wanted.items() if claim.tags.get(tag) != value}
    is_older = claim.tags.get(TAG_EVIDENCE) in known - {evidence.digest}
    changed = sorted(tag for tag in put_back if tag in claim.tags)
    if not changed or is_older:
        return (), put_back
    text = f"its tags {', '.join(changed)} were changed by hand; the gates recorded otherwise"
    return (_finding(Alarm.TAGS_CHANGED, claim, text),), put_back


def _void(
    claim: Claim, evidence: Evidence, policy: ReleasePolicy, now_s: float
) -> tuple[str | None, tuple[Finding, ...]]:
    """Why the evidence counts for nothing, or None; and what is alarming about it."""
    weights = claim.tags.get(TAG_WEIGHTS)
    if evidence.weights_digest is not None and weights != evidence.weights_digest:
        text = f"its weights were judged as {evidence.weights_digest}, and the registry now says {weights or 'nothing'}"
        return text, (_finding(Alarm.WEIGHTS_CHANGED, claim, text),)
    if claim.found != evidence.digest:
        now = "is not there" if claim.found is None else f"has the digest {claim.found[:MIN_APPROVAL_DIGITS]}"
        text = f"its evidence {evidence.place} {now}; {evidence.digest[:MIN_APPROVAL_DIGITS]} was recorded"
        return text, (_finding(Alarm.EVIDENCE_CHANGED, claim, text),)
    if now_s > evidence.recorded_at_s + policy.evidence_valid_s:
        return f"its evidence is older than {policy.evidence_valid_s / DAY_S:g} days: run the gates again", ()
    return None, ()


def _approval(claim: Claim, evidence: Evidence, known: set[str], void: str | None) -> tuple[str | None, Finding | None]:
    """Why no approval counts, or None where one does; and what is alarming about the one that stands there."""
    approval = claim.tags.get(TAG_APPROVAL)
    if approval is None:
        return void or f"nobody approved {evidence.digest[:MIN_APPROVAL_DIGITS]}", None
    if _APPROVAL.fullmatch(approval) and evidence.digest.startswith(approval):
        return void, None
    is_stale = _APPROVAL.fullmatch(approval) and any(digest.startswith(approval) for digest in known)
    kind, of = (Alarm.APPROVAL_STALE, "older evidence") if is_stale else (Alarm.APPROVAL_WRONG, "no evidence of it")
    text = f"its approval is of {of}; to approve is to say {evidence.digest[:MIN_APPROVAL_DIGITS]} or more of that"
    return text, _finding(kind, claim, text)


def _finding(alarm: Alarm, claim: Claim, text: str) -> Finding:
    return Finding(alarm, claim.model, claim.version, text)
