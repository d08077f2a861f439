"""`workbench schedule`: notebooks by the clock, compared with the accepted run, with an alert when one is worse."""

from __future__ import annotations

import math
import time
from dataclasses import asdict
from typing import Annotated, Any

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.report import named_values, notebooks_dir
from workbench.config import WorkbenchConfig
from workbench.schedule.steps import CostTableStep

app = typer.Typer(no_args_is_help=True, help="Scheduled runs of notebooks: cron, comparison, alerts.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING, Exit.CONFLICT)
NameArgument = Annotated[str, typer.Argument(help="The schedule's name.")]
_OPTIONS = {
    "compare.metric": "--compare", "compare.tolerance_frac": "--tolerance", "time_limit_minutes": "--time-limit",
    "grace_minutes": "--grace", "keep_reports": "--keep", "name": "NAME",
}  # fmt: skip


@app.command(
    epilog=epilog(
        'workbench schedule add nightly "30 2 * * *" 01_benchmark_sweep -p model smollm2-135m '
        "--compare output_tokens_per_s_per_gpu --tolerance 0.05 --cost-table publish",
        'workbench schedule add weekly "0 6 * * mon" 01_benchmark_sweep -p mode full --time-limit 180 --no-crontab',
        codes=CODES,
    )
)
def add(
    name: NameArgument,
    cron: Annotated[str, typer.Argument(help="Minute, hour, day, month, weekday, in local time.")],
    notebook: Annotated[str, typer.Argument(help="The notebook's name without .ipynb.")],
    values: Annotated[list[str] | None, typer.Argument(metavar="", hidden=True)] = None,
    parameters: Annotated[
        list[str] | None,
        typer.Option("--parameter", "-p", metavar="NAME VALUE", help="A parameter of the notebook; may be repeated."),
    ] = None,
    compare: Annotated[
        str | None, typer.Option(metavar="METRIC", help="Compare this metric of each cell with the accepted run.")
    ] = None,
    tolerance: Annotated[float, typer.Option(help="How much worse counts as no difference.")] = 0.05,
    cost_table: Annotated[
        CostTableStep, typer.Option(help="What follows a run that was not worse.")
    ] = CostTableStep.NONE,
    time_limit: Annotated[float, typer.Option(metavar="MINUTES", help="A run that takes longer is ended.")] = 240.0,
    grace: Annotated[float, typer.Option(metavar="MINUTES", help="How late a run may begin.")] = 30.0,
    keep: Annotated[int, typer.Option(help="Reports that stay in reports/NAME.")] = 30,
    webhook: Annotated[str | None, typer.Option(metavar="URL", help="Alerts are posted there as JSON.")] = None,
    crontab: Annotated[bool, typer.Option(help="Whether cron starts it; else a timer of your own does.")] = True,
    replace: Annotated[bool, typer.Option("--replace", help="Replace the schedule of that name.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Schedules a notebook, its parameters checked, and puts it into your crontab where there is cron."""
    loaded = settings(config)
    typed = _typed(loaded, notebook, named_values(parameters or [], values or []))
    schedule = _schedule(
        name=name, cron=cron, notebook=notebook, parameters=typed, time_limit_minutes=time_limit, grace_minutes=grace,
        keep_reports=keep, cost_table=cost_table, webhook=webhook, in_crontab=crontab, created_at_s=time.time(),
        compare=None if compare is None else {"metric": _metric(compare), "tolerance_frac": tolerance},
    )  # fmt: skip
    book = heavy("workbench.schedule.places").book_of(loaded)
    try:
        book.add(schedule, replaces=replace)
    except heavy("workbench.schedule.book").ScheduleExists as error:
        raise CommandFailed(str(error), Exit.CONFLICT) from None
    file, installed = _install(book, loaded)
    due_s = heavy("workbench.schedule.cron").next_due_s(schedule.cron, time.time())
    data = {"schedule": _plain(schedule), "next_due_at": _at(due_s), "crontab": str(file), "installed": installed}
    emit(data, as_json, lambda: out.print(_added(data), highlight=False, markup=False))


@app.command("list", epilog=epilog("workbench schedule list", "workbench schedule list --json", codes=CODES))
def list_all(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows the schedules with what is run, and how."""
    schedules = [_plain(schedule) for schedule in _all(heavy("workbench.schedule.places").book_of(settings(config)))]
    columns = ["name", "cron", "notebook", "parameters", "compares", "cost table"]
    rows = [
        [one["name"], one["cron"], one["notebook"], _pairs(one["parameters"]), _rule(one["compare"]), one["cost_table"]]
        for one in schedules
    ]
    emit(schedules, as_json, lambda: out.print(table(None, columns, rows) if rows else "no schedules"))


@app.command(epilog=epilog("workbench schedule remove nightly", codes=CODES))
def remove(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Removes a schedule, its line in the crontab and its history; its reports stay."""
    loaded = settings(config)
    book = heavy("workbench.schedule.places").book_of(loaded)
    _edit(lambda: book.remove(name))
    _install(book, loaded)
    emit({"removed": name}, as_json, lambda: out.print(f"{name} removed", highlight=False, markup=False))


@app.command("run-now", epilog=epilog("workbench schedule run-now nightly", codes=CODES))
def run_now(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Runs a schedule now, as cron does. Exit 1 when it failed, is worse than the accepted run, or not comparable."""
    loaded = settings(config)
    places, live, job = (heavy(f"workbench.schedule.{part}") for part in ("places", "live", "job"))
    ports = live.ports_of(loaded, lambda line: err.print(line, highlight=False, markup=False))
    run = _edit(lambda: job.run_now(places.book_of(loaded), name, places.places_of(loaded), ports))
    data = asdict(run)
    emit(data, as_json, lambda: out.print(_ended(data), highlight=False, markup=False))
    if run.outcome != "ok":
        raise CommandFailed(f"{name}: {run.outcome}" + (f": {run.reason}" if run.reason else ""))


@app.command(epilog=epilog("workbench schedule accept nightly", codes=CODES))
def accept(name: NameArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Accepts the newest run: later ones are compared with it. For a change that is meant."""
    book = heavy("workbench.schedule.places").book_of(settings(config))
    run = _edit(lambda: heavy("workbench.schedule.job").accept(book, name))
    emit({"name": name, "run_id": run.run_id}, as_json, lambda: out.print(f"{name}: {run.run_id} is accepted"))


@app.command(epilog=epilog("workbench schedule status", "workbench schedule status --json", codes=CODES))
def status(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows the last run of each schedule and alerts once of a run that never came. Exit 1 when one is overdue."""
    places, watch = heavy("workbench.schedule.places"), heavy("workbench.schedule.watch")
    book, now_s = places.book_of(settings(config)), time.time()
    states = []
    for schedule in _all(book):
        due_s = watch.overdue_s(book, schedule, now_s)
        trouble = None
        if due_s is not None:
            trouble = watch.tell_once(book, schedule, due_s, lambda of, alert: places.send(book, of, alert))
        states.append(_state(book, schedule, now_s, due_s) | {"alert_trouble": trouble})
    columns = ["name", "last run", "outcome", "next", "", "why"]
    rows = [
        [one["name"], one["last_began_at"] or "never", "running" if one["is_running"] else one["outcome"] or "–",
         one["next_due_at"], f"overdue since {one['overdue_since']}" if one["overdue_since"] else "", one["reason"]]
        for one in states
    ]  # fmt: skip
    emit(states, as_json, lambda: out.print(table(None, columns, rows) if rows else "no schedules"))
    if any(one["overdue_since"] for one in states):
        raise typer.Exit(int(Exit.FAILED))


def _typed(config: WorkbenchConfig, notebook: str, given: dict[str, str]) -> dict[str, Any]:
    notebooks = heavy("workbench.notebooks")
    try:
        values: dict[str, Any] = notebooks.check_parameters(notebooks.find(notebook, notebooks_dir(config)), given)
    except notebooks.ReportError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    return values


def _metric(name: str) -> str:
    comparison = heavy("workbench.comparison.cells")
    try:
        comparison.is_higher_better(name)
    except comparison.UnknownMetric as error:
        raise CommandFailed(f"--compare: {error}", Exit.USAGE) from None
    return name


def _schedule(**fields: Any) -> Any:
    book = heavy("workbench.schedule.book")
    numbers = [value for value in fields.values() if isinstance(value, float)]
    if not all(map(math.isfinite, numbers)):
        raise CommandFailed("--time-limit, --grace and --tolerance are numbers", Exit.USAGE)
    try:
        return book.Schedule(**fields)
    except ValueError as error:  # pydantic's is one
        said = book.mistakes(error, lambda field: _OPTIONS.get(field, f"--{field}"))
        raise CommandFailed(said, Exit.USAGE) from None


def _edit(act: Any) -> Any:
    """Does it; what cannot be done becomes an exit code."""
    book, files = heavy("workbench.schedule.book"), heavy("workbench.schedule.files")
    try:
        return act()
    except book.ScheduleRuns as error:
        raise CommandFailed(str(error), Exit.CONFLICT) from None
    except book.NoSuchSchedule as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    except (book.ScheduleError, files.ScheduleBroken) as error:
        raise CommandFailed(str(error)) from None


def _all(book: Any) -> list[Any]:
    found: list[Any] = _edit(book.all)
    return found


def _install(book: Any, config: WorkbenchConfig) -> tuple[Any, bool]:
    crontab = heavy("workbench.schedule.crontab")
    try:
        file, installed = _edit(lambda: crontab.install(book, config.file))
    except crontab.CrontabFailed as error:
        raise CommandFailed(f"the schedules are kept, but cron does not have them: {error}") from None
    return file, bool(installed)


def _state(book: Any, schedule: Any, now_s: float, due_s: float | None) -> dict[str, Any]:
    history = book.history(schedule.name)
    last, accepted = _edit(history.last), _edit(history.accepted)
    next_s = heavy("workbench.schedule.cron").next_due_s(schedule.cron, now_s)
    return {
        "name": schedule.name,
        "is_running": book.is_running(schedule.name),
        "last_began_at": None if last is None else _at(last.attempt_began_at_s),
        "outcome": None if last is None or last.outcome is None else str(last.outcome),
        "reason": "" if last is None else last.reason,
        "accepted_run_id": None if accepted is None else accepted[0].run_id,
        "next_due_at": _at(next_s),
        "overdue_since": None if due_s is None else _at(due_s),
    }


def _plain(schedule: Any) -> dict[str, Any]:
    """A schedule to show: a webhook's address may hold a secret."""
    data: dict[str, Any] = schedule.model_dump(mode="json")
    return data | {"webhook": None if schedule.webhook is None else "set"}


def _added(data: dict[str, Any]) -> str:
    lines = [f"{data['schedule']['name']} is next due at {data['next_due_at']}"]
    if data["installed"] and data["schedule"]["in_crontab"]:
        lines.append("it is in your crontab")
    else:
        lines.append(f"nothing starts it yet: its line is in {data['crontab']}; or use a timer of your own")
    return "\n".join(lines)


def _ended(data: dict[str, Any]) -> str:
    shown = {"run": data["run_id"], "outcome": data["outcome"], "report": data["html"] or data["notebook"]}
    lines = [f"{name}: {value}" for name, value in shown.items() if value]
    return "\n".join([*lines, *data["compared"], *data["remarks"]])


def _pairs(values: dict[str, Any]) -> str:
    return " ".join(f"{name}={value}" for name, value in values.items())


def _rule(rule: dict[str, Any] | None) -> str:
    return "–" if rule is None else f"{rule['metric']} ± {rule['tolerance_frac']:.1%}"


def _at(time_s: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(time_s))
