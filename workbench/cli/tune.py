"""`workbench tune`: the engine configuration with the most goodput, by successive halving."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

from workbench.cli.common import (
    MAX_CONCURRENCY,
    MAX_REQUESTS,
    MAX_TOKENS,
    ConfigOption,
    JsonOption,
    emit,
    epilog,
    err,
    heavy,
    out,
    run,
    settings,
    table,
)
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import PoolConfig, WorkbenchConfig
from workbench.wiring import running_stack

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING, Exit.CONFLICT)


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench tune smollm2-135m --vary max_num_batched_tokens=256,512,1024",
            "workbench tune smollm2-135m --vary block_size=32,64 --vary enable_chunked_prefill=true,false --dry-run",
            codes=CODES,
        )
    )(tune)


def tune(
    model: Annotated[str, typer.Argument(help="A model of workbench.yaml.")],
    vary: Annotated[list[str], typer.Option(help="A field of the engine and its values, NAME=A,B; may be repeated.")],
    pool: Annotated[str | None, typer.Option(help="The pool to start from; else the model's first.")] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1, max=MAX_TOKENS)] = 64,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1, max=MAX_TOKENS)] = 32,
    concurrency: Annotated[int, typer.Option(help="Requests in flight.", min=1, max=MAX_CONCURRENCY)] = 8,
    requests: Annotated[int, typer.Option(help="Requests of a first cell.", min=1, max=MAX_REQUESTS)] = 100,
    eta: Annotated[
        int, typer.Option(help="Each rung keeps one in so many, with so many times the requests.", min=2)
    ] = 3,
    rungs: Annotated[int, typer.Option(help="Rungs at most.", min=1, max=10)] = 3,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the configurations and the number of cells.")
    ] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Tries engine configurations, each on an engine of its own, and keeps the better ones for longer cells."""
    loaded = settings(config)
    on_pool, halving = heavy("workbench.tuning.on_pool"), heavy("workbench.tuning.halving")
    shape = heavy("workbench.sweeps.cells").Shape(prompt_tokens, output_tokens)
    try:
        tuning = on_pool.tuning_of(
            loaded, model, _choices(vary), pool_id=pool, shape=shape, concurrency=concurrency, num_requests=requests,
            eta=eta, num_rungs=rungs,
        )  # fmt: skip
    except (on_pool.CannotTune, ValueError) as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    if dry_run:
        names = [halving.describe(flags) for flags in tuning.plan.configurations]
        data = {"configurations": names, "max_cells": tuning.plan.max_cells}
        emit(data, as_json, lambda: out.print("\n".join([*names, f"about {data['max_cells']} cells"]), highlight=False))
        return
    refuse_company(loaded, tuning.pool)
    found = run(on_pool.run_tuning(loaded, tuning, on_change=_say, on_trial=_tell))
    run_id, trouble = heavy("workbench.tuning.logged").log_tuning(loaded, tuning, found)
    if trouble is not None:
        err.print(f"[yellow]not in MLflow[/] {trouble}")
    data = {
        "reason": found.reason,
        "folder": str(tuning.folder),
        "mlflow_run_id": run_id,
        "best": None if found.best is None else dict(found.best.flags),
    }
    data["ties"] = [dict(trial.flags) for trial in found.ties]
    emit(data, as_json, lambda: _show(found))
    if found.best is None:
        raise CommandFailed(found.reason)


def refuse_company(config: WorkbenchConfig, pool: PoolConfig) -> None:
    """An engine under test shares neither cores nor device with one that serves.

    Raises:
        CommandFailed: a pool of the running stack is in its way.
    """
    trouble = heavy("workbench.tuning.on_pool").company(pool, running_stack(config))
    if trouble is not None:
        raise CommandFailed(trouble, Exit.CONFLICT)


def _choices(vary: list[str]) -> dict[str, list[Any]]:
    choices: dict[str, list[Any]] = {}
    for text in vary:
        name, _, values = text.partition("=")
        if not values:
            raise ValueError(f"--vary takes NAME=A,B, not {text!r}")
        choices[name.replace("-", "_")] = [_value(value) for value in values.split(",")]
    return choices


def _value(text: str) -> Any:
    """As JSON reads it, else a word: 512, true, null, fp8."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def _say(part: str, what: str) -> None:
    err.print(f"{part} {what}", highlight=False, markup=False, soft_wrap=True)


def _tell(trial: Any) -> None:
    figure = trial.failure or f"{trial.goodput_rps:.3g} good requests/s"
    name = heavy("workbench.tuning.halving").describe(trial.flags)
    err.print(f"rung {trial.rung}: {name}: {figure}", highlight=False, markup=False, soft_wrap=True)


def _show(found: Any) -> None:
    describe = heavy("workbench.tuning.halving").describe
    rows = [
        [
            describe(trial.flags),
            f"{trial.goodput_rps:.3g}",
            "–" if trial.low is None else f"{trial.low:.3g} – {trial.high:.3g}",
        ]
        for trial in found.ties
    ]
    out.print(table("Cannot be told from the best", ["configuration", "good requests/s", "95 %"], rows, right=(1,)))
    out.print(found.reason, highlight=False)
