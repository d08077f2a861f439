"""What the routing table says, given what each source says or does not say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.control.compose import FleetSeen, Observed, Registered, compose, same_content, sole_versions
from serving.core.state import CostRow, Pool, Replica, ReplicaState, RoutingPolicy, RoutingTable, Task
from serving.store.cost_table import PublishedCostTable
from serving.store.replicas import ReplicaReport
from serving.store.routing_table import decode, encode

NOW_S = 1_000.0


def pool(pool_id: str = "a", model: str = "m", version: str = "1") -> Pool:
    return Pool(
        pool_id=pool_id,
        model=model,
        version=version,
        task=Task.GENERATE,
        hardware_class="cpu",
        usd_per_hour=0.04,
        max_model_len=2048,
        engine_fingerprint="e1",
        hardware_fingerprint="h1",
        replicas=(),
    )


def report(
    replica_id: str, pool_id: str = "a", *, state: ReplicaState = ReplicaState.READY, age_s: float = 0.2
) -> ReplicaReport:
    return ReplicaReport(pool_id, Replica(replica_id, f"http://h/{replica_id}", state), None, NOW_S - age_s)


def cost_row(model: str = "m", expires_at_s: float = NOW_S + 60) -> CostRow:
    return CostRow(
        model=model,
        version="1",
        task=Task.GENERATE,
        hardware_class="cpu",
        engine_fingerprint="e1",
        hardware_fingerprint="h1",
        num_prompt_tokens=64,
        num_output_tokens=64,
        concurrency=1,
        output_tokens_per_s_per_gpu=30.0,
        prefill_tokens_per_s_per_gpu=600.0,
        ttft_p50_s=0.1,
        ttft_p99_s=0.2,
        tpot_p50_s=0.03,
        tpot_p99_s=0.04,
        usd_per_million_input_tokens=0.02,
        usd_per_million_cached_input_tokens=None,
        usd_per_million_output_tokens=0.4,
        provenance="measured",
        measured_at_s=NOW_S - 60,
        expires_at_s=expires_at_s,
        mlflow_run_id="run1",
    )


def observed(**changes: Any) -> Observed:
    seen = Observed(
        now_s=NOW_S,
        fleet=FleetSeen(pools=(pool(),), reports=(report("a-1"), report("a-2"))),
        registered=Registered({"m": "1"}, {"m": ("1",)}),
        cost=PublishedCostTable("run1", (cost_row(),), NOW_S - 10),
        policy=RoutingPolicy(),
        tokens_per_byte={"m": 0.3},
    )
    return replace(seen, **changes)


def composed(seen: Observed, previous: RoutingTable | None = None) -> RoutingTable:
    table = compose(seen, previous)
    assert table is not None
    return table


def states(table: RoutingTable) -> dict[str, str]:
    return {replica.replica_id: replica.state.value for pool in table.pools for replica in pool.replicas}


def test_the_first_table_holds_all_that_is_known() -> None:
    table = composed(observed())
    assert table.epoch == 1
    assert table.published_at_s == NOW_S
    assert states(table) == {"a-1": "ready", "a-2": "ready"}
    assert [(m.name, m.champion, m.versions, m.tokens_per_byte) for m in table.models] == [("m", "1", ("1",), 0.3)]
    assert table.cost_table_run_id == "run1"
    assert table.cost_rows == (cost_row(),)


def test_nothing_new_publishes_nothing_even_after_a_round_trip() -> None:
    table = composed(observed())
    assert compose(observed(now_s=NOW_S + 1), decode(encode(table))) is None


def test_a_change_takes_the_next_epoch() -> None:
    before = replace(composed(observed()), epoch=41)
    after = composed(observed(policy=RoutingPolicy(weights={"cost": 1.0})), before)
    assert after.epoch == 42
    assert not same_content(before, after)


@pytest.mark.parametrize(("age_s", "state"), [(4.9, "ready"), (5.1, "down")])
def test_a_replica_whose_supervisor_fell_silent_is_down(age_s: float, state: str) -> None:
    seen = observed(fleet=FleetSeen((pool(),), (report("a-1", age_s=age_s),)))
    assert states(composed(seen)) == {"a-1": state}


@pytest.mark.parametrize("state", list(ReplicaState))
def test_only_a_ready_replica_becomes_reserved(state: ReplicaState) -> None:
    seen = observed(fleet=FleetSeen((pool(),), (report("a-1", state=state),), reserved=frozenset({"a-1"})))
    expected = ReplicaState.RESERVED if state is ReplicaState.READY else state
    assert states(composed(seen)) == {"a-1": expected.value}


def test_a_report_for_an_undeclared_pool_is_left_out() -> None:
    seen = observed(fleet=FleetSeen((pool(),), (report("a-1"), report("z-1", "z"))))
    assert states(composed(seen)) == {"a-1": "ready"}


def test_without_the_store_the_fleet_stands_and_the_rest_moves_on() -> None:
    before = composed(observed())
    after = composed(
        observed(now_s=NOW_S + 600, fleet=None, registered=Registered({"m": "2"}, {"m": ("1", "2")})), before
    )
    assert after.pools == before.pools
    assert after.models[0].champion == "2"


def test_without_the_store_from_the_start_there_is_no_table() -> None:
    assert compose(observed(fleet=None), None) is None


def test_a_store_that_came_back_empty_does_not_empty_the_table() -> None:
    before = composed(observed())
    back = FleetSeen(pools=(), reports=(), settled_since_s=NOW_S)
    assert compose(observed(now_s=NOW_S + 4, fleet=back), before) is None
    assert composed(observed(now_s=NOW_S + 6, fleet=back), before).pools == ()


def test_a_store_that_came_back_with_part_of_the_reports_keeps_the_other_replicas_for_a_while() -> None:
    before = composed(observed())
    fresh = replace(report("a-1", state=ReplicaState.DRAINING), updated_at_s=NOW_S + 1)
    back = FleetSeen(pools=(pool(),), reports=(fresh,), settled_since_s=NOW_S)
    assert states(composed(observed(now_s=NOW_S + 1, fleet=back), before)) == {"a-1": "draining", "a-2": "ready"}
    assert "a-2" not in states(composed(observed(now_s=NOW_S + 6, fleet=back), before))


def test_reports_from_before_the_outage_are_not_judged_by_its_length() -> None:
    back = FleetSeen((pool(),), (report("a-1", age_s=30),), settled_since_s=NOW_S - 2)
    assert states(composed(observed(fleet=back))) == {"a-1": "ready"}


def test_without_the_registry_the_last_known_champion_stands() -> None:
    before = composed(observed(registered=Registered({"m": "1"}, {"m": ("1", "2")})))
    after = composed(observed(registered=None, fleet=FleetSeen((pool(), pool("b", version="3")), ())), before)
    assert after.models[0].champion == "1"
    assert after.models[0].versions == ("1", "2", "3")


def test_a_model_that_the_registry_does_not_know_has_no_champion() -> None:
    assert composed(observed(registered=Registered({}, {}))).models[0].champion is None


def test_versions_are_in_their_numeric_order() -> None:
    seen = observed(registered=Registered({"m": "10"}, {"m": ("10", "9", "2")}))
    assert composed(seen).models[0].versions == ("1", "2", "9", "10")


def test_without_a_registry_a_models_only_version_is_its_champion() -> None:
    registered = sole_versions([pool(), pool("b", version="2"), pool("c", model="n", version="7")])
    assert registered.champions == {"n": "7"}
    assert registered.versions == {"m": ("1", "2"), "n": ("7",)}


def test_cost_rows_are_those_of_served_models_expired_ones_included() -> None:
    expired = cost_row(expires_at_s=NOW_S - 1)
    cost = PublishedCostTable("run2", (expired, cost_row("other")), NOW_S)
    table = composed(observed(cost=cost))
    assert table.cost_rows == (expired,)
    assert table.cost_table_run_id == "run2"


def test_an_unreadable_cost_table_leaves_the_last_one() -> None:
    before = composed(observed())
    assert compose(observed(cost=None), before) is None


@given(st.permutations([report("a-1"), report("a-2"), report("b-1", "b")]), st.permutations([pool(), pool("b", "n")]))
def test_the_order_in_which_things_are_reported_changes_nothing(
    reports: list[ReplicaReport], pools: list[Pool]
) -> None:
    expected = composed(
        observed(fleet=FleetSeen((pool(), pool("b", "n")), (report("a-1"), report("a-2"), report("b-1", "b"))))
    )
    assert composed(observed(fleet=FleetSeen(tuple(pools), tuple(reports)))) == expected
