"""`workbench slo-search`: the highest load of a replica that keeps the SLO, to 5 %."""

from __future__ import annotations

import os
import socket
from typing import Annotated, Any

import typer

from workbench.cli.common import (
    MAX_CONCURRENCY,
    MAX_RATE_RPS,
    MAX_REQUESTS,
    MAX_SECONDS,
    MAX_TOKENS,
    ConfigOption,
    JsonOption,
    emit,
    epilog,
    err,
    heavy,
    number,
    out,
    run,
    settings,
    table,
)
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import NotRunning, layout, mlflow_uri

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING, Exit.CONFLICT)
LOWEST_RATE_RPS = 0.001


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        "slo-search",
        epilog=epilog(
            "workbench slo-search smollm2-135m",
            "workbench slo-search smollm2-135m --load rate --start 1 --prompt-tokens 256 --json",
            codes=CODES,
        ),
    )(slo_search)


def _seconds(text: str) -> Any:
    return typer.Option(help=text, min=0.0001, max=MAX_SECONDS, callback=number)


def slo_search(
    model: Annotated[str, typer.Argument(help="A served model, NAME or NAME@VERSION.")],
    load: Annotated[str, typer.Option(help="`concurrency` (closed loop), or `rate` (requests a second).")] = (
        "concurrency"
    ),
    start: Annotated[
        float | None,
        typer.Option(help="First load to try; 4 in flight or 1 a second.", min=LOWEST_RATE_RPS, callback=number),
    ] = None,
    highest: Annotated[
        float | None, typer.Option(help="Load that is never exceeded.", min=LOWEST_RATE_RPS, callback=number)
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(help="Tokens of each prompt.", min=1, max=MAX_TOKENS)] = 64,
    output_tokens: Annotated[int, typer.Option(help="Tokens of each answer.", min=1, max=MAX_TOKENS)] = 32,
    ttft_p99_s: Annotated[float | None, _seconds("Limit on TTFT at P99; the hardware class's when left out.")] = None,
    tpot_p99_s: Annotated[float | None, _seconds("Limit on TPOT at P99; the same.")] = None,
    served_within: Annotated[
        float | None, typer.Option(help="Share of requests that must keep both, too.", min=0.5, max=0.99999)
    ] = None,
    requests: Annotated[
        int, typer.Option(help="Requests of a cell at least; a P99 needs 368.", min=1, max=MAX_REQUESTS)
    ] = 400,
    cells: Annotated[int, typer.Option(help="Cells at most.", min=2, max=100)] = 10,
    max_cell_seconds: Annotated[float, _seconds("Seconds in which a cell sends requests.")] = 600.0,
    replica: Annotated[str | None, typer.Option(help="This replica; else any ready one.")] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Keep cells of an earlier search, or measure all anew.")
    ] = True,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Searches the highest load that keeps the SLO on a replica that serves nobody else meanwhile."""
    loaded = settings(config)
    asked = {
        "load": load,
        "start": start,
        "highest": highest,
        "shape": (prompt_tokens, output_tokens),
        "limits": (ttft_p99_s, tpot_p99_s, served_within),
        "requests": requests,
        "cells": cells,
        "max_cell_s": max_cell_seconds,
    }
    answer = run(_search(loaded, model, replica, resume, asked))
    data = answer.to_json() | {"folder": str(answer.folder), "mlflow_run_id": _log(loaded, model, answer)}
    emit(data, as_json, lambda: _show(answer))
    if answer.capacity.load is None:
        raise CommandFailed(answer.capacity.reason)


async def _search(config: WorkbenchConfig, model: str, replica: str | None, resume: bool, asked: dict[str, Any]) -> Any:
    sweeping, searching = heavy("workbench.sweeps.on_stack"), heavy("workbench.slo.searching")
    holds, clocks = heavy("workbench.sweeps.holds"), heavy("serving.clock")
    owner = f"slo-search of {model} (pid {os.getpid()} on {socket.gethostname()})"
    try:
        async with sweeping.found_replica(config, model, replica) as found:
            question = _question(config, found.pool, asked)
            hold = holds.StoreHold(found.store, found.tables, found.replica, owner=owner, clock=clocks.SystemClock())
            async with hold.exclusive():
                with heavy("workbench.sweeps.run").client_on_other_cores(found.replica.cores):
                    return await searching.search_slo(
                        question,
                        found.replica,
                        heavy("workbench.loadgen").Vocabulary.load(found.tokenizer),
                        layout(config).results_dir,
                        is_resumed=resume,
                        on_step=lambda step: _tell(model, step),
                    )
    except heavy("serving.store.reservations").ReplicaReserved as error:
        raise CommandFailed(error.message, Exit.CONFLICT) from None
    except (holds.NotHeld, searching.ClientTooSlow, heavy("workbench.loadgen").WorkloadError) as error:
        raise CommandFailed(str(error)) from None


def _question(config: WorkbenchConfig, pool: Any, asked: dict[str, Any]) -> Any:
    searching, search = heavy("workbench.slo.searching"), heavy("workbench.slo.search")
    slo = config.slo.of(pool.hardware_class)
    ttft_p99_s, tpot_p99_s, served_within = asked["limits"]
    try:
        kind = searching.LoadKind(asked["load"])
        is_closed = kind is searching.LoadKind.CONCURRENCY
        lowest, first, top = (1.0, 4.0, MAX_CONCURRENCY) if is_closed else (LOWEST_RATE_RPS, 1.0, MAX_RATE_RPS)
        plan = search.SearchPlan(
            start=asked["start"] or first,
            lowest=lowest,
            highest=asked["highest"] or float(top),
            is_whole=is_closed,
            max_cells=asked["cells"],
        )
        limits = searching.SloLimits(ttft_p99_s or slo.ttft_p99_s, tpot_p99_s or slo.tpot_p99_s, served_within)
        shape = heavy("workbench.sweeps.cells").Shape(*asked["shape"])
        return searching.SloQuestion(kind, shape, limits, plan, asked["requests"], asked["max_cell_s"])
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None


def _tell(model: str, step: Any) -> None:
    if step.probe is None:
        err.print(f"{model} cell {step.number}: load {step.measure.load:g}, {step.measure.why}", highlight=False)
        return
    verdict = heavy("workbench.slo.search").verdict(step.probe)
    err.print(f"{model} cell {step.number}: load {step.probe.load:g} {verdict.value}", highlight=False)


def _log(config: WorkbenchConfig, model: str, answer: Any) -> str | None:
    """The search as a run of the model's benchmarks; without MLflow it is on disk alone."""
    try:
        tracker = heavy("workbench.tracking").Tracker(mlflow_uri(config))
    except NotRunning:
        return None
    found = answer.capacity
    metrics = {"num_cells": float(found.num_cells)}
    bounds = {"slo_load": found.load, "slo_load/ci_low": found.low, "slo_load/ci_high": found.high}
    metrics |= {name: value for name, value in bounds.items() if value is not None}
    try:
        run_id = tracker.log_run(
            f"benchmarks/{model.partition('@')[0]}",
            f"SLO search of {model}",
            tags={"kind": "slo-search", "ending": found.ending.value, "reason": found.reason},
            metrics=metrics,
            files={"slo_search": [answer.folder / "search.json"]},
        )
    except heavy("serving.core.errors").ServingError as error:
        err.print(f"[yellow]not in MLflow[/] {error.message}")
        return None
    return str(run_id)


def _show(answer: Any) -> None:
    verdict = heavy("workbench.slo.search").verdict
    rows = [
        [f"{probe.load:g}", verdict(probe).value, *(f"{one.name} {one.p_kept:.3f}" for one in probe.readings)]
        for probe in answer.probes
    ]
    width = max(len(row) for row in rows) if rows else 2
    columns = ["load", "SLO", *["limit and chance that it is kept"] * (width - 2)]
    out.print(table("Measured", columns, [row + [""] * (width - len(row)) for row in rows], right=(0,)))
    out.print(answer.capacity.reason, highlight=False)
