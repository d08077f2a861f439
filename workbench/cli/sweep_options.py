"""Options of `workbench sweep` that bound it, and what `--dry-run` prints."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.common import MAX_SECONDS, number, out, table

MAX_USD = 1_000_000.0
MAX_AGE_HOURS = 10 * 365 * 24.0

DryRunOption = Annotated[
    bool, typer.Option("--dry-run", help="Print the cells, their minutes and what they cost; measure nothing.")
]
MaxAgeOption = Annotated[
    float | None,
    typer.Option(
        help="Measure cells again that are older; 0 measures all. 15 days when left out.",
        min=0,
        max=MAX_AGE_HOURS,
        callback=number,
    ),
]
ParallelOption = Annotated[
    bool,
    typer.Option(
        "--parallel", help="Sweep models side by side: those whose replicas share no core, a core for each client."
    ),
]
ResumeOption = Annotated[
    bool, typer.Option("--resume/--no-resume", help="Keep finished cells of an earlier run, or measure all anew.")
]
BudgetMinutesOption = Annotated[
    float | None,
    typer.Option(
        help="Minutes of measuring, of each model; a cell that does not fit waits for the next run.",
        min=0.01,
        max=MAX_SECONDS / 60,
        callback=number,
    ),
]
BudgetUsdOption = Annotated[
    float | None,
    typer.Option(help="The same in money, by the price of the hardware.", min=0.000001, max=MAX_USD, callback=number),
]
SaturationOption = Annotated[
    bool,
    typer.Option(
        "--stop-at-saturation/--measure-all",
        help="Skip higher concurrencies once more users bring no tokens and the SLO is broken.",
    ),
]


def show_previews(previews: list[Any]) -> None:
    """The cells of each sweep and what they take."""
    rows = []
    for one in previews:
        left_out = {estimate.spec.cell_id for estimate in one.over_budget}
        for estimate in one.to_measure:
            spec = estimate.spec
            about = f"{'~' if estimate.is_assumed else ''}{estimate.seconds:.0f}"
            note = "over the budget" if spec.cell_id in left_out else ""
            rows.append([one.model, spec.cell_id, spec.num_requests, about, note])
        rows += [[one.model, spec.cell_id, spec.num_requests, "0", "kept from before"] for spec in one.kept]
    out.print(table("Would measure", ["model", "cell", "requests", "seconds", ""], rows, right=(2, 3)))
    for one in previews:
        count = len(one.to_measure) - len(one.over_budget)
        assumed = f"; ~ of {one.num_assumed} cells nothing alike was measured" if one.num_assumed else ""
        out.print(
            f"{one.model} on {one.replica_id}: {count} cells, about {one.seconds / 60:.1f} minutes, "
            f"${one.usd:.4f}{assumed}",
            highlight=False,
        )
