"""The command line: exit codes, JSON on standard output alone, errors that say what to do."""

from __future__ import annotations

import json
import subprocess
import sys
from contextlib import nullcontext
from importlib import import_module
from io import StringIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.cells import make_cell
from workbench.cli import up as up_module
from workbench.cli.app import run_app
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.figures import P99_MIN_REQUESTS, cost_figures
from workbench.cli.progress import ProgressBoard
from workbench.cli.report import named_values
from workbench.cli.up import SweepMode, UpRequest
from workbench.config import load_config
from workbench.loop import LastRun
from workbench.stats import min_sample

CONFIG = 'models: {tiny: {source: "/tiny"}}\npools: [{model: tiny, hardware: cpu, launcher: fake, cores: [[0]]}]\n'


@pytest.fixture
def config(tmp_path: Path) -> str:
    file = tmp_path / "workbench.yaml"
    file.write_text(CONFIG)
    return str(file)


def test_config_check_warns_and_succeeds(config: str, capsys: pytest.CaptureFixture[str]):
    assert run_app(["config", "check", "--config", config, "--json"]) == Exit.OK
    answer = json.loads(capsys.readouterr().out)
    assert answer["ok"]
    assert answer["warnings"] == ["models.tiny: one replica only, so a restart of it is an outage of the model"]


