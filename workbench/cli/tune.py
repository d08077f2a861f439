"""`workbench tune`: the engine configuration with the most goodput, by successive halving."""

from __future__ import annotations

import hashlib
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
from workbench.wiring import layout, running_stack

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
    tuning, runner = heavy("workbench.tuning.halving"), heavy("workbench.tuning.run")
    base = _pool(loaded, model, pool)
    try:
        plan = tuning.TuningPlan(tuning.grid(_choices(vary), _in_use(loaded, base)), requests, eta, rungs)
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    if dry_run:
        names = [tuning.describe(flags) for flags in plan.configurations]
        data = {"configurations": names, "max_cells": plan.max_cells}
        emit(data, as_json, lambda: out.print("\n".join([*names, f"about {plan.max_cells} cells"]), highlight=False))
        return
    refuse_company(loaded, base)
    slo = loaded.slo.of(base.hardware)
    shape = heavy("workbench.sweeps.cells").Shape(prompt_tokens, output_tokens)
    load = runner.TuningLoad(shape, concurrency, heavy("workbench.loadgen").Slo(slo.ttft_p99_s, slo.tpot_p99_s))
    where = layout(loaded)
    folder = where.results_dir / f"tune-{_digest(base, plan, load)}"
    bench = runner.EngineBench(base, loaded.models[model], where, load, _say)
    found = run(runner.tune(plan, bench, folder, _tell))
    data = {
        "reason": found.reason,
        "folder": str(folder),
        "best": None if found.best is None else dict(found.best.flags),
    }
    data["ties"] = [dict(trial.flags) for trial in found.ties]
    emit(data, as_json, lambda: _show(found))
    if found.best is None:
        raise CommandFailed(found.reason)


def _pool(config: WorkbenchConfig, model: str, pool_id: str | None) -> PoolConfig:
    pools = [pool for pool in config.pools if pool.model == model and pool_id in (None, pool.pool_id)]
    if not pools:
        raise CommandFailed(f"no pool {pool_id or ''} of model {model!r} in workbench.yaml", Exit.USAGE)
    if pools[0].launcher.value == "attach":
        raise CommandFailed(f"pool {pools[0].pool_id} is attached: its engine is not ours to start", Exit.USAGE)
    return pools[0]


def refuse_company(config: WorkbenchConfig, pool: PoolConfig) -> None:
    """An engine under test shares neither cores nor device with one that serves.

    Raises:
        CommandFailed: a pool of the running stack is in its way.
    """
    state = running_stack(config)
    wanted = set(pool.cores[0]) if pool.cores else set()
    for pool_id, facts in ({} if state is None else state.pools).items():
        taken = {core for cores in facts.cores.values() for core in cores}
        if pool_id == pool.pool_id or wanted & taken:
            raise CommandFailed(
                f"pool {pool_id} runs where the engines of {pool.pool_id} would be tried: end it first with "
                f"`workbench pool stop {pool_id}`",
                Exit.CONFLICT,
            )


def _in_use(config: WorkbenchConfig, pool: PoolConfig) -> dict[str, Any]:
    """The flags that the pool runs with."""
    if pool.launcher.value == "fake":
        return dict(heavy("serving.engine.fake").FakeSettings(model=pool.model, **pool.engine).model_dump(mode="json"))
    flags = heavy("workbench.stack.replicas").engine_flags(pool, config.models[pool.model])
    return dict(flags.model_dump(mode="json"))


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


def _digest(pool: PoolConfig, plan: Any, load: Any) -> str:
    text = f"{pool.model_dump_json()}{plan}{load}"
    return hashlib.sha256(text.encode()).hexdigest()[:16]


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
