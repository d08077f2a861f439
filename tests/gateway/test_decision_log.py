"""A rejected request is logged and replays like a routed one."""

from __future__ import annotations

import random
from pathlib import Path

from serving.core.chance import Chance
from serving.core.decisions import Reject
from serving.core.policies import routing
from serving.core.state import ReplicaState
from serving.telemetry import decision_log
from tests.unit.core_examples import NOW_S, a_fleet, a_pool, a_replica, a_request


def test_a_reject_is_written_and_replays(tmp_path: Path) -> None:
    fleet = a_fleet(a_pool("p", a_replica("a", ReplicaState.DOWN), a_replica("b", ReplicaState.STARTING)))
    request = a_request()
    view = fleet.view(request, NOW_S)
    decision = routing.route(request, view, Chance(7))
    assert isinstance(decision, Reject)
    with decision_log.DecisionLog(tmp_path, 1.0, random.Random(0)) as log:
        log.offer(request, view, 7, frozenset(), decision)
    records = [record for path in tmp_path.iterdir() for record in decision_log.read(path)]
    assert [record.decision for record in records] == [decision]
    assert routing.replay(records[0]) == decision


def test_each_day_has_a_file_of_its_own(tmp_path: Path) -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    request = a_request(regions=("eu",))
    with decision_log.DecisionLog(tmp_path, 1.0, random.Random(0)) as log:
        for day in (0, 0, 1):
            view = fleet.view(request, NOW_S + day * decision_log.DAY_S)
            log.offer(request, view, 7, frozenset(), routing.route(request, view, Chance(7)))
    files = sorted(tmp_path.iterdir())
    assert [file.name.split("-")[1] for file in files] == ["19700112", "19700113"]
    assert [len(list(decision_log.read(file))) for file in files] == [2, 1]
    assert {record.request.regions for record in decision_log.read(tmp_path)} == {("eu",)}


def test_a_record_from_before_there_were_regions_replays(tmp_path: Path) -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    request = a_request()
    view = fleet.view(request, NOW_S)
    with decision_log.DecisionLog(tmp_path, 1.0, random.Random(0)) as log:
        log.offer(request, view, 7, frozenset(), routing.route(request, view, Chance(7)))
    (file,) = tmp_path.iterdir()
    file.write_text(file.read_text("utf-8").replace(',"regions":["*"]', ""), "utf-8")
    (record,) = decision_log.read(tmp_path)
    assert "regions" not in file.read_text("utf-8")
    assert routing.replay(record) == record.decision


def test_a_file_that_cannot_be_opened_costs_records_and_no_request(tmp_path: Path) -> None:
    fleet = a_fleet(a_pool("p", a_replica("a")))
    request = a_request()
    view = fleet.view(request, NOW_S)
    with decision_log.DecisionLog(tmp_path / "log", 1.0, random.Random(0)) as log:
        (tmp_path / "log").rmdir()
        log.offer(request, view, 7, frozenset(), routing.route(request, view, Chance(7)))
        (tmp_path / "log").mkdir()
        log.offer(request, view, 7, frozenset(), routing.route(request, view, Chance(7)))
    assert len(list(decision_log.read(tmp_path / "log"))) == 1
