"""A scheduled run from lock to alert, over fakes; and the commands, with a crontab of the test's own."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.cells import make_cell
from workbench.cli.app import run_app
from workbench.config import load_config
from workbench.schedule.alerts import Alert
from workbench.schedule.book import Book, Schedule, ScheduleError, ScheduleRuns
from workbench.schedule.files import locked
from workbench.schedule.history import Outcome, Run
from workbench.schedule.job import Ports, accept, run_now
from workbench.schedule.places import Places
from workbench.schedule.rule import Judged, measured_since
from workbench.schedule.runner import Job, Ran
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import ResultsBroken

METRIC = "output_tokens_per_s_per_gpu"
PARAMETERS = 'model: str = "a"\nconcurrencies: list[int] = []\nmax_age_s: float | None = None\n'


def cell(rate: float) -> CellResult:
    return make_cell(metrics={METRIC: rate}, intervals={METRIC: (rate * 0.99, rate * 1.01)})


@dataclass
class World:
    """Everything that a run touches, in a folder of the test's own."""

    folder: Path
    ran: list[Ran | BaseException] = field(default_factory=list)
    rates: Iterator[float] | None = None
    cost_table_trouble: str | None = None
    mlflow_trouble: str | None = None
    jobs: list[Job] = field(default_factory=list)
    alerts: list[Alert] = field(default_factory=list)
    logged: list[tuple[Run, Judged]] = field(default_factory=list)
    since_s: list[float] = field(default_factory=list)
    published: list[bool] = field(default_factory=list)
    now_s: float = 1_000_000.0
    num_ids: int = 0

    def __post_init__(self) -> None:
        self.book = Book(self.folder / "schedules")
        notebooks = self.folder / "notebooks"
        notebooks.mkdir()
        cell = nbformat.v4.new_code_cell(PARAMETERS, metadata={"tags": ["parameters"]})
        nbformat.write(nbformat.v4.new_notebook(cells=[cell]), notebooks / "01.ipynb")
        self.places = Places(self.folder / "workbench.yaml", notebooks, self.folder / "reports")

    def add(self, **changes: Any) -> None:
        fields = {"name": "nightly", "cron": "30 2 * * *", "notebook": "01", "created_at_s": 0.0}
        rule = {"compare": {"metric": METRIC, "tolerance_frac": 0.05}}
        self.book.add(Schedule(**(fields | rule | changes)), replaces=True)

    def run(self) -> Run:
        def runner(job: Job) -> Ran:
            self.jobs.append(job)
            self.now_s += 100.0
            stem = job.out_dir / f"01-{len(self.jobs):03}"
            found = self.ran.pop(0) if self.ran else Ran(Outcome.OK, mlflow_run_id="sweep")
            if isinstance(found, BaseException):
                raise found
            if found.outcome is Outcome.OK:
                for suffix in (".ipynb", ".html"):
                    stem.with_suffix(suffix).write_text("x")
                return replace(found, notebook=f"{stem}.ipynb", html=f"{stem}.html")
            return found

        def measured(since_s: float, run_id: str | None) -> list[CellResult]:
            self.since_s.append(since_s)
            return [] if self.rates is None else [cell(next(self.rates))]

        def alert(_: Schedule, alert: Alert) -> str | None:
            self.alerts.append(alert)
            return None

        ports = Ports(
            measured=measured,
            log_run=lambda _, run, judged: self.logged.append((run, judged)) or self.mlflow_trouble,
            cost_table=lambda publishes: self.published.append(publishes) or self.cost_table_trouble,
            alert=alert,
            now_s=lambda: self.now_s,
            new_id=self._new_id,
            runner=runner,
        )
        return run_now(self.book, "nightly", self.places, ports)

    def _new_id(self) -> str:
        self.num_ids += 1
        return f"run-{self.num_ids}"


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path)


def test_the_first_run_is_accepted_and_a_worse_one_alerts(world: World) -> None:
    world.add(cost_table="publish")
    world.rates = iter([100.0, 101.0, 90.0])
    first, second, third = world.run(), world.run(), world.run()
    assert [run.outcome for run in (first, second, third)] == [Outcome.OK, Outcome.OK, Outcome.REGRESSION]
    assert first.compared == ("accepted as the first: later runs are compared with it",)
    assert third.reason == f"{METRIC} is worse than in the accepted run"
    assert world.published == [True, True], "no new cost table from a run that is worse"
    [alert] = world.alerts
    assert (alert.kind, alert.mlflow_run_id, alert.report) == ("regression", "sweep", third.html)
    assert "100 -> 90, 10.0% worse" in alert.text
    assert [judged.worst_loss_frac for _, judged in world.logged][-1] == pytest.approx(0.1)
    assert world.book.history("nightly").runs() == [first, second, third]