def test_config_show_is_one_document(config: str, capsys: pytest.CaptureFixture[str]):
    assert run_app(["config", "show", "-c", config, "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out)["gateway"]["port"] == 8000


def test_a_wrong_key_is_a_usage_error(config: str, capsys: pytest.CaptureFixture[str]):
    Path(config).write_text(CONFIG + "gatway: {}\n")
    assert run_app(["config", "check", "--config", config]) == Exit.USAGE
    assert "did you mean 'gateway'?" in capsys.readouterr().err


@pytest.mark.parametrize(
    "command", [["status"], ["down"], ["sweep", "tiny"], ["bench", "tiny"], ["pool", "start", "tiny-cpu"]]
)
def test_without_a_stack_commands_say_so(command: list[str], config: str, capsys: pytest.CaptureFixture[str]):
    assert run_app([*command, "--config", config]) == Exit.UNAVAILABLE
    assert "workbench up" in capsys.readouterr().err or command == ["down"]


@pytest.mark.parametrize(
    "command",
    [
        ["nonsense"],
        ["sweep"],
        ["sweep", "tiny", "--mode", "huge"],
        ["sweep", "tiny", "--shape", "64"],
        ["sweep", "tiny", "--concurrency", "0"],
        ["cost-table", "build", "--expires-days", "inf"],
        ["cost-table", "build", "--expires-days", "1e300"],
        ["cost-table", "build", "--expires-days", "nan"],
        ["logs", "--lines", "0"],
    ],
)
def test_a_wrong_command_line_is_a_usage_error(command: list[str], config: str):
    options = ["--config", config] if command[0] in ("sweep", "logs", "cost-table") else []
    assert run_app([*command, *options]) == Exit.USAGE


NUMBERS = ("nan", "inf", "-inf", "-1", "0", "1e300", "9" * 400, "much", "")
OPTIONS = {
    "bench": ("--rate", "--seconds", "--concurrency", "--requests", "--prompt-tokens", "--output-tokens"),
    "sweep": ("--concurrency", "--max-age-hours", "--shape"),
}


@pytest.mark.parametrize(("command", "option"), [(name, option) for name, all_ in OPTIONS.items() for option in all_])
def test_a_number_that_is_none_is_a_usage_error(
    command: str, option: str, config: str, capsys: pytest.CaptureFixture[str]
):
    for written in NUMBERS:
        if (option, written) == ("--max-age-hours", "0"):
            continue
        values = [f"{written}x8", f"8x{written}"] if option == "--shape" else [written]
        for value in values if written != "0" or option != "--shape" else values[:1]:
            assert run_app([command, "tiny", option, value, "--config", config]) == Exit.USAGE, value
            assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("once", [False, True])
@pytest.mark.parametrize("lab", [None, "http://127.0.0.1:8888/lab?token=t"])
def test_up_says_where_everything_is(once: bool, lab: str | None, config: str):
    urls = {"gateway": "http://127.0.0.1:8000", "mlflow": "http://127.0.0.1:5000"} | ({"lab": lab} if lab else {})
    stack = SimpleNamespace(urls=urls, config=load_config(Path(config)))
    request = UpRequest(sweep=SweepMode.NONE, ask=False, once=once, pools=(), lab=True, as_json=False)
    text = StringIO()
    up_module._show(Console(file=text, width=160), stack, LastRun(), request)  # type: ignore[arg-type]
    rows = [line.split() for line in text.getvalue().splitlines()]
    assert ["endpoint", "http://127.0.0.1:8000/v1"] in rows
    assert ["its", "docs", "http://127.0.0.1:8000/docs"] in rows
    assert ["MLflow", "http://127.0.0.1:5000"] in rows
    assert ["JupyterLab", *(lab or "workbench lab").split()] in rows
    assert sum(row[:1] == ["$"] for row in rows) == 3
    assert ("Serving until Ctrl-C." in text.getvalue()) is not once


def test_a_store_without_an_address_is_a_usage_error(
    config: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("REDIS_URL", "junk")
    assert run_app(["up", "--config", config]) == Exit.USAGE
    assert "redis_url (or REDIS_URL): 'junk'" in capsys.readouterr().err


@pytest.fixture
def results(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, list[str]]:
    """Two sweeps that MLflow lacks, `aaa` and `bbb`, over an MLflow that takes everything; and what it took."""
    pytest.importorskip("mlflow")
    tracking, folder_type = (
        import_module("workbench.tracking.tracker"),
        import_module("workbench.sweeps.results").ResultsFolder,
    )
    names = ("version", "task", "hardware_class", "engine_fingerprint", "hardware_fingerprint")
    replica = {"model": "tiny", **dict.fromkeys(names, "x"), "engine_covers": {}, "hardware_covers": {}}
    kinds = import_module("workbench.sweeps.cells").CellKind
    cells = [make_cell(kind, records_file=None) for kind in (kinds.MIXED, kinds.PREFILL)]
    for digest in ("aaa", "bbb"):
        folder = folder_type(tmp_path / ".workbench" / "results", digest)
        folder.open({"plan": {"mode": "short"}, "replica": replica, "cells": ["c"], "commit": "c"})
        folder.write_cell(cells[0], [])
    logged: list[str] = []

    def log_cell(_client: object, _experiment: str, _parent: str, folder: Any, _cell: object) -> str:
        logged.append(folder.sweep_digest)
        return "run"

    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setattr(tracking.Tracker, "_client", lambda _: nullcontext())
    monkeypatch.setattr(tracking, "experiment", lambda *_: "1")
    monkeypatch.setattr(tracking, "parent_run", lambda *_: "parent")
    monkeypatch.setattr(tracking, "log_cell", log_cell)
    measured = import_module("workbench.costs.table").MeasuredCell
    monkeypatch.setattr(tracking.Tracker, "cells", lambda *_, **__: [measured(cell, "run") for cell in cells])
    monkeypatch.setattr(tracking.Tracker, "log_cost_table", lambda *_: "table-run")
    return folder.path.parent, logged


@pytest.mark.parametrize("broken", ["sweep", "truncated", "cell", None])
def test_a_broken_result_is_named_and_holds_up_no_other(
    results: tuple[Path, list[str]], config: str, capsys: pytest.CaptureFixture[str], broken: str | None
):
    folder, logged = results
    cell = next(path for path in (folder / "aaa").glob("*.json") if path.name != "sweep.json")
    at_fault = folder / "aaa" / "sweep.json" if broken == "sweep" else cell
    text = {"sweep": "{}", "truncated": cell.read_text()[:100], "cell": '{"schema": 1, "spec": 5}', None: None}[broken]
    if text is not None:
        at_fault.write_text(text)
    code = run_app(["cost-table", "build", "--config", config, "--json"])
    said = capsys.readouterr()
    assert json.loads(said.out)["run_id"] == "table-run"
    assert (code, logged) == ((Exit.OK, ["aaa", "bbb"]) if broken is None else (Exit.FAILED, ["bbb"]))
    assert (str(at_fault) in said.err) == (broken is not None)


def test_an_unknown_pool_is_a_usage_error(config: str, capsys: pytest.CaptureFixture[str]):
    assert run_app(["up", "--pool", "tiny-cpx", "--config", config]) == Exit.USAGE
    assert "did you mean 'tiny-cpu'?" in capsys.readouterr().err


def test_doctor_answers_check_by_check(config: str, capsys: pytest.CaptureFixture[str]):
    run_app(["doctor", "--config", config, "--json"])
    findings = json.loads(capsys.readouterr().out)["findings"]
    assert {"python", "cores", "memory", "disk", "tcmalloc", "vllm", "store", "gateway.port"} <= {
        f["check"] for f in findings
    }
    assert all(finding["advice"] for finding in findings if finding["verdict"] == "failed")


def test_the_help_needs_nothing_heavy():
    code = (
        "import sys; from workbench.cli.app import run_app; run_app(['--help']);"
        "sys.exit(any(m in sys.modules for m in ('mlflow', 'pandas', 'torch', 'vllm', 'openai', 'plotly', 'numpy')))"
    )
    assert subprocess.run([sys.executable, "-c", code], stdout=subprocess.DEVNULL, check=False).returncode == 0


def test_report_parameters_in_both_forms():
    assert named_values(["model", "shape=64x32", "n"], ["smol", "3"]) == {"model": "smol", "shape": "64x32", "n": "3"}
    with pytest.raises(CommandFailed, match="needs a value"):
        named_values(["model"], [])
    with pytest.raises(CommandFailed, match="belongs to no parameter"):
        named_values([], ["smol"])


def test_figures_leave_out_what_no_row_has():
    columns, cells, right = cost_figures([{"model": "m", "ttft_p50_s": 0.1234, "concurrency": 4}, {"model": "n"}])
    assert columns == ["model", "streams", "TTFT p50 ms"]
    assert cells == [["m", "4", "123"], ["n", "–", "–"]]
    assert right == (1, 2)


def test_progress_prints_a_count_once_in_a_while(capsys: pytest.CaptureFixture[str]):
    from rich.console import Console

    with ProgressBoard(Console(width=200)) as board:
        for done in range(50):
            board.change("sweep", f"{done} of 50 requests")
        board.change("sweep", "done")
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("sweep")[1].strip() for line in lines] == ["0 of 50 requests", "done"]


def test_a_dead_mlflow_names_the_key_that_sets_another():
    registry = pytest.importorskip("serving.control.registry")
    with pytest.raises(registry.RegistryUnavailable, match=r"set stores\.mlflow_tracking_uri"):
        registry.mlflow_client("http://127.0.0.1:9")


def test_logs_are_one_document_and_none_is_said(config: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert run_app(["logs", "--config", config]) == Exit.UNAVAILABLE
    assert "start the stack" in capsys.readouterr().err
    log = tmp_path / ".workbench" / "logs" / "control.log"
    log.parent.mkdir(parents=True)
    log.write_text("one\ntwo\n")
    assert run_app(["logs", "--config", config, "-n", "1", "--json"]) == Exit.OK
    assert json.loads(capsys.readouterr().out) == [{"name": "control", "path": str(log), "lines": ["two"]}]
    assert run_app(["logs", "--config", config, "--json", "--follow"]) == Exit.USAGE


def test_a_p99_that_the_sample_cannot_carry_is_marked():
    assert min_sample(0.99) == P99_MIN_REQUESTS
    rows = [{"ttft_p99_s": 0.5, "num_requests": 367}, {"ttft_p99_s": 0.5, "num_requests": 368}, {"ttft_p99_s": None}]
    assert cost_figures(rows)[1] == [["500*"], ["500"], ["–"]]
