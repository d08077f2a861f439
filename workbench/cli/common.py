"""What every command shares: options, output for people and for programs, and errors that become exit codes."""

from __future__ import annotations

import asyncio
import importlib
import json
import math
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any, TypeVar

import typer
from rich.console import Console
from rich.table import Table

from workbench.cli.exits import MEANINGS, CommandFailed, Exit
from workbench.config import WorkbenchConfig, load_config

T = TypeVar("T")

# Written to a file or a pipe there is no width to keep to; rich would fold at 80.
PIPE_WIDTH = 160
out = Console(width=None if sys.stdout.isatty() else PIPE_WIDTH)
err = Console(stderr=True, width=None if sys.stderr.isatty() else PIPE_WIDTH)

ConfigOption = Annotated[
    Path | None,
    typer.Option("--config", "-c", metavar="FILE", help="The configuration; else the nearest workbench.yaml."),
]
JsonOption = Annotated[bool, typer.Option("--json", help="Print one JSON document on standard output.")]

# Beyond these a number is a slip of the finger: it would ask for years of work, or for more tasks than fit in memory.
MAX_TOKENS = 10_000_000
MAX_REQUESTS = 10_000_000
MAX_CONCURRENCY = 10_000
MAX_RATE_RPS = 100_000.0
MAX_SECONDS = 7 * 86_400.0

# Everything else that is not in the base install is in `bench`.
EXTRAS = {"gguf": "cpu", "vllm": "cpu", "torch": "cpu", "jupyterlab": "notebooks"}


def epilog(*examples: str, codes: tuple[Exit, ...] = (Exit.OK, Exit.FAILED, Exit.USAGE)) -> str:
    """The end of a command's help: examples to copy and its exit codes."""
    lines = ["Examples:", *(f"  $ {example}" for example in examples), "", "Exit codes:"]
    lines += [f"  {int(code)}  {MEANINGS[code]}" for code in codes]
    return "\n\n".join(line if line else " " for line in lines)


def number(value: float | None) -> float | None:
    """A callback of options that are fractions: NaN compares with no bound, so none refuses it.

    Raises:
        typer.BadParameter: it is no number.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"{value} is no number to count with")
    return value


def settings(path: Path | None) -> WorkbenchConfig:
    """The configuration of this command line.

    Raises:
        ConfigError: it cannot be used.
    """
    return load_config(path)


def heavy(module: str) -> ModuleType:
    """Imports a module of ours that needs an extra, at the moment it is needed.

    Raises:
        CommandFailed: a package of the extra is not installed; names the command that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("workbench", "serving", "evals", ""):
            raise
        extra = EXTRAS.get(package, "bench")
        raise CommandFailed(
            f"this command needs the package {package!r}, which is not installed: "
            f"pip install 'llm-workbench[{extra}]' (or `make setup` in the repository)",
            Exit.MISSING,
        ) from None


def run(work: Coroutine[Any, Any, T]) -> T:
    """Runs a use case to its end."""
    return asyncio.run(work)


def emit(data: Any, as_json: bool, show: Callable[[], object]) -> None:
    """Prints `data` as JSON for programs, or calls `show` for people."""
    if as_json:
        sys.stdout.write(json.dumps(data, indent=2, default=str) + "\n")
    else:
        show()


def table(title: str | None, columns: list[str], rows: list[list[Any]], right: tuple[int, ...] = ()) -> Table:
    """A plain table; `right` names the columns of figures."""
    grid = Table(title=title, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for index, column in enumerate(columns):
        grid.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*("" if cell is None else str(cell) for cell in row))
    return grid
