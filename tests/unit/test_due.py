"""Pools that no cost row counts for are named with the command that measures them, and expired rows warn."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console

from serving.core.state import RoutingTable
from serving.store.cost_table import FileCostTable, PublishedCostTable
from serving.store.routing_table import FileRoutingTable
from tests.unit.core_examples import NOW_S, a_pool, a_replica, a_row, a_table
from workbench.cli import status
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.costs.due import measurements_due
from workbench.stack.state import ProcessRecord, StackState
from workbench.wiring import Layout

ONE, TWO = a_pool("one", a_replica("one-0")), a_pool("two", a_replica("two-0"), hardware_fingerprint="other")


def test_pools_that_nothing_measured_are_due_with_what_to_type():
    fresh = a_table(ONE, rows=(a_row(),))
    assert measurements_due(fresh, NOW_S) == []
    (never,) = measurements_due(a_table(ONE), NOW_S)
    assert (never.pool_id, never.state, never.command) == ("one", "unmeasured", "workbench sweep m@1")
    (expired,) = measurements_due(a_table(ONE, rows=(a_row(expires_at_s=NOW_S),)), NOW_S)
    assert (expired.state, expired.why) == ("expired", "its rows have expired")


def test_of_two_pools_of_one_model_the_replica_is_named():
    (due,) = measurements_due(a_table(ONE, TWO, rows=(a_row(),)), NOW_S)
    assert (due.pool_id, due.state) == ("two", "mismatch")
    assert due.command == "workbench sweep m@1 --replica two-0"


def seen_of(table: RoutingTable) -> tuple[str, dict[str, object]]:
    """What `workbench status` prints, and what it says to programs."""
    state, seen = StackState(ProcessRecord("supervisor", 1, 0, "")), status.Seen(routing_table=table)
    text = StringIO()
    status.show(Console(file=text, width=200), state, seen)
    return text.getvalue(), status.as_data(state, seen)


def test_status_lists_what_is_due():
    text, data = seen_of(a_table(ONE))
    assert "workbench sweep m@1" in text and "workbench cost-table build --publish" in text
    assert [due["pool_id"] for due in data["measurements_due"]] == ["one"]  # type: ignore[attr-defined]
    text, data = seen_of(a_table(ONE, rows=(a_row(expires_at_s=time.time() + 60),)))
    assert "workbench sweep" not in text and data["measurements_due"] == []


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    """A data folder of a stack that has ended."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "workbench.yaml").write_text("models: {}\npools: []\n")
    return Layout(tmp_path / ".workbench")


def publish(where: Layout, *, epoch: int, left_s: float) -> None:
    row = a_row(expires_at_s=time.time() + left_s)
    cost_table = PublishedCostTable(run_id="run", published_at_s=time.time(), rows=(row, replace(row, concurrency=8)))
    asyncio.run(FileCostTable(where.cost_table_path).publish(cost_table))
    asyncio.run(
        FileRoutingTable(where.routing_table_path).publish(a_table(ONE, TWO, epoch=epoch, rows=cost_table.rows))
    )


def test_cost_table_show_warns_of_expired_rows_and_lists_what_is_due(where: Layout, capsys: pytest.CaptureFixture[str]):
    publish(where, epoch=1, left_s=60)
    assert run_app(["cost-table", "show"]) == Exit.OK
    shown = capsys.readouterr()
    assert "expired" not in shown.out + shown.err
    assert "--replica two-0" in shown.out and "--replica one-0" not in shown.out

    publish(where, epoch=2, left_s=-1)
    assert run_app(["cost-table", "show"]) == Exit.OK
    shown = capsys.readouterr()
    assert "2 of 2 rows have expired and route nothing: measure again" in " ".join(shown.err.split())
    assert "--replica one-0" in shown.out
    assert run_app(["cost-table", "show", "--json"]) == Exit.OK
    data = json.loads(capsys.readouterr().out)
    assert [due["state"] for due in data["measurements_due"]] == ["expired", "mismatch"]


def test_without_a_cost_table_the_command_says_what_to_measure(where: Layout, capsys: pytest.CaptureFixture[str]):
    asyncio.run(FileRoutingTable(where.routing_table_path).publish(a_table(ONE)))
    assert run_app(["cost-table", "show"]) == Exit.UNAVAILABLE
    assert "measure first: workbench sweep m@1" in capsys.readouterr().err
