"""A decision record replays in the core to the same decision, from what it holds alone."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from serving.core.chance import Chance
from serving.core.decisions import Reject, Route, RouteRecord
from serving.core.policies import routing
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request, a_row, a_snapshot


@given(
    loads=st.lists(st.tuples(st.integers(0, 50), st.floats(0, 1)), min_size=6, max_size=6),
    seed=st.integers(0, 2**64 - 1),
    excluded=st.sets(st.sampled_from(["a0", "a1", "b0"])),
    regions=st.sampled_from([("*",), ("eu",), ("us", "eu")]),
    target=st.sampled_from([None, None, "a2"]),
)
def test_a_record_replays_and_an_altered_input_is_detected(
    loads: list[tuple[int, float]], seed: int, excluded: set[str], regions: tuple[str, ...], target: str | None
) -> None:
    fleet = a_fleet(
        a_pool("a", *(a_replica(f"a{i}") for i in range(3)), region="eu"),
        a_pool("b", *(a_replica(f"b{i}") for i in range(3)), engine_fingerprint="b", region="us"),
        rows=(a_row(), a_row(engine_fingerprint="b", usd_per_million_output_tokens=3.0)),
    )
    for number, (running, usage) in enumerate(loads):
        replica_id = f"{'ab'[number // 3]}{number % 3}"
        fleet.on_snapshot(a_snapshot(replica_id, num_running=running, kv_cache_usage_frac=usage))
    request = a_request(regions=regions, target_replica=target)
    view = fleet.view(request, NOW_S)
    decision = routing.route(request, view, Chance(seed), excluded)
    record = RouteRecord.of(request, view, seed, excluded, decision)

    fleet.on_dispatched("a0", a_request("later"), NOW_S)  # what happens next must not reach into the record

    assert routing.replay(record) == decision
    if target is not None and isinstance(decision, Route):
        assert decision.replica_id == target
        assert routing.replay(replace(record, request=replace(request, target_replica="a1"))) != decision
    if isinstance(decision, Reject):
        assert target is not None
        return
    dearer = tuple(
        replace(pool, cost_rows=tuple(replace(row, usd_per_million_output_tokens=99.0) for row in pool.cost_rows))
        for pool in record.view.pools
    )
    assert routing.replay(replace(record, view=replace(record.view, pools=dearer))) != decision
