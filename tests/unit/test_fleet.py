"""The fleet's events: counts are exact, scrapes are corrected, tables keep what is in flight."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.errors import BadRequest, NotFound
from serving.core.state import ReplicaState, Task
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request, a_snapshot, a_table


def view_of(fleet: object, replica_id: str):
    return next(r for r in fleet.replicas if r.replica_id == replica_id)  # type: ignore[attr-defined]


def test_load_is_the_scrape_plus_what_was_done_since() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_dispatched("a", a_request("before"), NOW_S - 1.0)
    fleet.on_dispatched("a", a_request("after"), NOW_S + 0.1)
    fleet.on_snapshot(a_snapshot("a", num_running=3, num_waiting=1))
    assert view_of(fleet, "a").num_requests == 5
    fleet.on_finished("a", "before", NOW_S + 0.2)
    assert view_of(fleet, "a").num_requests == 4
    assert view_of(fleet, "a").num_in_flight == 1


def test_an_older_scrape_changes_nothing() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_snapshot(a_snapshot("a", num_running=3))
    fleet.on_snapshot(a_snapshot("a", num_running=99, observed_at_s=NOW_S - 5))
    fleet.on_snapshot(a_snapshot("stranger"))
    assert view_of(fleet, "a").num_running == 3


def test_a_new_table_keeps_what_is_in_flight() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    fleet.on_dispatched("a", a_request("r"), NOW_S)
    fleet.on_table(a_table(a_pool("p", a_replica("a", ReplicaState.DRAINING), a_replica("b")), epoch=2))
    assert view_of(fleet, "a").num_in_flight == 1
    assert [r.replica_id for r in fleet.view(a_request(), NOW_S).pools[0].ready] == ["b"]


def test_a_removed_replica_is_forgotten_with_its_last_request() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a"), a_replica("b")))
    fleet.on_dispatched("a", a_request("r"), NOW_S)
    fleet.on_table(a_table(a_pool("p", a_replica("b")), epoch=2))
    assert view_of(fleet, "a").state is ReplicaState.DOWN
    fleet.on_finished("a", "r", NOW_S + 1)
    assert [r.replica_id for r in fleet.replicas] == ["b"]


def test_a_restarted_engine_starts_without_its_old_scrape() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_snapshot(a_snapshot("a", num_running=30))
    moved = replace(a_replica("a"), url="http://127.0.0.1/elsewhere")
    fleet.on_table(a_table(a_pool("p", moved), epoch=2))
    assert view_of(fleet, "a").observed_at_s is None
    assert view_of(fleet, "a").num_requests == 0


def test_a_dispatch_is_counted_once_and_finished_once() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    fleet.on_dispatched("a", a_request("r"), NOW_S)
    with pytest.raises(ValueError, match="already dispatched"):
        fleet.on_dispatched("a", a_request("r"), NOW_S)
    fleet.on_finished("a", "r", NOW_S)
    with pytest.raises(KeyError):
        fleet.on_finished("a", "r", NOW_S)


def test_a_table_with_a_bad_policy_leaves_the_fleet_as_it_was() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    with pytest.raises(ValueError, match="unknown scorer"):
        fleet.on_table(a_table(a_pool("q"), epoch=2, weights={"magic": 1.0}))
    assert fleet.table is not None
    assert fleet.table.epoch == 1
    assert [r.replica_id for r in fleet.view(a_request(), NOW_S).pools[0].ready] == ["a"]


def test_unknown_names_are_answered_with_what_there_is() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    with pytest.raises(NotFound, match="no model 'x'; there are: m"):
        fleet.view(a_request(model="x"), NOW_S)
    with pytest.raises(NotFound, match="no version '9'; there are 1"):
        fleet.view(a_request(version="9"), NOW_S)
    with pytest.raises(BadRequest, match="it cannot embed"):
        fleet.view(a_request(task=Task.EMBED), NOW_S)


def test_no_champion_is_said_with_the_versions_to_ask_for() -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    table = a_table(a_pool("p", a_replica("a")), epoch=2)
    fleet.on_table(replace(table, models=(replace(table.models[0], champion=None),)))
    with pytest.raises(NotFound, match="no champion version; ask for one of m@1"):
        fleet.view(a_request(), NOW_S)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.booleans(), st.integers(0, 400)), max_size=60))
def test_in_flight_is_always_dispatches_minus_finishes(steps: list[tuple[str, bool, int]]) -> None:
    fleet = a_fleet(a_pool("p", *(a_replica(name) for name in "abc")))
    open_requests: dict[str, list[tuple[str, int]]] = {name: [] for name in "abc"}
    for number, (name, is_dispatch, tokens) in enumerate(steps):
        now_s = NOW_S + number
        if is_dispatch or not open_requests[name]:
            request = a_request(f"r{number}", num_prompt_tokens=tokens)
            fleet.on_dispatched(name, request, now_s)
            open_requests[name].append((request.request_id, request.num_tokens))
        else:
            fleet.on_finished(name, open_requests[name].pop()[0], now_s)
        if number % 7 == 0:
            fleet.on_snapshot(a_snapshot(name, observed_at_s=now_s))
    for view in fleet.view(a_request(), NOW_S).pools[0].ready:
        assert view.num_in_flight == len(open_requests[view.replica_id])
        assert view.in_flight_tokens == sum(tokens for _, tokens in open_requests[view.replica_id])
        assert view.num_requests >= view.num_in_flight
