"""One run of a schedule, from the lock to the alert.

lock → new run, or the next attempt of one that was cut off → child → cells set against the accepted run
     → cost table → MLflow → history, retention, index → alert
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import nbformat

from workbench.notebooks import ReportError, check_parameters, declared_parameters, find
from workbench.schedule import shelf
from workbench.schedule.alerts import Alert
from workbench.schedule.book import Book, Schedule, ScheduleError, ScheduleRuns
from workbench.schedule.files import AlreadyRuns, locked
from workbench.schedule.history import History, Outcome, Run
from workbench.schedule.places import Places
from workbench.schedule.rule import Judge, Judged, judge_by_ratio
from workbench.schedule.runner import Job, Ran, Runner, run_child
from workbench.schedule.steps import CostTableStep
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import ResultsBroken

MAX_AGE = "max_age_s"
"""A notebook's parameter of this name gets the seconds since the run began: cells from before do not count, and those
of an attempt that was cut off do."""
RESUME_SLACK_S = 60.0


@dataclass(frozen=True, slots=True)
class Ports:
    """What a run needs of the world.

    Attributes:
        measured: cells measured since a Unix time by the sweep of an MLflow run; raises ResultsBroken.
        log_run: puts the run into MLflow; returns why it could not.
        cost_table: builds the table, publishes it when asked; returns why it could not.
        alert: tells people; returns why the webhook did not take it.
    """

    measured: Callable[[float, str | None], list[CellResult]]
    log_run: Callable[[Schedule, Run, Judged], str | None]
    cost_table: Callable[[bool], str | None]
    alert: Callable[[Schedule, Alert], str | None]
    now_s: Callable[[], float]
    new_id: Callable[[], str]
    runner: Runner = run_child
    judge: Judge = judge_by_ratio
    on_line: Callable[[str], None] = field(default=lambda line: None)


def run_now(book: Book, name: str, places: Places, ports: Ports) -> Run:
    """Runs a schedule now and returns how that ended.

    Raises:
        NoSuchSchedule: there is none of that name.
        ScheduleRuns: a run of it is going on; that is noticed, so that this one does not count as missed.
    """
    schedule, history = book.get(name), book.history(name)
    try:
        with locked(book.lock_path(name)) as descriptor:
            return _run(book, schedule, history, places, ports, descriptor)
    except AlreadyRuns:
        history.see(skipped_at_s=ports.now_s())
        raise ScheduleRuns(f"{name} runs already: this start is left out") from None


def accept(book: Book, name: str) -> Run:
    """Makes the newest run that measured anything the one that later ones are compared with.

    Raises:
        NoSuchSchedule: there is none of that name.
        ScheduleError: no run has measured anything yet.
    """
    book.get(name)
    history = book.history(name)
    newest = history.newest()
    if newest is None:
        raise ScheduleError(f"no run of {name} has measured anything yet: workbench schedule run-now {name}")
    history.accept(*newest)
    return newest[0]


def parameters_of(schedule: Schedule, notebooks_dir: Path, run: Run | None = None) -> dict[str, Any]:
    """The values for the notebook, checked against its parameters cell.

    Raises:
        UnknownNotebook, BadParameter: the notebook has changed since, or never had them.
    """
    source = find(schedule.notebook, notebooks_dir)
    values = check_parameters(source, schedule.parameters)
    declared = declared_parameters(nbformat.read(source, as_version=4))
    if run is not None and MAX_AGE in declared and MAX_AGE not in values:
        is_first = run.attempt == 1
        values[MAX_AGE] = 0.0 if is_first else run.attempt_began_at_s - run.began_at_s + RESUME_SLACK_S
    return values


def _run(book: Book, schedule: Schedule, history: History, places: Places, ports: Ports, descriptor: int) -> Run:
    run = history.begin(ports.now_s(), ports.new_id())
    out_dir = places.reports_dir / schedule.name
    if run.attempt > 1:
        ports.on_line(f"goes on with run {run.run_id}, attempt {run.attempt}")
    try:
        ran = _execute(schedule, run, out_dir, places, ports, descriptor)
    except BaseException:
        history.end(replace(run, ended_at_s=ports.now_s(), outcome=Outcome.INTERRUPTED, reason="it was stopped"))
        raise
    left = None
    if ran.notebook is None and out_dir.is_dir():
        left = shelf.mark_unfinished(out_dir, run.attempt_began_at_s)
    run = replace(
        run, outcome=ran.outcome, reason=ran.reason, html=ran.html, mlflow_run_id=ran.mlflow_run_id,
        remarks=ran.remarks, notebook=ran.notebook or (None if left is None else str(left)),
    )  # fmt: skip
    judged = Judged(run.outcome or Outcome.FAILED)
    if ran.outcome is Outcome.OK:
        run, judged = _judged(schedule, history, run, ports)
    if run.outcome is Outcome.OK and schedule.cost_table is not CostTableStep.NONE:
        trouble = ports.cost_table(schedule.cost_table is CostTableStep.PUBLISH)
        if trouble is not None:
            run = replace(run, outcome=Outcome.FAILED, reason=f"no new cost table: {trouble}")
    run = replace(run, ended_at_s=ports.now_s())
    run = _remarked(run, ports.log_run(schedule, run, judged))
    if run.outcome is not Outcome.OK:
        run = _remarked(run, ports.alert(schedule, alert_of(schedule, run)))
    history.end(run)
    _tidy(book, schedule, history, places)
    return run


def _execute(schedule: Schedule, run: Run, out_dir: Path, places: Places, ports: Ports, descriptor: int) -> Ran:
    try:
        values = parameters_of(schedule, places.notebooks_dir, run)
    except ReportError as error:
        return Ran(Outcome.FAILED, str(error))
    out_dir.mkdir(parents=True, exist_ok=True)
    return ports.runner(
        Job(
            notebook=schedule.notebook,
            parameters=values,
            config_file=places.config_file,
            notebooks_dir=places.notebooks_dir,
            out_dir=out_dir,
            time_limit_s=schedule.time_limit_minutes * 60,
            lock_descriptor=descriptor,
            on_line=ports.on_line,
        )
    )


def _judged(schedule: Schedule, history: History, run: Run, ports: Ports) -> tuple[Run, Judged]:
    """The run with its verdict; the first one that measured anything is accepted."""
    rule = schedule.compare
    try:
        cells = ports.measured(run.began_at_s, run.mlflow_run_id)
    except ResultsBroken as error:
        judged = Judged(Outcome.INCONCLUSIVE if rule else Outcome.OK, (f"results cannot be read: {error}",))
        return replace(run, outcome=judged.outcome, compared=judged.lines), judged
    run = replace(run, num_cells=len(cells))
    kept = [cell.to_json() for cell in cells]
    if cells:
        history.keep_cells(run, kept)
    if rule is None:
        return run, Judged(Outcome.OK)
    accepted = history.accepted()
    if accepted is None and any(cell.invalid is None for cell in cells):
        history.accept(run, kept)
        lines = ("accepted as the first: later runs are compared with it",)
        return replace(run, compared=lines), Judged(Outcome.OK, lines)
    try:
        before = [] if accepted is None else [CellResult.from_json(cell) for cell in accepted[1]]
    except ValueError as error:
        before = []
        run = replace(run, remarks=(*run.remarks, f"the accepted run cannot be read: {error}"))
    judged = ports.judge(before, cells, rule)
    reason = run.reason
    if judged.outcome is Outcome.REGRESSION:
        reason = f"{rule.metric} is worse than in the accepted run"
    elif judged.outcome is Outcome.INCONCLUSIVE:
        reason = f"not comparable; if the change is meant: workbench schedule accept {schedule.name}"
    return replace(run, outcome=judged.outcome, reason=reason, compared=judged.lines), judged


def alert_of(schedule: Schedule, run: Run) -> Alert:
    """What people are told of a run that did not end well."""
    what = f"{run.outcome}: {run.reason}" if run.reason else str(run.outcome)
    text = "\n".join([what, *run.compared])
    return Alert(schedule.name, str(run.outcome), text, run.run_id, run.mlflow_run_id, run.html or run.notebook)


def _remarked(run: Run, trouble: str | None) -> Run:
    return run if trouble is None else replace(run, remarks=(*run.remarks, trouble))


def _tidy(book: Book, schedule: Schedule, history: History, places: Places) -> None:
    """Retention and the index page; the accepted run's report stays."""
    accepted = history.accepted()
    spared: Sequence[str] = [accepted[0].notebook] if accepted and accepted[0].notebook else []
    folder = places.reports_dir / schedule.name
    if folder.is_dir():
        shelf.retire(folder, schedule.keep_reports, spared)
    write_index(book, places.reports_dir)


def write_index(book: Book, reports_dir: Path) -> Path:
    """Writes the index page of all schedules."""
    runs = {}
    for name in book.names():
        history = book.history(name)
        current = history.current()
        cut_off = [current] if current is not None and current.outcome is not None else []
        runs[name] = [*history.runs(), *cut_off]
    return shelf.write_index(reports_dir, runs)