def test_small_steps_down_add_up_against_the_same_accepted_run(world: World) -> None:
    world.add()
    world.rates = iter([100.0, 97.0, 94.0])
    assert [world.run().outcome for _ in range(3)] == [Outcome.OK, Outcome.OK, Outcome.REGRESSION]


def test_a_change_that_is_meant_is_accepted(world: World) -> None:
    world.add()
    with pytest.raises(ScheduleError, match="measured anything"):
        accept(world.book, "nightly")
    world.rates = iter([100.0, 50.0, 50.0])
    world.run()
    worse = world.run()
    assert accept(world.book, "nightly").run_id == worse.run_id
    assert world.run().outcome is Outcome.OK


def test_a_run_that_measured_nothing_is_not_taken_for_good(world: World) -> None:
    world.add()
    run = world.run()
    assert (run.outcome, world.alerts[0].kind) == (Outcome.INCONCLUSIVE, "inconclusive")
    assert "schedule accept nightly" in run.reason and "max_age_s" in run.compared[0]


def test_without_a_rule_a_run_is_good_when_it_ran(world: World) -> None:
    world.add(compare=None)
    assert world.run().outcome is Outcome.OK
    assert world.book.history("nightly").accepted() is None


def test_results_that_cannot_be_read_are_inconclusive(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.add()

    class Broken(Iterator[float]):
        def __next__(self) -> float:
            raise ResultsBroken("cell.json is no JSON")

    world.rates = Broken()
    assert world.run().compared == ("results cannot be read: cell.json is no JSON",)


def test_a_run_that_was_cut_off_goes_on_and_keeps_what_it_measured(world: World) -> None:
    world.add()
    world.rates = iter([100.0, 100.0])
    world.ran = [Ran(Outcome.INTERRUPTED, "the notebook's kernel died")]
    cut_off = world.run()
    assert (cut_off.outcome, cut_off.attempt, world.alerts[0].kind) == (Outcome.INTERRUPTED, 1, "interrupted")
    world.now_s += 5000.0
    whole = world.run()
    assert (whole.run_id, whole.attempt, whole.outcome) == (cut_off.run_id, 2, Outcome.OK)
    assert world.since_s == [cut_off.began_at_s], "cells of the first attempt count"
    ages = [job.parameters["max_age_s"] for job in world.jobs]
    assert ages == [0.0, 5100.0 + 60.0], "and are not measured again"
    assert world.run().run_id != cut_off.run_id


def test_a_process_that_vanished_goes_on_too(world: World) -> None:
    world.add()
    world.book.history("nightly").begin(world.now_s, "vanished")
    world.rates = iter([100.0])
    assert (world.run().run_id, world.jobs[0].parameters["max_age_s"]) == ("vanished", 60.0)


def test_ctrl_c_is_an_interruption(world: World) -> None:
    world.add()
    world.ran = [KeyboardInterrupt()]
    with pytest.raises(KeyboardInterrupt):
        world.run()
    current = world.book.history("nightly").current()
    assert current is not None and current.outcome is Outcome.INTERRUPTED


def test_one_run_only(world: World) -> None:
    world.add()
    with locked(world.book.lock_path("nightly")), pytest.raises(ScheduleRuns, match="runs already"):
        world.run()
    assert world.book.history("nightly").last_began_s() == world.now_s, "it came, so nobody missed it"
    assert world.jobs == []


def test_parameters_are_checked_again_before_the_run(world: World) -> None:
    world.add(parameters={"modle": "a"})
    run = world.run()
    assert (run.outcome, world.jobs) == (Outcome.FAILED, [])
    assert "did you mean model" in run.reason


def test_a_cost_table_that_fails_fails_the_run_and_a_dead_mlflow_does_not(world: World) -> None:
    world.add(cost_table="build", compare=None)
    world.cost_table_trouble, world.mlflow_trouble = "no rows", "MLflow does not run"
    run = world.run()
    assert (run.outcome, run.reason) == (Outcome.FAILED, "no new cost table: no rows")
    assert run.remarks == ("MLflow does not run",)
    assert world.published == [False]


def test_reports_are_kept_as_many_as_said_beside_the_accepted_one(world: World) -> None:
    world.add(keep_reports=2)
    world.rates = iter([100.0] * 5)
    for _ in range(5):
        world.run()
    left = sorted(path.name for path in (world.folder / "reports" / "nightly").glob("*.html"))
    assert left == ["01-001.html", "01-004.html", "01-005.html"]
    index = (world.folder / "reports" / "index.html").read_text()
    assert index.count("<td>2026") + index.count("<td>1970") == 5
    assert 'href="nightly/01-005.html"' in index


def test_cells_since_a_time_are_of_the_recorded_sweep(tmp_path: Path) -> None:
    from workbench.sweeps.results import LoggedRuns, ResultsFolder

    for digest, run_id in (("mine", "sweep"), ("other", "else")):
        folder = ResultsFolder(tmp_path, digest)
        folder.open({"cells": []})
        for began_s in (100.0, 200.0):
            folder.write_cell(replace(cell(50.0), sweep_digest=digest, started_at_s=began_s), [])
        folder.write_logged(LoggedRuns("http://mlflow", run_id))
    found = measured_since(tmp_path, 150.0, "sweep")
    assert [(one.sweep_digest, one.started_at_s) for one in found] == [("mine", 200.0)]
    assert len(measured_since(tmp_path, 150.0, None)) == 2
    assert len(measured_since(tmp_path, 300.0, "sweep")) == 0


@pytest.fixture
def place(world: World, monkeypatch: pytest.MonkeyPatch) -> World:
    """A folder with a configuration, and no cron on PATH."""
    (world.folder / "workbench.yaml").write_text("models: {}\npools: []\n")
    monkeypatch.setenv("PATH", str(world.folder))
    monkeypatch.setenv("HOME", str(world.folder))
    monkeypatch.setenv("WORKBENCH_CONFIG", str(world.folder / "workbench.yaml"))
    return world


def test_the_commands(place: World, capsys: pytest.CaptureFixture[str]) -> None:
    def said(*words: str) -> Any:
        assert run_app(["schedule", *words, "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    added = said(
        "add", "nightly", "30 2 * * *", "01", "-p", "concurrencies", "1,4", "--compare", METRIC,
        "--webhook", "https://hooks.example.com/secret",
    )  # fmt: skip
    assert added["schedule"]["parameters"] == {"concurrencies": [1, 4]}
    assert (added["schedule"]["webhook"], added["installed"]) == ("set", False)
    assert "run-now nightly" in Path(added["crontab"]).read_text()
    assert [one["name"] for one in said("list")] == ["nightly"]
    [state] = said("status")
    assert (state["outcome"], state["overdue_since"], state["is_running"]) == (None, None, False)
    assert run_app(["schedule", "list"]) == run_app(["schedule", "status"]) == 0
    assert run_app(["schedule", "add", "nightly", "30 2 * * *", "01"]) == 5
    assert run_app(["schedule", "accept", "nightly"]) == 1
    capsys.readouterr()
    assert said("remove", "nightly") == {"removed": "nightly"}
    assert said("list") == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["add", "n", "30 2 * *", "01"], "--cron: '30 2 * *' has 4 fields"),
        (["add", "n", "30 2 * * *", "02"], "there are 01"),
        (["add", "n", "30 2 * * *", "01", "-p", "concurrencies", "x"], "concurrencies"),
        (["add", "n", "30 2 * * *", "01", "--compare", "speed"], "--compare: 'speed' cannot be compared"),
        (["add", "n", "30 2 * * *", "01", "--compare", METRIC, "--tolerance", "nan"], "--tolerance"),
        (["add", "../n", "30 2 * * *", "01"], "NAME"),
        (["add", "n", "30 2 * * *", "01", "--webhook", "ftp://x"], "--webhook: a webhook is an http"),
        (["add", "n", "30 2 * * *", "01", "--time-limit", "0"], "--time-limit"),
        (["remove", "n"], "no schedule n"),
        (["run-now", "n"], "no schedule n"),
        (["accept", "n"], "no schedule n"),
    ],
)
def test_mistakes_are_usage_errors(
    words: list[str], says: str, place: World, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_app(["schedule", *words]) == 2
    assert says in " ".join(capsys.readouterr().err.split())
    assert place.book.names() == []


def test_a_missed_run_is_an_exit_code_and_one_alert(place: World, capsys: pytest.CaptureFixture[str]) -> None:
    config = load_config(place.folder / "workbench.yaml")
    book = Book(config.data_dir / "schedules")
    book.add(Schedule(name="nightly", cron="30 2 * * *", notebook="01", created_at_s=0.0))
    assert run_app(["schedule", "status"]) == run_app(["schedule", "status", "--json"]) == 1
    assert "overdue since" in capsys.readouterr().out
    assert len((book.folder / "nightly" / "alerts.jsonl").read_text().splitlines()) == 1
