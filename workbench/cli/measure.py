"""`workbench sweep`: the measurements that the cost table is made of."""

from __future__ import annotations

from functools import partial
from typing import Annotated, Any

import typer
from rich.markup import escape

from workbench.cli.bench import requests_printer
from workbench.cli.bench_options import ClientProcessesOption
from workbench.cli.common import (
    MAX_CONCURRENCY,
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
from workbench.cli.figures import WEAK_NOTE
from workbench.cli.sweep_lanes import side_by_side
from workbench.cli.sweep_options import (
    BudgetMinutesOption,
    BudgetUsdOption,
    DryRunOption,
    MaxAgeOption,
    ParallelOption,
    ResumeOption,
    SaturationOption,
    show_previews,
)
from workbench.config import WorkbenchConfig
from workbench.wiring import NotRunning, mlflow_uri

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING, Exit.CONFLICT)


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench sweep smollm2-135m",
            "workbench sweep smollm2-135m gemma3-270m --mode full",
            "workbench sweep smollm2-135m --shape 64x32 --concurrency 1 --concurrency 8 --json",
            "workbench sweep smollm2-135m --mode full --budget-minutes 20 --dry-run",
            codes=CODES,
        )
    )(sweep)


def sweep(
    models: Annotated[list[str], typer.Argument(help="Served models, NAME or NAME@VERSION; one after the other.")],
    mode: Annotated[str, typer.Option(help="`short`, or `full` for the figures to publish.")] = "short",
    shape: Annotated[list[str] | None, typer.Option(help="Tokens INxOUT instead of the mode's; repeatable.")] = None,
    concurrency: Annotated[
        list[int] | None, typer.Option(help="Instead of the mode's; may be repeated.", min=1, max=MAX_CONCURRENCY)
    ] = None,
    replica: Annotated[str | None, typer.Option(help="This replica; else any ready one.")] = None,
    max_age_hours: MaxAgeOption = None,
    resume: ResumeOption = True,
    budget_minutes: BudgetMinutesOption = None,
    budget_usd: BudgetUsdOption = None,
    stop_at_saturation: SaturationOption = True,
    parallel: ParallelOption = False,
    client_processes: ClientProcessesOption = None,
    dry_run: DryRunOption = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Measures a replica that nothing else uses, cell by cell, and logs it to MLflow; finished cells are kept."""
    loaded = settings(config)
    sweeping = heavy("workbench.sweeps.on_stack")
    try:
        requests = [
            sweeping.SweepRequest(
                model=model,
                mode=sweeping.SweepMode(mode),
                shapes=tuple(_shape(text) for text in shape) if shape else None,
                concurrencies=tuple(concurrency) if concurrency else None,
                replica_id=replica,
                max_age_s=0.0 if not resume else None if max_age_hours is None else max_age_hours * 3600,
                max_s=None if budget_minutes is None else budget_minutes * 60,
                max_usd=budget_usd,
                stops_at_saturation=stop_at_saturation,
                client_processes=client_processes,
            )
            for model in models
        ]
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    if dry_run:
        previews = [run(sweeping.preview_on_stack(loaded, request)) for request in requests]
        emit({"sweeps": [one.to_json() for one in previews]}, as_json, lambda: show_previews(previews))
        return
    results = _sweep_all(loaded, requests, parallel)
    cells = [cell | {"mlflow_run_id": run_id} for result in results for cell, run_id in _plain(result)]
    data = {
        "cells": cells,
        "mlflow_run_ids": [result.run_id for result in results],
        "num_pending": sum(result.num_pending for result in results),
        "folders": [str(result.folder) for result in results],
        "pages": [None if result.page is None else str(result.page) for result in results],
        "skipped": [{"cell_id": c.spec.cell_id, "reason": c.reason} for result in results for c in result.skipped],
    }
    emit(data, as_json, lambda: _show_cells(results))
    _fail_without_cells(cells, data["skipped"])


def _sweep_all(config: WorkbenchConfig, requests: list[Any], parallel: bool) -> list[Any]:
    if not parallel or len(requests) < 2:
        tracker = _tracker(config)
        return [_sweep(config, request, tracker) for request in requests]
    sweeping = heavy("workbench.sweeps.on_stack")
    cores = {request.model: run(sweeping.preview_on_stack(config, request)).cores for request in requests}
    return side_by_side(cores, requests, partial(_sweep_alone, config))


def _sweep_alone(config: WorkbenchConfig, request: Any) -> Any:
    return _sweep(config, request, _tracker(config))


def _fail_without_cells(cells: list[dict[str, Any]], skipped: list[dict[str, Any]]) -> None:
    if not cells and skipped:
        raise CommandFailed(f"nothing was measured: {skipped[0]['reason']}")
    if not any(cell["invalid"] is None for cell in cells):
        raise CommandFailed("no cell counts: " + "; ".join(f"{c['cell_id']}: {c['invalid']}" for c in cells))


def _sweep(config: WorkbenchConfig, request: Any, tracker: object | None) -> Any:
    module = heavy("workbench.sweeps.on_stack")
    failures = (
        heavy("workbench.measurement.measure").ReplicaBusy,
        heavy("workbench.measurement.measure").ReplicaLost,
        heavy("workbench.sweeps.holds").NotHeld,
        heavy("workbench.sweeps.results").ResultsNotWritten,
        heavy("workbench.sweeps.results").ResultsBroken,
        heavy("workbench.loadgen").WorkloadError,
    )
    print_requests = requests_printer(request.model)

    def on_progress(progress: Any) -> None:
        if progress.message:
            where = f"[{progress.cell_number}/{progress.num_cells}] " if progress.cell_number else ""
            err.print(f"{request.model} {where}{progress.message}", highlight=False, markup=False, soft_wrap=True)
        elif progress.total:
            print_requests(progress.done, progress.total)

    try:
        return run(module.sweep_on_stack(config, request, tracker=tracker, on_progress=on_progress))
    except heavy("serving.store.reservations").ReplicaReserved as error:
        raise CommandFailed(error.message, Exit.CONFLICT) from None
    except failures as error:
        raise CommandFailed(str(error)) from None


def _tracker(config: WorkbenchConfig) -> object | None:
    """MLflow; without one a sweep keeps its results on disk, where the next one takes them up."""
    try:
        uri = mlflow_uri(config)
    except NotRunning:
        return None
    return heavy("workbench.tracking").Tracker(uri)


def _shape(text: str) -> Any:
    cells = heavy("workbench.sweeps.cells")
    parts = text.lower().split("x")
    if len(parts) != 2 or not all(part.isdigit() for part in parts):
        raise ValueError(f"a shape is prompt and output tokens as 64x32, not {text!r}")
    num_prompt_tokens, num_output_tokens = (int(part) for part in parts)
    if not (1 <= num_prompt_tokens <= MAX_TOKENS and num_output_tokens <= MAX_TOKENS):
        raise ValueError(f"a shape has 1 to {MAX_TOKENS} prompt tokens and at most as many of output, not {text!r}")
    return cells.Shape(num_prompt_tokens, num_output_tokens)


def _plain(result: Any) -> list[tuple[dict[str, Any], str | None]]:
    return [
        (cell.to_json() | {"cell_id": cell.spec.cell_id}, result.run_ids.get(cell.measurement_id))
        for cell in result.cells
    ]


def _show_cells(results: list[Any]) -> None:
    rows = []
    for result in results:
        for cell in result.cells:
            get = cell.metrics.get
            rate = get("output_tokens_per_s_per_gpu") or get("prompt_tokens_per_s_per_gpu")
            ttft_s = [(get(name), "*" if name in cell.weak else "") for name in ("ttft_s/p50", "ttft_s/p99")]
            rows.append(
                [
                    cell.model,
                    cell.spec.cell_id,
                    cell.num_requests,
                    "–" if rate is None else f"{rate:.1f}",
                    *("–" if value is None else f"{value * 1000:.0f}{mark}" for value, mark in ttft_s),
                    cell.invalid or "",
                ]
            )
        if result.mlflow_error is not None:
            err.print(f"[yellow]{result.num_pending} cells are not in MLflow yet[/] {result.mlflow_error}")
    columns = ["model", "cell", "requests", "tokens/s/GPU", "TTFT p50 ms", "TTFT p99 ms", "does not count because"]
    out.print(table("Measured", columns, rows, right=(2, 3, 4, 5)))
    out.print(WEAK_NOTE, style="dim", highlight=False)
    for result in results:
        if result.page is not None:
            out.print(f"page: {result.page}", style="dim", highlight=False, markup=False, soft_wrap=True)
        if result.page_error is not None:
            err.print(f"[yellow]page[/] {escape(result.page_error)}", highlight=False)
