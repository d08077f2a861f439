"""The tree of commands, and the one table from errors to exit codes."""

from __future__ import annotations

import sys
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated

import typer

from serving.core.errors import ServingError, Unavailable
from workbench.cli import (
    bench,
    canary,
    compare,
    config,
    cost_table,
    decisions,
    doctor,
    drift,
    evaluate,
    faults,
    gate,
    hardware,
    keys,
    lineage,
    measure,
    mlflow,
    models,
    pool,
    purge,
    report,
    restart,
    schedule,
    slo_search,
    stack,
    tenants,
    tune,
    usage,
)
from workbench.cli.common import err
from workbench.cli.exits import CommandFailed, Exit
from workbench.config_layers import ConfigError
from workbench.stack.lock import AlreadyRunning
from workbench.stack.ports import PortTaken
from workbench.stack.service import ServiceFailed
from workbench.wiring import NotRunning

app = typer.Typer(
    name="workbench",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Serve models with vLLM, measure them, publish what they cost, route by it.",
    epilog="First steps:\n\n  $ workbench doctor\n\n  $ workbench up --sweep short --ask\n\nEvery command has --help.",
)

stack.add_to(app)
restart.add_to(app)
doctor.add_to(app)
hardware.add_to(app)
measure.add_to(app)
slo_search.add_to(app)
tune.add_to(app)
compare.add_to(app)
drift.add_to(app)
gate.add_to(app)
models.add_to(app)
usage.add_to(app)
lineage.add_to(app)
purge.add_to(app)
app.add_typer(bench.app, name="bench")
app.add_typer(pool.app, name="pool")
app.add_typer(canary.app, name="canary")
app.add_typer(evaluate.app, name="eval")
app.add_typer(faults.app, name="faults")
app.add_typer(tenants.app, name="tenants")
app.add_typer(keys.app, name="keys")
app.add_typer(cost_table.app, name="cost-table")
app.add_typer(report.app, name="report")
app.add_typer(schedule.app, name="schedule")
app.add_typer(mlflow.app, name="mlflow")
app.add_typer(config.app, name="config")
app.add_typer(decisions.app, name="decisions")

ERROR_EXITS: tuple[tuple[type[Exception], Exit], ...] = (
    (ConfigError, Exit.USAGE),
    (NotRunning, Exit.UNAVAILABLE),
    (AlreadyRunning, Exit.CONFLICT),
    (PortTaken, Exit.CONFLICT),
    (ServiceFailed, Exit.FAILED),
    (Unavailable, Exit.UNAVAILABLE),
    (ServingError, Exit.FAILED),
)


@app.callback()
def root(show_version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False) -> None:
    """Serve models with vLLM, measure them, publish what they cost, route by it."""
    if show_version:
        typer.echo(f"workbench {installed_version()}")
        raise typer.Exit


def installed_version() -> str:
    """The version of the distribution; `unknown` when run from a checkout that is not installed."""
    try:
        return version("llm-workbench")
    except PackageNotFoundError:
        return "unknown"


def run_app(arguments: list[str]) -> int:
    """Runs one command line and returns its exit code."""
    try:
        app(args=arguments, prog_name="workbench")
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(Exit.FAILED)
    except KeyboardInterrupt:
        return int(Exit.INTERRUPTED)
    except CommandFailed as error:
        return _fail(str(error), error.code)
    except tuple(kind for kind, _ in ERROR_EXITS) as error:
        return _fail(str(error), next(code for kind, code in ERROR_EXITS if isinstance(error, kind)))
    return int(Exit.OK)


def _fail(message: str, code: Exit) -> int:
    err.print("[bold red]error[/]", end=" ")
    sys.stderr.write(message + "\n")
    return int(code)
