"""What the registry's tags say of a version: the verdict of the gates, and whether its evidence is approved.

gate.performance, gate.quality, gate.cost   pass | fail | inconclusive; all must be there and pass
gate.evidence                               the digest of all that the verdict rests on
approval                                    a release manager's word: that digest's beginning, 16 hex digits or more
approval.rejected                           a release manager's no, with its reason

Tags are taken at their word: whoever may write a version's tags may pass it. Give that right to release managers alone.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

from serving.core.policies.rollout import Judgement
from serving.core.sequential import Verdict

GATES = ("gate.performance", "gate.quality", "gate.cost")
TAG_EVIDENCE, TAG_APPROVAL, TAG_REJECTED = "gate.evidence", "approval", "approval.rejected"
_APPROVAL = re.compile(r"[0-9a-f]{16,64}")

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
    said = [tags.get(gate, Verdict.INCONCLUSIVE) for gate in GATES]
    verdict = Verdict.INCONCLUSIVE
    if Verdict.FAIL in said:
        verdict = Verdict.FAIL
    elif all(one == Verdict.PASS for one in said):
        verdict = Verdict.PASS
    digest, approval = tags.get(TAG_EVIDENCE, ""), tags.get(TAG_APPROVAL, "")
    is_approved = _APPROVAL.fullmatch(approval) is not None and digest.startswith(approval)
    return Judgement(verdict, is_approved, bool(tags.get(TAG_REJECTED)), digest or None)
