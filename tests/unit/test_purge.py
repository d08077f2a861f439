"""`workbench purge`: what is old goes; what is young, in use or not yet settled stays; a dry run touches nothing."""

from __future__ import annotations

import json
import os
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from serving.metering.events import encode
from serving.metering.segments import read_events
from tests.unit.usage_examples import an_event
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.purge import Kind, Scope, drop_lines, plan
from workbench.wiring import Layout

DAY_S = 86_400.0
CONFIG = 'models: {tiny: {source: "/tiny"}}\n'


def aged(path: Path, days: float, data: bytes = b"x\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    at_s = time.time() - days * DAY_S
    os.utime(path, (at_s, at_s))
    return path


def log_line(days: float, message: str) -> bytes:
    at = datetime.fromtimestamp(time.time() - days * DAY_S, UTC).isoformat(timespec="milliseconds")
    return json.dumps({"at": at, "message": message}, separators=(",", ":")).encode() + b"\n"


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Layout:
    (tmp_path / "workbench.yaml").write_text(CONFIG)
    monkeypatch.chdir(tmp_path)
    return Layout(tmp_path / ".workbench")


def purge(capsys: pytest.CaptureFixture[str], *arguments: str, exit_code: Exit = Exit.OK) -> Any:
    assert run_app(["purge", "--json", *arguments]) == exit_code
    return json.loads(capsys.readouterr().out)


def test_old_files_go_by_the_days_of_their_kind(places: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    old = [
        aged(places.decisions_dir / "decisions-20200101-1.jsonl", 31),
        aged(places.log_dir / "m-cpu-0.log", 15, b"INFO vLLM\n"),
        aged(places.mlflow_dir / "server.log", 15),
    ]
    young = [
        aged(places.decisions_dir / "decisions-20200102-1.jsonl", 29),
        aged(places.log_dir / "m-cpu-1.log", 13, b"INFO vLLM\n"),
        aged(places.data_dir / "tenants.json", 999),
    ]
    shown = purge(capsys, "--dry-run")
    assert {one["path"] for one in shown["removed"]} == {str(path) for path in old}
    assert all(path.exists() for path in [*old, *young])
    done = purge(capsys)
    assert done["removed"] == shown["removed"]
    assert [path.exists() for path in [*old, *young]] == [False] * 3 + [True] * 3
    assert "stored answers were not purged" in done["remarks"][0]
    assert purge(capsys)["removed"] == []


def test_older_than_and_kind_choose(places: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    decisions = aged(places.decisions_dir / "decisions-20200101-1.jsonl", 3)
    log = aged(places.log_dir / "m-cpu-0.log", 3)
    assert [one["kind"] for one in purge(capsys, "--kind", "logs", "--older-than", "2")["removed"]] == ["logs"]
    assert decisions.exists()
    assert not log.exists()


def test_a_log_of_ours_loses_its_old_lines_while_it_is_written_to(
    places: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    path = places.log_dir / "gateway-0.log"
    young = log_line(1, "young") + b"  a remark of it\n"
    aged(path, 0, log_line(20, "old") + b"Traceback\n" + young)
    with path.open("ab", buffering=0) as log:  # as the worker has it
        done = purge(capsys, "--kind", "logs")
        log.write(b"later\n")
    assert path.read_bytes() == young + b"later\n"
    assert done["removed"] == [{"kind": "logs", "path": str(path), "num_bytes": done["num_bytes"], "whole": False}]
    assert [file.name for file in places.log_dir.iterdir()] == ["gateway-0.log"]


def test_half_a_line_that_is_being_written_stays_whole(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_bytes(b"old\nnew\nhal")
    with path.open("ab", buffering=0) as log:
        drop_lines(path, lambda line: line == b"old\n")
        log.write(b"f\n")
    assert path.read_bytes() == b"new\nhalf\n"


def test_a_file_that_a_running_stack_has_open_is_emptied_and_not_unlinked(places: Layout) -> None:
    path = aged(places.log_dir / "m-cpu-0.log", 99, b"INFO vLLM\n")
    scope = Scope((Kind.LOGS,), dict.fromkeys(Kind, time.time() - DAY_S), is_running=True)
    with path.open("ab", buffering=0) as log:
        for removal in plan(places, scope):
            removal.act()
        log.write(b"later\n")
    assert path.read_bytes() == b"later\n"


def test_request_records_go_once_mlflow_has_their_cell_whose_figures_stay(
    places: Layout, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep = places.results_dir / "d1"
    logged = aged(sweep / "mixed-64x32-c4.1790000000000.parquet", 400)
    figures = aged(sweep / "mixed-64x32-c4.1790000000000.json", 400)
    pending = aged(sweep / "mixed-64x32-c8.1790000000001.parquet", 400)
    marker = {"tracking_uri": "u", "parent_run_id": "p", "runs": {"d1/mixed-64x32-c4/1790000000000": "run"}}
    (sweep / "mlflow.json").write_text(json.dumps(marker))
    assert [one["path"] for one in purge(capsys, "--kind", "records")["removed"]] == [str(logged)]
    assert figures.exists()
    assert pending.exists()


def test_usage_stays_until_it_is_said_that_it_may_go(places: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    name = "usage-20200101T000000.000000Z-gateway-0"
    lines = encode(an_event(id="1"), "/g/0") + encode(an_event(id="2", tenant="lab"), "/g/0")
    closed = aged(places.usage_dir / f"{name}.jsonl", 500, lines)
    in_use = aged(places.usage_dir / f"{name}-2.open", 500, lines)
    assert "no ledger has committed them" in purge(capsys, "--kind", "usage")["remarks"][0]
    assert closed.exists()
    done = purge(capsys, "--kind", "usage", "--tenant", "acme", "--older-than", "0", "--drop-usage")
    assert [one["whole"] for one in done["removed"]] == [False]
    assert [event.tenant for event in read_events(places.usage_dir)] == ["lab", "acme", "lab"]
    os.utime(closed, (0, 0))
    purge(capsys, "--kind", "usage", "--drop-usage")
    assert not closed.exists()
    assert in_use.exists()


@pytest.mark.parametrize(
    "arguments",
    [["--tenant", "*"], ["--tenant", "acme", "--kind", "logs"], ["--older-than", "nan"], ["--kind", "everything"]],
)
def test_a_wrong_option_is_a_usage_error(arguments: list[str], places: Layout) -> None:
    assert run_app(["purge", *arguments]) == Exit.USAGE


def test_a_tenant_s_answers_need_the_store(places: Layout, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_app(["purge", "--tenant", "acme"]) == Exit.UNAVAILABLE
    assert "stores.redis_url" in capsys.readouterr().err
