"""`workbench restart`: replaces a part of the running stack while it serves."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import asdict
from enum import StrEnum
from typing import Annotated

import redis.asyncio
import typer

from serving.store.connection import connect
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.progress import ProgressBoard
from workbench.config import WorkbenchConfig
from workbench.stack import wanted
from workbench.stack.wanted import Replaced, Restart
from workbench.wiring import NotRunning, running_stack

LOOK_S = 0.2


class RestartedPart(StrEnum):
    """What can be replaced without a lost request."""

    GATEWAY = "gateway"


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench restart gateway",
            "workbench restart gateway --json",
            codes=(Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE),
        )
    )(restart)


def restart(
    part: Annotated[RestartedPart, typer.Argument(help="What to restart.")],
    timeout_s: Annotated[float, typer.Option(help="Seconds to wait.", min=0)] = 600.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Replaces the gateway's workers one after another while they serve; no request and no stream is lost.

    A worker's successor runs the code that is installed now, with the configuration that `workbench up` read. The old
    worker goes once its successor serves and its own streams have finished, at most 30 s later. When a successor does
    not come up, the old worker stays and the command fails.
    """
    loaded = settings(config)
    with ProgressBoard(err) as board:
        replaced = run(_restart(loaded, timeout_s, board.change))
    data = {"part": part.value, "replaced": [asdict(one) for one in replaced]}
    emit(data, as_json, lambda: out.print(_summary(replaced)))


def _summary(replaced: tuple[Replaced, ...]) -> str:
    workers = ", ".join(f"{one.name} (pid {one.old_pid} → {one.new_pid}, {one.seconds:.1f} s)" for one in replaced)
    return f"replaced: {workers}"


async def _restart(
    loaded: WorkbenchConfig, timeout_s: float, on_change: Callable[[str, str], None]
) -> tuple[Replaced, ...]:
    state = running_stack(loaded)
    if state is None or "store" not in state.urls:
        raise NotRunning(f"no stack runs from {loaded.data_dir}: start it with `workbench up`")
    client = connect(state.urls["store"])
    try:
        restart_id = await wanted.ask_restart(client)
        told = await _follow(client, restart_id, time.monotonic() + timeout_s, loaded, on_change)
    finally:
        await client.aclose()
    if told.error is not None:
        raise CommandFailed(told.error)
    return told.replaced


async def _follow(
    client: redis.asyncio.Redis,
    restart_id: str,
    deadline_s: float,
    loaded: WorkbenchConfig,
    on_change: Callable[[str, str], None],
) -> Restart:
    """Tells each step; returns when the restart is over."""
    num_told = 0
    while True:
        told = await wanted.restart_told(client, restart_id)
        if told is not None:
            for part, what in told.steps[num_told:]:
                on_change(part, what)
            num_told = len(told.steps)
            if told.is_over:
                return told
        if running_stack(loaded) is None:
            raise CommandFailed("the stack ended before the restart was over")
        if time.monotonic() > deadline_s:
            if await wanted.withdraw_restart(client, restart_id):
                raise CommandFailed("the stack did not take the request up in time; it was taken back")
            raise CommandFailed("the restart goes on, but was not over in time: see `workbench status` and its logs")
        await asyncio.sleep(LOOK_S)
