"""How a candidate version comes to serve everybody, or nobody: one state, one look, one decision.

    deploying ─▶ shadow ─▶ step 1 % ─▶ 5 % ─▶ 25 % ─▶ 50 % ─▶ 100 % ─▶ promoting ─▶ promoted
        └─────────┴─────────┴── an alarm, a failed gate, a word ──────────┴─▶ rolling_back ◀────┘
                                                                                  └─▶ rolled_back

Rolling back takes effect at once: no session gets the candidate. It is over when the registry's champion is the version
before and the candidate's pools were told to drain and end.

`decide(view)` says what to do with the rollout as it stands; `apply` gives the state that follows. Everything else (the
split of sessions, which pools run, the registry's champion) follows from the state alone, so that whoever takes over
after a crash does the same again. What is not known is waited for, and never counts as passed. Going back is never
waited for: neither a pause, an approval nor a dead registry keeps a bad candidate in.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum

from serving.core.sequential import Verdict
from serving.core.split import Split

STEPS = (0.01, 0.05, 0.25, 0.5, 1.0)


class Phase(StrEnum):
    """Where a rollout stands."""

    DEPLOYING = "deploying"
    SHADOW = "shadow"
    STEP = "step"
    PROMOTING = "promoting"
    PROMOTED = "promoted"
    ROLLING_BACK = "rolling_back"
    ROLLED_BACK = "rolled_back"

    @property
    def is_over(self) -> bool:
        """Nothing follows, but for a promoted candidate that is taken back."""
        return self in (Phase.PROMOTED, Phase.ROLLED_BACK)


@dataclass(frozen=True, slots=True)
class RolloutPlan:
    """What was asked for.

    Attributes:
        steps: shares of sessions, rising, the last one 1.
        shadow_frac: of the requests of consenting tenants that are mirrored to the candidate first; 0 leaves it out.
        min_step_s: a step lasts at least so long.
        min_pairs: pairs of sessions that a step needs, from its beginning.
        approval_from_frac: from this share on an approval must stand; None needs none.
        needs_gate: whether the verdict of the gates must be `pass` before a session comes in.
        must_pass: signals that must be within their tolerance before everybody gets the candidate.
        allow: tenants that get the candidate before everybody does; empty lets chance draw sessions.
        deny: tenants that never get it while it is on trial.
        pools: those of the candidate that the rollout starts, and ends if it is taken back.
    """

    steps: tuple[float, ...] = STEPS
    shadow_frac: float = 0.0
    min_step_s: float = 60.0
    min_pairs: int = 20
    approval_from_frac: float | None = 0.25
    needs_gate: bool = True
    must_pass: tuple[str, ...] = ()
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    pools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Raises ValueError, naming what cannot be."""
        if not self.steps or list(self.steps) != sorted(set(self.steps)) or self.steps[0] <= 0.0:
            raise ValueError(f"steps rise from above 0 to 1; got {', '.join(f'{step:g}' for step in self.steps)}")
        if self.steps[-1] != 1.0:
            raise ValueError(f"the last step is 1, everybody; got {self.steps[-1]:g}")
        if not 0.0 <= self.shadow_frac <= 1.0:
            raise ValueError(f"shadow_frac is a share between 0 and 1; got {self.shadow_frac:g}")
        if not (self.min_step_s >= 0.0 and self.min_pairs >= 0):
            raise ValueError("min_step_s and min_pairs are not negative")
        if both := sorted(set(self.allow) & set(self.deny)):
            raise ValueError(f"tenant {both[0]} is both allowed and denied")


