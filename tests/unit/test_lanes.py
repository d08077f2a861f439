from __future__ import annotations

import os

import pytest

from workbench.cli.sweep_lanes import side_by_side
from workbench.sweeps.lanes import Lane, lanes


def test_each_lane_has_a_client_core_of_its_own() -> None:
    assert lanes({"a": (0,), "b": (1,)}, {0, 1, 2, 3}) == (Lane(2, ("a",)), Lane(3, ("b",)))


def test_two_cores_with_a_replica_on_one_run_one_cell_at_a_time() -> None:
    assert lanes({"a": (1,), "b": (1,)}, {0, 1}) == (Lane(0, ("a", "b")),)
    assert lanes({"a": (0,), "b": (1,)}, {0, 1}) == (Lane(0, ("a", "b")),)


def test_replicas_that_share_a_core_never_run_at_once() -> None:
    found = lanes({"a": (0,), "b": (1,), "c": (0, 1), "d": (2,)}, set(range(8)))
    assert {lane.names for lane in found} == {("a", "b", "c"), ("d",)}


def test_replicas_elsewhere_need_only_a_client_core() -> None:
    assert len(lanes({"a": (), "b": (), "c": ()}, {0, 1})) == 2
    with pytest.raises(ValueError, match="no core"):
        lanes({"a": ()}, set())


class Request:
    def __init__(self, model: str) -> None:
        self.model = model


def test_a_process_a_lane_gives_the_results_in_the_order_asked() -> None:
    found = side_by_side({"a": (), "b": ()}, [Request("b"), Request("a")], name_and_cores)
    assert [name for name, _ in found] == ["b", "a"]
    if len(os.sched_getaffinity(0)) > 1:
        assert [len(cores) for _, cores in found] == [1, 1]
        assert found[0][1] != found[1][1]


def name_and_cores(request: Request) -> tuple[str, set[int]]:
    return request.model, os.sched_getaffinity(0)
