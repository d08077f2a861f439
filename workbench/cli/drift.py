"""`workbench drift`: has a replica changed against what is known of its model?"""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, out, run, settings
from workbench.cli.exits import CommandFailed, Exit

if TYPE_CHECKING:
    from workbench.drift import DriftChecks

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING, Exit.CONFLICT)
LONGEST_WATCH_MIN = 7 * 24 * 60


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench drift smollm2-135m --take-reference",
            "workbench drift smollm2-135m@2 --json",
            "workbench drift smollm2-135m --replica main-1 --watch 30",
            codes=CODES,
        )
    )(drift)


def drift(
    model: Annotated[str, typer.Argument(metavar="MODEL[@VERSION]", help="Which; the champion without a version.")],
    replica: Annotated[str | None, typer.Option(help="Which replica; any ready one without.")] = None,
    reference: Annotated[
        Path | None, typer.Option(help="A kept reference; the newest of this model's name without.")
    ] = None,
    take_reference: Annotated[
        bool, typer.Option("--take-reference", help="Read the replica twice and keep that as what it should be.")
    ] = False,
    watch: Annotated[
        float | None,
        typer.Option(
            metavar="MINUTES",
            min=1,
            max=LONGEST_WATCH_MIN,
            help="Go on: check whenever the engine changed or this much time passed, and the replica is idle.",
        ),
    ] = None,
    log: Annotated[bool, typer.Option(help="Whether results go to MLflow.")] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compares a replica of the running stack with a reference; it serves nobody else for that minute.

    Says how much to evaluate: same, label, full_gate or block. Exit code 1 unless it is `same`; no verdict on quality.
    """
    if take_reference and (watch is not None or reference is not None):
        raise CommandFailed("--take-reference stands alone: it makes what the other two compare with", Exit.USAGE)
    checks: DriftChecks = heavy("workbench.drift").DriftChecks(settings(config), log=log)
    if take_reference:
        path = run(checks.take_reference(model, replica))
        emit({"reference": str(path)}, as_json, lambda: out.print(f"reference kept: {path}", highlight=False))
        return
    if watch is not None:
        run(_watch(checks, model, replica, reference, watch * 60.0))
        return
    found = run(checks.check(model, replica, reference))
    emit(found, as_json, lambda: _show(found))
    if found["action"] != "same":
        raise typer.Exit(int(Exit.FAILED))


async def _watch(checks: DriftChecks, model: str, replica: str | None, reference: Path | None, every_s: float) -> None:
    """Until Ctrl-C; a check that is not due says why, once."""
    said = ""
    while True:
        due, found = await checks.check_if_due(model, replica, reference, every_s)
        if found is not None:
            _show(found)
        elif due.why != said and not due.why.startswith("checked"):
            err.print(f"[dim]{due.why}", highlight=False)
            said = due.why
        await asyncio.sleep(min(every_s, checks.look_every_s))


def _show(found: dict[str, Any]) -> None:
    out.print(
        f"{found['model']} on {found['replica']}: {found['action']} (next-token KL {found['kl_mean']:.4f} nats, "
        f"{100 * found['agreement_frac']:.0f} % of greedy answers equal)",
        highlight=False,
    )
    for reason in found["reasons"]:
        out.print(f"  {reason}", highlight=False)
    for name in found["not_seen"]:
        out.print(f"  not seen: {name}", highlight=False)