@dataclass(frozen=True, slots=True)
class Rollout:
    """A rollout as it is kept. `revision` rises with each write; `reason` says why it stands here.

    Attributes:
        stable: the champion when it began: what a rollback goes back to.
        step: index into the plan's steps, while the phase is `step`.
        entered_at_s: when this phase or step began (Unix seconds).
        pairs_at_entry: pairs of sessions that were known then.
        is_taken_back: somebody asked for a rollback.
    """

    rollout_id: str
    model: str
    stable: str
    candidate: str
    plan: RolloutPlan
    started_at_s: float
    entered_at_s: float
    phase: Phase = Phase.DEPLOYING
    step: int = 0
    pairs_at_entry: int = 0
    is_paused: bool = False
    is_taken_back: bool = False
    reason: str = "started"
    revision: int = 1

    @property
    def share_frac(self) -> float:
        """Of sessions that get the candidate."""
        if self.phase is Phase.STEP:
            return self.plan.steps[self.step]
        return 1.0 if self.phase in (Phase.PROMOTING, Phase.PROMOTED) else 0.0

    @property
    def split(self) -> Split | None:
        """What gateways are told; None once the registry's champion alone says the same."""
        if self.phase.is_over:
            return None
        is_trial = self.share_frac < 1.0
        return Split(
            self.rollout_id,
            self.stable,
            self.candidate,
            self.share_frac,
            self.plan.allow if is_trial else (),
            self.plan.deny if is_trial else (),
            self.plan.shadow_frac if self.phase is Phase.SHADOW else 0.0,
        )

    @property
    def champion(self) -> str | None:
        """What the registry's champion has to be; None as long as it is not this rollout's to say."""
        wanted = {Phase.PROMOTING: self.candidate, Phase.ROLLING_BACK: self.stable}
        return wanted.get(self.phase)

    @property
    def pools_wanted(self) -> Mapping[str, bool]:
        """The candidate's pools: True to run, False to drain and end; none once the rollout is over."""
        if self.phase.is_over:
            return {}
        return dict.fromkeys(self.plan.pools, self.phase is not Phase.ROLLING_BACK)


@dataclass(frozen=True, slots=True)
class Judgement:
    """What stands in the registry of a version: the gates' verdict and whether its evidence is approved.

    `is_approved` holds only for an approval of this very evidence; `is_rejected` for a release manager's no, whose
    reason is `rejection`. `frozen` says why nothing goes on now; `why`, why no approval counts. `digest` is the
    evidence's.
    """

    verdict: Verdict = Verdict.INCONCLUSIVE
    is_approved: bool = False
    is_rejected: bool = False
    digest: str | None = None
    rejection: str | None = None
    frozen: str | None = None
    why: str | None = None


@dataclass(frozen=True, slots=True)
class Signals:
    """The online tests so far: which alarmed, which passed, how many pairs of sessions they rest on."""

    alarmed: tuple[str, ...] = ()
    passed: tuple[str, ...] = ()
    num_pairs: int = 0


@dataclass(frozen=True, slots=True)
class RolloutView:
    """All that one decision may read. None: not known now.

    `num_ready` are the candidate's ready replicas; `champion` is the registry's; `wishes` are those for pools, as the
    running stack reads them.
    """

    now_s: float
    rollout: Rollout
    num_ready: int | None
    champion: str | None
    judgement: Judgement | None
    signals: Signals = field(default_factory=Signals)
    wishes: Mapping[str, bool] = field(default_factory=dict)


class Action(StrEnum):
    """What to do."""

    WAIT = "wait"
    ADVANCE = "advance"
    ROLL_BACK = "roll_back"


@dataclass(frozen=True, slots=True)
class RolloutDecision:
    """`waits_for` names everything that is missing, for a person to read."""

    action: Action
    phase: Phase
    step: int
    reason: str
    waits_for: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class RolloutRecord:
    """A decision with all that it rested on."""

    view: RolloutView
    decision: RolloutDecision


def decide(view: RolloutView) -> RolloutDecision:
    """What to do with the rollout now. The same view gives the same decision."""
    rollout = view.rollout
    if rollout.phase is Phase.ROLLED_BACK:
        return _wait(rollout, rollout.reason)
    if rollout.phase is Phase.ROLLING_BACK:
        return _settle(view, Phase.ROLLED_BACK, rollout.stable)
    if why := _why_back(view):
        return RolloutDecision(Action.ROLL_BACK, Phase.ROLLING_BACK, rollout.step, why)
    if rollout.phase is Phase.PROMOTED:
        return _wait(rollout, "serves everybody")
    if rollout.phase is Phase.PROMOTING:
        return _settle(view, Phase.PROMOTED, rollout.candidate)
    if rollout.is_paused:
        return _wait(rollout, "paused", "somebody to resume it")
    phase, step = _next(rollout)
    missing = _missing(view, phase, step)
    if missing:
        return _wait(rollout, rollout.reason, *missing)
    return RolloutDecision(Action.ADVANCE, phase, step, _came_to(rollout, phase, step))


def awaits_approval(rollout: Rollout, judgement: Judgement) -> bool:
    """Whether the gates passed and a release manager's word is still to come before everybody gets the candidate."""
    if rollout.plan.approval_from_frac is None or rollout.phase in (Phase.PROMOTING, Phase.ROLLING_BACK):
        return False
    is_decided = judgement.is_approved or judgement.is_rejected or rollout.phase.is_over
    return judgement.verdict is Verdict.PASS and judgement.digest is not None and not is_decided


