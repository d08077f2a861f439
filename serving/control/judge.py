"""What the registry's tags say of a version: the verdict of the gates, and whether its evidence is approved.

gate.performance, gate.cost, gate.quality,   pass | fail | inconclusive; all must be there and pass
gate.drift, gate.safety
gate.evidence                                the digest of the record that the verdict rests on (core/gate_record.py)
approval                                     a release manager's word: that digest's beginning, 16 hex digits or more
approval.rejected                            a release manager's no, with its reason

Tags are taken at their word: whoever may write a version's tags may pass it. Give that right to release managers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from serving.core.gate_record import MIN_APPROVAL_DIGITS, TAG_EVIDENCE
from serving.core.policies.gate import Gate, in_all
from serving.core.policies.rollout import Judgement
from serving.core.sequential import Verdict

TAG_APPROVAL, TAG_REJECTED = "approval", "approval.rejected"
_APPROVAL = re.compile(rf"[0-9a-f]{{{MIN_APPROVAL_DIGITS},64}}")

ReadTags = Callable[[str, str], Mapping[str, str]]
"""(model, version) → its tags; blocks, and raises ServingError when the registry does not answer."""


class RegistryJudge:
    """The judge that reads a version's tags."""

    def __init__(self, read_tags: ReadTags) -> None:
        self._read_tags = read_tags

    def judge(self, model: str, version: str) -> Judgement:
        """What stands in the registry now. Raises ServingError when it does not answer."""
        return judgement(self._read_tags(model, version))


def judgement(tags: Mapping[str, str]) -> Judgement:
    """The judgement that a version's tags amount to."""
    verdict = in_all([tags.get(gate.tag, Verdict.INCONCLUSIVE) for gate in Gate])
    digest, approval = tags.get(TAG_EVIDENCE, ""), tags.get(TAG_APPROVAL, "")
    is_approved = _APPROVAL.fullmatch(approval) is not None and digest.startswith(approval)
    return Judgement(verdict, is_approved, bool(tags.get(TAG_REJECTED)), digest or None)
