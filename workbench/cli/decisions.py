"""`workbench decisions`: decisions of routing and of rollouts as they were written, decided again."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from serving.core.policies.rollout import replay as decide_rollout_again
from serving.core.policies.routing import replay as decide_again
from serving.telemetry.decision_log import BrokenRecord, read, read_rollouts
from workbench.cli.common import JsonOption, emit, epilog, out
from workbench.cli.exits import CommandFailed, Exit

app = typer.Typer(no_args_is_help=True, help="Decision records.")


@app.callback()
def _group() -> None:
    """Keeps `replay` a subcommand of its own."""


@app.command(
    epilog=epilog(
        "workbench decisions replay .workbench/decisions",
        "workbench decisions replay decisions-4711.jsonl --json",
        codes=(Exit.OK, Exit.FAILED, Exit.USAGE),
    )
)
def replay(
    path: Annotated[Path, typer.Argument(help="A decision log, or a folder of them.")],
    as_json: JsonOption = False,
) -> None:
    """Decides every recorded request and step of a rollout again from its record alone. Exit 1 when one differs."""
    if not path.exists():
        raise CommandFailed(f"{path} is not there: the gateway writes decisions to .workbench/decisions", Exit.USAGE)
    total = 0
    reasons: dict[str, int] = {}
    differing: list[str] = []
    is_of_rollouts = path.name == "rollouts.jsonl"
    try:
        for record in () if is_of_rollouts else read(path):
            total += 1
            reasons[record.decision.reason] = reasons.get(record.decision.reason, 0) + 1
            if decide_again(record) != record.decision:
                differing.append(record.request.request_id)
        for moved in read_rollouts(path) if is_of_rollouts or path.is_dir() else ():
            total += 1
            reasons[f"rollout {moved.decision.phase}"] = reasons.get(f"rollout {moved.decision.phase}", 0) + 1
            if decide_rollout_again(moved) != moved.decision:
                differing.append(f"{moved.view.rollout.rollout_id}, revision {moved.view.rollout.revision}")
    except BrokenRecord as error:
        raise CommandFailed(str(error)) from None
    data = {"records": total, "equal": total - len(differing), "differing": differing, "reasons": reasons}

    def show() -> None:
        out.print(f"{total} records, {total - len(differing)} decided the same again")
        for reason, number in sorted(reasons.items(), key=lambda item: -item[1]):
            out.print(f"  {number:>7}  {reason}")
        for request_id in differing[:20]:
            out.print(f"  [red]differs[/] {request_id}")

    emit(data, as_json, show)
    if differing:
        raise typer.Exit(int(Exit.FAILED))