def apply(view: RolloutView, decision: RolloutDecision) -> Rollout:
    """The rollout after the decision; the same one when it waits."""
    rollout = view.rollout
    if decision.action is Action.WAIT:
        return rollout
    return replace(
        rollout,
        phase=decision.phase,
        step=decision.step,
        entered_at_s=view.now_s,
        pairs_at_entry=view.signals.num_pairs,
        reason=decision.reason,
        revision=rollout.revision + 1,
    )


def replay(record: RolloutRecord) -> RolloutDecision:
    """Decides again from a record alone."""
    return decide(record.view)


def _why_back(view: RolloutView) -> str | None:
    """Why the candidate must go, or None."""
    rollout, judgement = view.rollout, view.judgement
    if rollout.is_taken_back:
        return "taken back"
    if rollout.phase is Phase.PROMOTED:
        return None
    if view.signals.alarmed:
        return f"worse online: {', '.join(sorted(view.signals.alarmed))}"
    if judgement is not None and judgement.is_rejected:
        return "rejected by a release manager" + (f": {judgement.rejection}" if judgement.rejection else "")
    if judgement is not None and rollout.plan.needs_gate and judgement.verdict is Verdict.FAIL:
        return "the gates' verdict is fail"
    return None


def _settle(view: RolloutView, phase: Phase, champion: str) -> RolloutDecision:
    """Waits until registry and stack say what they were told."""
    rollout = view.rollout
    missing = []
    if view.champion != champion:
        said = "has not said one" if view.champion is None else f"says {view.champion}"
        missing.append(f"champion {champion} (the registry {said})")
    wanted = rollout.pools_wanted.items()
    missing += [
        f"pool {name} to be told to end" for name, run in wanted if not run and view.wishes.get(name) is not run
    ]
    if missing:
        return _wait(rollout, rollout.reason, *missing)
    return RolloutDecision(Action.ADVANCE, phase, rollout.step, rollout.reason)


def _wait(rollout: Rollout, reason: str, *waits_for: str) -> RolloutDecision:
    return RolloutDecision(Action.WAIT, rollout.phase, rollout.step, reason, waits_for)


def _next(rollout: Rollout) -> tuple[Phase, int]:
    if rollout.phase is Phase.DEPLOYING and rollout.plan.shadow_frac > 0.0:
        return Phase.SHADOW, 0
    if rollout.phase is not Phase.STEP:
        return Phase.STEP, 0
    if rollout.step + 1 < len(rollout.plan.steps):
        return Phase.STEP, rollout.step + 1
    return Phase.PROMOTING, rollout.step


def _missing(view: RolloutView, phase: Phase, step: int) -> list[str]:
    """What is still to come before `phase` and `step` may begin."""
    rollout, plan = view.rollout, view.rollout.plan
    missing = []
    if not view.num_ready:
        missing.append("a ready replica of the candidate")
    if rollout.phase is not Phase.DEPLOYING:
        missing += _unproved(view)
    if phase is Phase.SHADOW:
        return missing
    judgement = view.judgement or Judgement()
    if judgement.frozen is not None:
        missing.append(f"the end of a freeze ({judgement.frozen})")
    if plan.needs_gate and judgement.verdict is not Verdict.PASS:
        missing.append("the gates' verdict to be pass")
    share = plan.steps[step] if phase is Phase.STEP else 1.0
    if plan.approval_from_frac is not None and share >= plan.approval_from_frac and not judgement.is_approved:
        missing.append(
            f"an approval of {rollout.model}@{rollout.candidate}" + (f" ({judgement.why})" if judgement.why else "")
        )
    if phase is Phase.PROMOTING:
        missing += [f"{name} within its tolerance" for name in plan.must_pass if name not in view.signals.passed]
    return missing


def _unproved(view: RolloutView) -> list[str]:
    """What the phase that runs has not shown yet. At the share of everybody there is nobody to compare with."""
    rollout, plan = view.rollout, view.rollout.plan
    missing = []
    left_s = rollout.entered_at_s + plan.min_step_s - view.now_s
    if left_s > 0.0:
        missing.append(f"{left_s:.0f} s of this step")
    pairs = view.signals.num_pairs - rollout.pairs_at_entry
    if rollout.phase is Phase.STEP and rollout.share_frac < 1.0 and pairs < plan.min_pairs:
        missing.append(f"{plan.min_pairs - pairs} pairs of sessions")
    return missing


def _came_to(rollout: Rollout, phase: Phase, step: int) -> str:
    if phase is Phase.STEP:
        return f"{100.0 * rollout.plan.steps[step]:g} % of sessions"
    return "all steps passed" if phase is Phase.PROMOTING else "mirrored requests"
