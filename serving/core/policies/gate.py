"""Whether a candidate may serve: evidence and a policy give a verdict for each gate, and one in all.

    figure        how much worse the candidate is than the champion, its interval, and two chances: `p_worse` of a
                  figure like this if it were no worse, `p_within` if it were worse by the tolerance
    pass          p_within < alpha: worse by the tolerance is ruled out
    fail          p_worse < alpha, and no pass: it is worse
    inconclusive  neither; a figure that is missing, that was tested against another tolerance, or that is in doubt

A gate passes when everything that the policy asks for is there and passes; in all they pass when each of them does.
Drift decides no quality: it says how much must have been evaluated. Before a verdict counts, each gate is tried on its
planted failure, its inconclusive case and a clean one under the very policy (`self_test`); a gate that gets one wrong
says nothing.

The evidence is kept as canonical JSON, and the SHA-256 of those bytes is what a release manager approves.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from serving.core.sequential import Verdict

DAY_S = 86_400.0
MAX_REASONS = 3


class Gate(StrEnum):
    """What is judged; the version's tag of a gate is `gate.NAME`."""

    PERFORMANCE = "performance"
    COST = "cost"
    QUALITY = "quality"
    DRIFT = "drift"
    SAFETY = "safety"

    @property
    def tag(self) -> str:
        """The version's tag that holds its verdict."""
        return f"gate.{self.value}"


class Part(StrEnum):
    """A figure's part in its gate: it must pass; it may only object; it is shown."""

    DECIDES = "decides"
    OBJECTS = "objects"
    SHOWN = "shown"


class Scale(StrEnum):
    """What `worse` is: a share of the champion's figure, or the difference of two shares."""

    RATIO = "ratio"
    POINTS = "points"


FAILURES, REFUSALS, TRIPS = "failures", "refusals", "guardrail trips"
SAFETY_FIGURES = (REFUSALS, TRIPS)


@dataclass(frozen=True, slots=True)
class Figure:
    """One thing compared.

    Attributes:
        of: what it is of, as policies name it: a metric, a suite, `failures`.
        name: what people call it; no two of a gate alike.
        unit: of the two values.
        worse: how much worse the candidate is, on the `scale`; negative is better.
        interval: of `worse`, at 95 % before any correction.
        p_worse: corrected for the figures it was tested with.
        tolerance: what `p_within` was tested against.
        missing: why there is no figure.
    """

    of: str
    name: str
    unit: str = ""
    champion: float | None = None
    candidate: float | None = None
    worse: float | None = None
    interval: tuple[float, float] | None = None
    p_worse: float | None = None
    p_within: float | None = None
    tolerance: float | None = None
    scale: Scale = Scale.POINTS
    part: Part = Part.DECIDES
    missing: str = ""


@dataclass(frozen=True, slots=True)
class DriftFound:
    """What the tripwires said of the candidate against the champion's reference.

    Attributes:
        action: same, label, full_gate or block.
        not_seen: tripwires that had nothing to compare.
        announced: why a change this large was meant; empty is not announced.
    """

    action: str
    kl_mean: float
    kl_p: float
    agreement_frac: float
    reasons: tuple[str, ...] = ()
    not_seen: tuple[str, ...] = ()
    announced: str = ""


@dataclass(frozen=True, slots=True)
class GateEvidence:
    """What one gate rests on. `doubts` say why the figures may not be believed; `age_s` is of the oldest of them."""

    figures: tuple[Figure, ...] = ()
    doubts: tuple[str, ...] = ()
    age_s: float | None = None
    drift: DriftFound | None = None


