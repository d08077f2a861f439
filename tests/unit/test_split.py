"""Which sessions get the candidate: the right share, the same ones always, none without a ready replica."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.fleet import Fleet
from serving.core.split import Split, choose, place
from serving.core.state import Model, ReplicaState, Task
from tests.unit.core_examples import a_pool, a_replica, a_table

SPLIT = Split("rollout", "1", "2", 0.05)
PLACE = place("rollout", "t", "s")
Z = 4.0  # the seeds are fixed; a bound that chance breaks once in 16,000


def ready(version: str) -> bool:
    return True


def chosen(split: Split, tenant: str, session: str) -> str:
    return choose(split, place(split.rollout_id, tenant, session), ready)


def num_candidates(split: Split, sessions: list[tuple[str, str]]) -> int:
    return sum(chosen(split, *session) == split.candidate for session in sessions)


def within_binomial(count: int, num: int, share: float) -> bool:
    return abs(count - num * share) <= Z * math.sqrt(num * share * (1.0 - share)) + 1e-9


@pytest.mark.parametrize("share", [0.01, 0.05, 0.25, 0.5, 1.0])
def test_the_share_of_10000_sessions_is_right_also_of_a_whale(share: float) -> None:
    split = replace(SPLIT, share_frac=share)
    small = [(f"tenant-{number % 200}", f"session-{number}") for number in range(5000)]
    whale = [("whale", f"session-{number}") for number in range(5000)]
    for sessions in (small, whale, small + whale):
        assert within_binomial(num_candidates(split, sessions), len(sessions), share)


def test_who_comes_in_first_is_drawn_anew_by_each_rollout() -> None:
    sessions = [("t", str(number)) for number in range(4000)]
    first, second = ({s for s in sessions if place(name, *s).at < 0.25} for name in ("a", "b"))
    assert within_binomial(len(first & second), len(sessions), 0.25 * 0.25)


@given(st.text(), st.text(), st.floats(0, 1), st.floats(0, 1))
def test_a_session_once_in_stays_in(tenant: str, session: str, one: float, other: float) -> None:
    smaller, larger = sorted((one, other))
    if chosen(replace(SPLIT, share_frac=smaller), tenant, session) == "2":
        assert chosen(replace(SPLIT, share_frac=larger), tenant, session) == "2"


def test_lists_of_tenants_come_before_the_share() -> None:
    listed = replace(SPLIT, share_frac=0.5, allow=("friend",), deny=("bank",))
    assert {chosen(listed, "friend", str(number)) for number in range(50)} == {"2"}
    assert {chosen(listed, "anybody", str(number)) for number in range(50)} == {"1"}
    everybody = replace(SPLIT, share_frac=1.0, deny=("bank",))
    assert chosen(everybody, "bank", "s") == "1"
    assert chosen(everybody, "anybody", "s") == "2"
    assert chosen(replace(listed, share_frac=0.0), "friend", "s") == "1"


def a_fleet(candidate: ReplicaState, *, region: str = "local", adapters: tuple[str, ...] = ()) -> Fleet:
    table = a_table(
        a_pool("old", a_replica("old-0"), adapters=("polite", "rude")),
        a_pool("new", a_replica("new-0", candidate), version="2", region=region, adapters=adapters),
    )
    model = Model("m", Task.GENERATE, "1", ("1", "2"), split=replace(SPLIT, share_frac=1.0))
    fleet = Fleet()
    fleet.on_table(replace(table, models=(model,)))
    return fleet


@pytest.mark.parametrize("state", list(ReplicaState))
def test_only_a_ready_candidate_gets_sessions(state: ReplicaState) -> None:
    version = a_fleet(state).version_of("m", ("*",), PLACE)
    assert version == ("2" if state is ReplicaState.READY else "1")


def test_a_candidate_in_a_region_that_is_not_granted_gets_nobody() -> None:
    fleet = a_fleet(ReplicaState.READY, region="eu")
    assert fleet.version_of("m", ("us", "local"), PLACE) == "1"
    assert fleet.version_of("m", ("eu",), PLACE) == "2"


def test_a_candidate_without_the_adapter_that_is_asked_for_gets_nobody() -> None:
    fleet = a_fleet(ReplicaState.READY, adapters=("polite",))
    assert fleet.version_of("m", ("*",), PLACE, "polite") == "2"
    assert fleet.version_of("m", ("*",), PLACE, "rude") == "1"
    assert fleet.adapters_of("m", None) == ["polite", "rude"]
    assert fleet.adapters_of("m", "2") == ["polite"]


def test_without_a_rollout_the_champion_serves() -> None:
    fleet = Fleet()
    fleet.on_table(a_table(a_pool("old", a_replica("old-0"))))
    assert fleet.version_of("m", ("*",), None) == "1"
