"""What a rollout does next: every phase, every reason to go back, and what it waits for."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.policies.rollout import (
    STEPS,
    Action,
    Judgement,
    Phase,
    Rollout,
    RolloutPlan,
    RolloutRecord,
    RolloutView,
    Signals,
    apply,
    awaits_approval,
    decide,
    replay,
)
from serving.core.sequential import Verdict

NOW_S = 1_000.0
GOOD = Judgement(Verdict.PASS, is_approved=True)
ENOUGH = Signals(num_pairs=1000)


def a_rollout(
    phase: Phase = Phase.DEPLOYING, step: int = 0, *, plan: RolloutPlan | None = None, **changes: Any
) -> Rollout:
    rollout = Rollout(
        "r", "m", "1", "2", plan or RolloutPlan(pools=("new",)), NOW_S - 500.0, NOW_S - 100.0, phase, step
    )
    return replace(rollout, **changes)


def a_view(rollout: Rollout, **changes: Any) -> RolloutView:
    return replace(RolloutView(NOW_S, rollout, 1, "1", GOOD, ENOUGH), **changes)


def test_a_good_candidate_comes_to_serve_everybody_step_by_step() -> None:
    rollout, shares, view = a_rollout(plan=RolloutPlan(shadow_frac=0.1)), [], None
    for _ in range(20):
        view = a_view(
            rollout, now_s=NOW_S + 1000.0 * rollout.revision, signals=Signals(num_pairs=rollout.revision * 100)
        )
        rollout = apply(view, decide(view))
        shares.append((rollout.phase, rollout.share_frac))
        if rollout.phase is Phase.PROMOTING:
            break
    assert shares == [
        (Phase.SHADOW, 0.0),
        *((Phase.STEP, share) for share in STEPS),
        (Phase.PROMOTING, 1.0),
    ]
    assert rollout.champion == "2" and rollout.split is not None and rollout.split.share_frac == 1.0
    assert apply(a_view(rollout), decide(a_view(rollout))) is rollout  # until the registry says so
    over = apply(a_view(rollout, champion="2"), decide(a_view(rollout, champion="2")))
    assert (over.phase, over.split, over.champion) == (Phase.PROMOTED, None, None)


@pytest.mark.parametrize(
    ("changes", "waits_for"),
    [
        ({"num_ready": 0}, "ready replica"),
        ({"num_ready": None}, "ready replica"),
        ({"judgement": None}, "gates' verdict"),
        ({"judgement": Judgement()}, "gates' verdict"),
        ({"judgement": Judgement(Verdict.PASS)}, "approval of m@2"),
        ({"now_s": NOW_S - 90.0}, "50 s of this step"),
        ({"signals": Signals(num_pairs=5)}, "15 pairs"),
    ],
)
def test_what_is_missing_is_waited_for_and_named(changes: dict[str, Any], waits_for: str) -> None:
    decision = decide(a_view(a_rollout(Phase.STEP, 1), **changes))
    assert decision.action is Action.WAIT
    assert waits_for in "; ".join(decision.waits_for)


def test_no_approval_is_needed_below_the_share_that_the_plan_names() -> None:
    unapproved = Judgement(Verdict.PASS)
    assert decide(a_view(a_rollout(Phase.STEP, 0), judgement=unapproved)).action is Action.ADVANCE
    assert decide(a_view(a_rollout(Phase.STEP, 1), judgement=unapproved)).action is Action.WAIT
    free = a_rollout(Phase.STEP, 1, plan=RolloutPlan(approval_from_frac=None, needs_gate=False))
    assert decide(a_view(free, judgement=None)).action is Action.ADVANCE


def test_a_freeze_holds_a_rollout_where_it_is_and_never_keeps_a_bad_candidate_in() -> None:
    frozen = replace(GOOD, frozen="holidays")
    found = decide(a_view(a_rollout(Phase.STEP, 0, plan=RolloutPlan(approval_from_frac=None)), judgement=frozen))
    assert (found.action, found.waits_for) == (Action.WAIT, ("the end of a freeze (holidays)",))
    bad = replace(frozen, is_rejected=True, rejection="too slow in German")
    found = decide(a_view(a_rollout(Phase.STEP, 0), judgement=bad))
    assert (found.action, found.reason) == (Action.ROLL_BACK, "rejected by a release manager: too slow in German")


def test_an_approval_is_awaited_once_the_gates_passed() -> None:
    passed = Judgement(Verdict.PASS, digest="ab" * 32)
    assert awaits_approval(a_rollout(Phase.STEP, 1), passed)
    assert not awaits_approval(a_rollout(Phase.STEP, 1), replace(passed, is_approved=True))
    assert not awaits_approval(a_rollout(Phase.STEP, 1), replace(passed, verdict=Verdict.INCONCLUSIVE))
    assert not awaits_approval(a_rollout(Phase.PROMOTED), passed)
    assert not awaits_approval(a_rollout(plan=RolloutPlan(approval_from_frac=None)), passed)


def test_everybody_gets_it_for_good_only_when_the_signals_that_must_have_passed() -> None:
    last = a_rollout(Phase.STEP, len(STEPS) - 1, plan=RolloutPlan(must_pass=("errors",)))
    assert "errors within its tolerance" in decide(a_view(last)).waits_for
    assert decide(a_view(last, signals=Signals((), ("errors",), 1000))).phase is Phase.PROMOTING


BAD = [
    ({"signals": Signals(("errors",), (), 30)}, "worse online: errors"),
    ({"judgement": Judgement(Verdict.PASS, is_rejected=True)}, "rejected"),
    ({"judgement": Judgement(Verdict.FAIL)}, "verdict is fail"),
]


@pytest.mark.parametrize("phase", [Phase.DEPLOYING, Phase.SHADOW, Phase.STEP, Phase.PROMOTING])
@pytest.mark.parametrize(("changes", "why"), BAD)
@pytest.mark.parametrize("is_paused", [False, True])
def test_a_bad_candidate_goes_at_once_whatever_else_is_missing(
    phase: Phase, changes: dict[str, Any], why: str, is_paused: bool
) -> None:
    view = a_view(a_rollout(phase, is_paused=is_paused), num_ready=None, champion=None, **changes)
    decision = decide(view)
    assert decision.action is Action.ROLL_BACK and why in decision.reason
    after = apply(view, decision)
    assert after.share_frac == 0.0 and after.split is not None and after.split.stable == "1"
    assert after.pools_wanted == {"new": False} and after.champion == "1"


def test_a_rollback_is_over_when_registry_and_stack_were_told() -> None:
    back = a_rollout(Phase.ROLLING_BACK)
    assert decide(a_view(back, champion="2", wishes={"new": False})).action is Action.WAIT
    assert decide(a_view(back, champion=None, wishes={"new": False})).action is Action.WAIT
    assert decide(a_view(back, wishes={"new": True})).action is Action.WAIT
    view = a_view(back, wishes={"new": False})
    over = apply(view, decide(view))
    assert (over.phase, over.split, over.pools_wanted) == (Phase.ROLLED_BACK, None, {})
    assert decide(a_view(over)).action is Action.WAIT


def test_a_promoted_champion_goes_back_to_the_one_before_when_asked() -> None:
    promoted = a_rollout(Phase.PROMOTED)
    view = a_view(promoted, champion="2", signals=Signals(("errors",), (), 30))
    assert decide(view).action is Action.WAIT
    view = a_view(replace(promoted, is_taken_back=True), champion="2")
    after = apply(view, decide(view))
    assert (after.phase, after.champion) == (Phase.ROLLING_BACK, "1")
    assert after.split is not None and after.split.share_frac == 0.0


def test_a_paused_rollout_stays_with_its_share() -> None:
    decision = decide(a_view(a_rollout(Phase.STEP, 2, is_paused=True)))
    assert (decision.action, decision.step, decision.reason) == (Action.WAIT, 2, "paused")


views = st.builds(
    RolloutView,
    now_s=st.floats(0, 1e6),
    rollout=st.builds(
        a_rollout,
        st.sampled_from(Phase),
        st.integers(0, len(STEPS) - 1),
        is_paused=st.booleans(),
        is_taken_back=st.booleans(),
    ),
    num_ready=st.none() | st.integers(0, 3),
    champion=st.sampled_from([None, "1", "2", "3"]),
    judgement=st.none() | st.builds(Judgement, st.sampled_from(Verdict), st.booleans(), st.booleans()),
    signals=st.builds(Signals, st.sampled_from([(), ("errors",)]), st.just(()), st.integers(0, 100)),
    wishes=st.dictionaries(st.just("new"), st.booleans()),
)


@given(views)
def test_any_decision_replays_and_never_widens_what_has_no_ready_replica_or_no_verdict(view: RolloutView) -> None:
    decision = decide(view)
    assert replay(RolloutRecord(view, decision)) == decision
    after = apply(view, decision)
    widens = after.share_frac > view.rollout.share_frac
    is_sound = view.num_ready and view.judgement is not None and view.judgement.verdict is Verdict.PASS
    assert not widens or (is_sound and not view.signals.alarmed)
    if after.champion == "2" != view.rollout.champion:
        assert view.judgement is not None and view.judgement.is_approved


@pytest.mark.parametrize(
    "wrong",
    [
        {"steps": ()},
        {"steps": (0.5, 0.25, 1.0)},
        {"steps": (0.0, 1.0)},
        {"steps": (0.1, 0.5)},
        {"shadow_frac": 1.5},
        {"min_step_s": float("nan")},
        {"allow": ("a",), "deny": ("a",)},
    ],
)
def test_a_plan_that_cannot_be_is_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"step|share|negative|tenant"):
        RolloutPlan(**wrong)
