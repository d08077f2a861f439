"""The record of a gate: all that a verdict rests on, as the canonical JSON whose SHA-256 a release manager approves.

    evidence.json   an artifact below `gate` of the run that the version's tag `gate.run` names
    gate.evidence   the version's tag with the digest of those bytes: other bytes are other evidence
    report.html     beside it, for people

A record can be judged again from its bytes alone (`read`): one whose verdict does not follow from its own figures and
policy is refused, whoever wrote it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from serving.core.policies.gate import (
    DriftFound,
    Figure,
    Gate,
    GateEvidence,
    GatePolicy,
    Part,
    Scale,
    Verdicts,
    canonical,
    judge_all,
)
from serving.core.policies.gate_cases import self_test

SCHEMA = "urn:workbench:gate:1"
FOLDER, EVIDENCE_FILE, REPORT_FILE = "gate", "evidence.json", "report.html"
TAG_EVIDENCE, TAG_RUN = "gate.evidence", "gate.run"
MIN_APPROVAL_DIGITS = 16


class BrokenRecord(ValueError):
    """The bytes are no record of a gate that can be believed; the message says why."""


@dataclass(frozen=True, slots=True)
class Subject:
    """A version as it was judged: its weights and the engine that served it (fingerprints, None where unknown)."""

    version: str
    weights_digest: str | None
    source: str | None
    engine: str | None = None


@dataclass(frozen=True, slots=True)
class Source:
    """A file that figures were taken from, with its digest and the MLflow run that holds it."""

    kind: str
    what: str
    sha256: str
    run_id: str | None = None


@dataclass(frozen=True, slots=True)
class GateRecord:
    """Everything.

    Attributes:
        differences: what of weights, flags and template is not the same: (champion's, candidate's) by name.
        gathered_at: ISO 8601 in UTC.
        commit: of the code that judged.
    """

    model: str
    champion: Subject
    candidate: Subject
    policy: GatePolicy
    evidence: Mapping[Gate, GateEvidence]
    gathered_at: str
    commit: str
    sources: tuple[Source, ...] = ()
    differences: Mapping[str, tuple[str, str]] = field(default_factory=dict)

    def verdicts(self) -> Verdicts:
        """What the evidence amounts to, after the gates were tried on their planted cases."""
        return judge_all(self.evidence, self.policy, self_test(self.policy))

    def as_bytes(self) -> bytes:
        """The canonical JSON, verdicts included. Raises ValueError for a figure that is NaN or infinite."""
        said = self.verdicts()
        content = asdict(self) | {
            "schema": SCHEMA,
            "policy_digest": self.policy.digest,
            **_said(said),
            "reasons": {gate.value: one.reason for gate, one in said.gates.items()},
            "self_test_mistakes": list(said.mistakes),
        }
        return canonical(content)


def _said(verdicts: Verdicts) -> dict[str, Any]:
    of_gates = {gate.value: one.verdict.value for gate, one in verdicts.gates.items()}
    return {"verdict": verdicts.verdict.value, "verdicts": of_gates}


def digest(data: bytes) -> str:
    """What is approved: SHA-256 of a record's bytes, 64 hex digits."""
    return hashlib.sha256(data).hexdigest()


def read(data: bytes) -> GateRecord:
    """The record in these bytes.

    Raises:
        BrokenRecord: it is none of this schema, or its verdicts do not follow from its evidence and policy.
    """
    try:
        content: dict[str, Any] = json.loads(data)
        if content["schema"] != SCHEMA:
            raise BrokenRecord(f"gate record of schema {content['schema']!r}, not {SCHEMA}: judge again")
        record = _parsed(content)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BrokenRecord(f"no record of a gate: {error}") from error
    expected = _said(record.verdicts()) | {"policy_digest": record.policy.digest}
    if {name: content.get(name) for name in expected} != expected:
        raise BrokenRecord("the verdicts do not follow from the record's own evidence and policy")
    return record


def _parsed(content: Mapping[str, Any]) -> GateRecord:
    policy: dict[str, Any] = {
        name: tuple(value) if isinstance(value, list) else value for name, value in content["policy"].items()
    }
    return GateRecord(
        model=content["model"],
        champion=Subject(**content["champion"]),
        candidate=Subject(**content["candidate"]),
        policy=GatePolicy(**policy),
        evidence={Gate(gate): _evidence(one) for gate, one in content["evidence"].items()},
        gathered_at=content["gathered_at"],
        commit=content["commit"],
        sources=tuple(Source(**one) for one in content["sources"]),
        differences={name: (old, new) for name, (old, new) in content["differences"].items()},
    )


def _evidence(content: Mapping[str, Any]) -> GateEvidence:
    drift = content["drift"]
    if drift is not None:
        listed = {name: tuple(drift[name]) for name in ("reasons", "not_seen")}
        drift = DriftFound(**{**drift, **listed})
    figures = tuple(_figure(one) for one in content["figures"])
    return GateEvidence(figures, tuple(content["doubts"]), content["age_s"], drift)


def _figure(content: Mapping[str, Any]) -> Figure:
    interval = content["interval"]
    return Figure(
        **{
            **content,
            "interval": None if interval is None else (interval[0], interval[1]),
            "scale": Scale(content["scale"]),
            "part": Part(content["part"]),
        }
    )