@dataclass(frozen=True, slots=True)
class GatePolicy:
    """What is asked of a candidate.

    Attributes:
        metrics: of performance, each over all loads that both were measured under; one load alone may object.
        performance_tolerance: by which share a metric may be worse.
        failures_tolerance: by how much the share of failed requests may rise.
        cost_tolerance: by which share the price may be higher.
        suites: evaluations that must be there.
        quality_tolerance: by how much the accuracy over a suite may drop.
        needs_noise_floor: whether the champion must have been compared with itself.
        safety_tolerance: by how much refusals, and guardrail trips, may rise as a share of answers.
        drift_may_miss: tripwires that need not have been seen.
        max_age_days: older evidence counts as missing.
        alpha: the chance of a false fail, and of a false pass.
    """

    metrics: tuple[str, ...] = ("output_tokens_per_s_per_gpu", "ttft_s/p50", "tpot_s/p50")
    performance_tolerance: float = 0.10
    failures_tolerance: float = 0.02
    cost_metrics: tuple[str, ...] = ("usd_per_million_output_tokens",)
    cost_tolerance: float = 0.10
    suites: tuple[str, ...] = ("gate",)
    quality_tolerance: float = 0.02
    needs_noise_floor: bool = True
    safety_tolerance: float = 0.02
    drift_may_miss: tuple[str, ...] = ()
    max_age_days: float = 30.0
    alpha: float = 0.05

    def __post_init__(self) -> None:
        """Raises ValueError, naming what cannot be."""
        for name in ("performance", "failures", "cost", "quality", "safety"):
            tolerance = getattr(self, f"{name}_tolerance")
            if not 0.0 < tolerance < 1.0:
                raise ValueError(f"{name}_tolerance is a share between 0 and 1; got {tolerance:g}")
        if not (0.0 < self.alpha < 0.5 and self.max_age_days > 0.0):
            raise ValueError("alpha lies between 0 and 0.5, and max_age_days is above 0")
        for name in ("metrics", "cost_metrics", "suites"):
            if not getattr(self, name):
                raise ValueError(f"{name}: a gate that asks for nothing passes nothing; name at least one")

    @property
    def digest(self) -> str:
        """SHA-256 of the policy; a part of the evidence."""
        return digest_of(asdict(self))

    def asked(self, gate: Gate) -> Mapping[str, float]:
        """What the gate must have figures of, with the tolerance of each."""
        asked: Mapping[Gate, Mapping[str, float]] = {
            Gate.PERFORMANCE: dict.fromkeys(self.metrics, self.performance_tolerance)
            | {FAILURES: self.failures_tolerance},
            Gate.COST: dict.fromkeys(self.cost_metrics, self.cost_tolerance),
            Gate.QUALITY: dict.fromkeys(self.suites, self.quality_tolerance),
            Gate.SAFETY: dict.fromkeys(SAFETY_FIGURES, self.safety_tolerance),
        }
        return asked.get(gate, {})


@dataclass(frozen=True, slots=True)
class Judged:
    """A figure and what is said of it."""

    figure: Figure
    verdict: Verdict
    reason: str


@dataclass(frozen=True, slots=True)
class GateVerdict:
    """What a gate says, why, and by which figures."""

    verdict: Verdict
    reason: str
    figures: tuple[Judged, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdicts:
    """All gates; `mistakes` are those of the self-test, with which no verdict counts."""

    verdict: Verdict
    gates: Mapping[Gate, GateVerdict]
    mistakes: tuple[str, ...] = field(default=())


def judge_all(evidence: Mapping[Gate, GateEvidence], policy: GatePolicy, mistakes: Sequence[str] = ()) -> Verdicts:
    """Judges a candidate.

    Args:
        evidence: a gate without any is inconclusive.
        policy: what is asked.
        mistakes: of the self-test (`gate_cases.self_test`); any makes everything inconclusive.
    """
    quality = judge(Gate.QUALITY, evidence.get(Gate.QUALITY, GateEvidence()), policy)
    gates = {
        gate: quality
        if gate is Gate.QUALITY
        else judge(gate, evidence.get(gate, GateEvidence()), policy, quality.verdict)
        for gate in Gate
    }
    if mistakes:
        why = f"the gates' own test failed: {'; '.join(mistakes)}"
        gates = {gate: GateVerdict(Verdict.INCONCLUSIVE, why, found.figures) for gate, found in gates.items()}
    return Verdicts(in_all([found.verdict for found in gates.values()]), gates, tuple(mistakes))


def in_all(verdicts: Sequence[str]) -> Verdict:
    """Fail where any fails, pass where all pass; inconclusive otherwise, and for none at all."""
    if Verdict.FAIL in verdicts:
        return Verdict.FAIL
    return Verdict.PASS if verdicts and all(one == Verdict.PASS for one in verdicts) else Verdict.INCONCLUSIVE


def judge(
    gate: Gate, evidence: GateEvidence, policy: GatePolicy, quality: Verdict = Verdict.INCONCLUSIVE
) -> GateVerdict:
    """One gate's verdict. `quality` is the quality gate's, on which that of drift rests."""
    asked = policy.asked(gate)
    judged = tuple(_judged(figure, asked.get(figure.of), policy.alpha) for figure in evidence.figures)
    doubts = [*evidence.doubts, *_age(evidence, policy)]
    if doubts:
        return GateVerdict(Verdict.INCONCLUSIVE, "; ".join(doubts), judged)
    if gate is Gate.DRIFT:
        return GateVerdict(*_drift(evidence.drift, policy, quality), judged)
    have = {one.figure.of for one in judged if one.figure.part is Part.DECIDES}
    missing = [f"no figure of {name}" for name in asked if name not in have]
    counted = [one for one in judged if one.figure.part is Part.DECIDES or one.verdict is Verdict.FAIL]
    verdict = in_all([one.verdict for one in counted])
    if verdict is Verdict.PASS and missing:
        verdict = Verdict.INCONCLUSIVE
    if verdict is Verdict.PASS:
        return GateVerdict(verdict, "within every tolerance", judged)
    said = [f"{one.figure.name}: {one.reason}" for one in counted if one.verdict is verdict]
    why = said if verdict is Verdict.FAIL else missing + said
    more = f"; and {len(why) - MAX_REASONS} more" if len(why) > MAX_REASONS else ""
    return GateVerdict(verdict, "; ".join(why[:MAX_REASONS]) + more, judged)


def canonical(content: Any) -> bytes:
    """JSON with one way to write it: sorted keys, no spaces, UTF-8. Raises ValueError for NaN and infinity."""
    return json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False).encode()


