"""`workbench slo-search`: the highest load of a replica that keeps the SLO, to 5 %."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.common import (
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
    loaded, searching = settings(config), heavy("workbench.slo.on_stack")
    wish = searching.SloWish(
        model, load, start, highest, prompt_tokens, output_tokens, ttft_p99_s, tpot_p99_s, served_within, requests,
        cells, max_cell_seconds, replica,
    )  # fmt: skip
    answer = run(_search(loaded, wish, resume))
    run_id, trouble = searching.log_answer(loaded, model, answer)
    if trouble is not None:
        err.print(f"[yellow]not in MLflow[/] {trouble}")
    data = answer.to_json() | {"folder": str(answer.folder), "mlflow_run_id": run_id}
    emit(data, as_json, lambda: _show(answer))
    if answer.capacity.load is None:
        raise CommandFailed(answer.capacity.reason)


async def _search(config: WorkbenchConfig, wish: Any, resume: bool) -> Any:
    searching, holds = heavy("workbench.slo.on_stack"), heavy("workbench.sweeps.holds")
    try:
        return await searching.search_on_stack(
            config,
            wish,
            is_resumed=resume,
            on_step=lambda step: err.print(f"{wish.model} {searching.told(step)}", highlight=False),
        )
    except heavy("serving.store.reservations").ReplicaReserved as error:
        raise CommandFailed(error.message, Exit.CONFLICT) from None
    except searching.UnclearWish as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    except (
        holds.NotHeld,
        heavy("workbench.slo.searching").ClientTooSlow,
        heavy("workbench.loadgen").WorkloadError,
    ) as error:
        raise CommandFailed(str(error)) from None


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
