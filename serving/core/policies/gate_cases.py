"""What each gate must get right before its verdict counts: a planted failure, an inconclusive case, and a clean one.

The cases are made from the policy at hand, so that a tolerance or an alpha under which a gate could no longer fail, or
no longer pass, shows here and not in a release.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from serving.core.policies.gate import DAY_S, DriftFound, Figure, Gate, GateEvidence, GatePolicy, judge
from serving.core.sequential import Verdict

Case = tuple[Gate, str, Verdict, GateEvidence]
_FAR = 10.0  # by how much a planted drop exceeds the tolerance


def self_test(policy: GatePolicy) -> tuple[str, ...]:
    """What the gates get wrong under this policy; nothing when they are right."""
    wrong = []
    for gate, name, expected, evidence in cases(policy):
        said = judge(gate, evidence, policy, Verdict.PASS).verdict
        if said is not expected:
            wrong.append(f"{gate.value} says {said} of {name}, which is {expected}")
    return tuple(wrong)


def cases(policy: GatePolicy) -> list[Case]:
    """Every planted case: (gate, what it is, the verdict it must get, the evidence)."""
    found: list[Case] = []
    for gate in (Gate.PERFORMANCE, Gate.COST, Gate.QUALITY, Gate.SAFETY):
        clean = _figures(policy.asked(gate), policy.alpha)
        found.append((gate, "a clean candidate", Verdict.PASS, GateEvidence(clean, age_s=0.0)))
        found += [(gate, *case) for case in _bad(clean, policy)]
    return found + [(Gate.DRIFT, *case) for case in _drifts()]


def _figures(asked: Mapping[str, float], alpha: float) -> tuple[Figure, ...]:
    return tuple(
        Figure(
            of=name,
            name=name,
            champion=1.0,
            candidate=1.0,
            worse=0.0,
            interval=(-tolerance / 2.0, tolerance / 2.0),
            p_worse=0.5,
            p_within=alpha / 10.0,
            tolerance=tolerance,
        )
        for name, tolerance in asked.items()
    )


def _bad(clean: tuple[Figure, ...], policy: GatePolicy) -> list[tuple[str, Verdict, GateEvidence]]:
    """Each figure in turn: dropped far beyond its tolerance, unsettled, missing, of another tolerance; all in doubt."""
    found = []
    for index, figure in enumerate(clean):
        changes = {
            f"a planted drop of {figure.of}": (
                Verdict.FAIL,
                replace(figure, worse=_FAR * (figure.tolerance or 0.0), p_worse=policy.alpha / 10.0, p_within=1.0),
            ),
            f"an unsettled {figure.of}": (Verdict.INCONCLUSIVE, replace(figure, p_within=0.5)),
            f"a missing {figure.of}": (Verdict.INCONCLUSIVE, Figure(figure.of, figure.name, missing="not measured")),
            f"a NaN of {figure.of}": (Verdict.INCONCLUSIVE, replace(figure, worse=float("nan"))),
            f"another tolerance of {figure.of}": (
                Verdict.INCONCLUSIVE,
                replace(figure, tolerance=(figure.tolerance or 0.0) / 2.0),
            ),
        }
        for name, (verdict, changed) in changes.items():
            figures = (*clean[:index], changed, *clean[index + 1 :])
            found.append((name, verdict, GateEvidence(figures, age_s=0.0)))
        without = clean[:index] + clean[index + 1 :]
        found.append((f"nothing of {figure.of}", Verdict.INCONCLUSIVE, GateEvidence(without, age_s=0.0)))
    old_s = 2.0 * policy.max_age_days * DAY_S
    found.append(("evidence in doubt", Verdict.INCONCLUSIVE, GateEvidence(clean, ("another machine",), 0.0)))
    found.append(("evidence of unknown age", Verdict.INCONCLUSIVE, GateEvidence(clean)))
    found.append(("old evidence", Verdict.INCONCLUSIVE, GateEvidence(clean, age_s=old_s)))
    return found


def _drifts() -> list[tuple[str, Verdict, GateEvidence]]:
    same = DriftFound("same", 0.0, 1.0, 1.0)
    unseen = "a tripwire that nobody may miss"
    found = {
        "an unchanged candidate": (Verdict.PASS, same),
        "a planted block": (Verdict.FAIL, replace(same, action="block", kl_mean=1.0, reasons=("planted",))),
        "an unseen tripwire": (Verdict.INCONCLUSIVE, replace(same, not_seen=(unseen,))),
        "an unknown outcome": (Verdict.INCONCLUSIVE, replace(same, action="?")),
    }
    made = [(name, verdict, GateEvidence(age_s=0.0, drift=drift)) for name, (verdict, drift) in found.items()]
    return [*made, ("no drift check", Verdict.INCONCLUSIVE, GateEvidence())]