def digest_of(content: Any) -> str:
    """SHA-256 of the canonical JSON, 64 hex digits."""
    return hashlib.sha256(canonical(content)).hexdigest()


def _judged(figure: Figure, tolerance: float | None, alpha: float) -> Judged:
    if figure.part is Part.SHOWN:
        return Judged(figure, Verdict.INCONCLUSIVE, "only shown")
    if figure.missing:
        return Judged(figure, Verdict.INCONCLUSIVE, figure.missing)
    worse, p_worse, p_within = figure.worse, figure.p_worse, figure.p_within
    if worse is None or not math.isfinite(worse) or p_worse is None or not 0.0 <= p_worse <= 1.0:
        return Judged(figure, Verdict.INCONCLUSIVE, "no figure")
    if tolerance is None:
        return Judged(figure, Verdict.INCONCLUSIVE, "the policy has no tolerance for it")
    if figure.part is Part.OBJECTS:
        objects = p_worse < alpha and worse >= tolerance
        return Judged(figure, Verdict.FAIL if objects else Verdict.PASS, _worse(figure) if objects else "no objection")
    if figure.tolerance is None or not math.isclose(figure.tolerance, tolerance):
        return Judged(figure, Verdict.INCONCLUSIVE, f"was not tested against the tolerance of {tolerance:g}")
    if p_within is None or not 0.0 <= p_within <= 1.0:
        return Judged(figure, Verdict.INCONCLUSIVE, "nothing rules the tolerance out")
    if p_within < alpha:
        return Judged(figure, Verdict.PASS, "within the tolerance")
    if p_worse < alpha:
        return Judged(figure, Verdict.FAIL, _worse(figure))
    return Judged(figure, Verdict.INCONCLUSIVE, "too few to rule out the tolerance, or to show that it is worse")


def _worse(figure: Figure) -> str:
    unit = "%" if figure.scale is Scale.RATIO else "points"
    return f"worse by {100.0 * (figure.worse or 0.0):.1f} {unit}"


def _age(evidence: GateEvidence, policy: GatePolicy) -> list[str]:
    if evidence.age_s is None:
        is_something = evidence.drift is not None or any(not one.missing for one in evidence.figures)
        return ["nobody knows when it was measured"] if is_something else []
    if 0.0 <= evidence.age_s <= policy.max_age_days * DAY_S:
        return []
    return [f"measured {evidence.age_s / DAY_S:.0f} days ago; {policy.max_age_days:g} is the most"]


def _drift(found: DriftFound | None, policy: GatePolicy, quality: Verdict) -> tuple[Verdict, str]:
    """A small change passes, a large one as far as quality was judged, the largest only where it was announced."""
    if found is None:
        return Verdict.INCONCLUSIVE, "no drift check of the candidate"
    if unseen := [name for name in found.not_seen if name not in policy.drift_may_miss]:
        return Verdict.INCONCLUSIVE, f"not seen: {', '.join(unseen)}"
    why = "; ".join(found.reasons) or "no tripwire"
    if found.action in ("same", "label"):
        return Verdict.PASS, "unchanged" if found.action == "same" else f"changed: {why}"
    if found.action == "block" and not found.announced:
        return Verdict.FAIL, f"changed beyond what may pass unannounced: {why}"
    if found.action not in ("full_gate", "block"):
        return Verdict.INCONCLUSIVE, f"no outcome of a drift check: {found.action}"
    if quality is not Verdict.PASS:
        return Verdict.INCONCLUSIVE, f"changed, which needs the quality gate to pass: {why}"
    said = f"; announced: {found.announced}" if found.action == "block" else ""
    return Verdict.PASS, f"changed, and the quality gate passes: {why}{said}"
