"""`workbench compare`: is B better than A, by what was measured of both?"""

from __future__ import annotations

from typing import Annotated, Any

import typer

from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, heavy, out, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.wiring import NotRunning, layout, mlflow_uri

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.MISSING)
A_HELP = "The baseline: a sweep's digest or folder, a cell's JSON file, an MLflow run id."


def add_to(app: typer.Typer) -> None:
    """Adds the command."""
    app.command(
        epilog=epilog(
            "workbench compare 3f2a91c0 9b1c77de --allow engine",
            "workbench compare 3f2a91c0 9b1c77de --metric ttft_s/p50 --by-cell",
            "workbench compare accepted/ tonight/ --allow separate --fail-on-worse --json",
            codes=CODES,
        )
    )(compare)


def compare(
    baseline: Annotated[str, typer.Argument(metavar="A", help=A_HELP)],
    candidate: Annotated[str, typer.Argument(metavar="B", help="What is set against it, named in the same ways.")],
    metric: Annotated[
        list[str] | None,
        typer.Option(help="A metric instead of throughput and the medians of TTFT and TPOT; may be repeated."),
    ] = None,
    allow: Annotated[
        list[str] | None,
        typer.Option(
            help="Accept that they differ in `hardware`, `engine`, `model` or `tool`, or were run as `separate` series."
        ),
    ] = None,
    by_cell: Annotated[bool, typer.Option("--by-cell", help="A verdict for each cell, not one for all.")] = False,
    fail_on_worse: Annotated[bool, typer.Option("--fail-on-worse", help="Exit with 1 when B is worse.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Compares repeated runs of A and B, pair by pair: ratio, interval, and better, worse or no difference seen."""
    loaded = settings(config)
    comparison = heavy("workbench.comparison.cells")
    sides = [measured_cells(loaded, reference) for reference in (baseline, candidate)]
    try:
        allowed = [comparison.Difference(name) for name in allow or []]
        result = comparison.compare_cells(*sides, metrics=metric, allow=allowed, by_cell=by_cell)
    except comparison.NotComparable as error:
        option = "" if error.difference is None else f" (--allow {error.difference.value})"
        raise CommandFailed(f"{error}{option}") from None
    except ValueError as error:
        raise CommandFailed(str(error), Exit.USAGE) from None
    emit(result.to_json(), as_json, lambda: show_comparison(result))
    if not result.has_verdict:
        raise CommandFailed("nothing could be compared; the reasons stand above")
    if fail_on_worse and result.is_worse:
        raise CommandFailed("B is worse than A")


def measured_cells(config: WorkbenchConfig, reference: str) -> Any:
    """The cells on disk by that name, else in MLflow if there is one.

    Raises:
        CommandFailed: nothing goes by that name, or a file cannot be read.
    """
    kept = heavy("workbench.sweeps.kept_results")
    results_dir = layout(config).results_dir
    try:
        try:
            return kept.find_cells(reference, results_dir)
        except kept.ResultNotFound:
            tracker = _tracker(config)
            if tracker is None:
                raise
            return kept.find_cells(reference, results_dir, tracker)
    except (kept.ResultNotFound, heavy("workbench.sweeps.results").ResultsBroken) as error:
        raise CommandFailed(str(error)) from None


def _tracker(config: WorkbenchConfig) -> Any:
    try:
        return heavy("workbench.tracking").Tracker(mlflow_uri(config))
    except NotRunning:
        return None


def show_comparison(result: Any) -> None:
    """The verdicts as a table, and what a reader must know beside them."""
    rows = []
    for outcome in result.outcomes:
        cell = outcome.cell_id or "all cells"
        for one in outcome.compared:
            interval = f"{one.ratio:.4f} ({one.low:.4f} – {one.high:.4f})"
            rows.append(
                [cell, one.metric, one.num_pairs, f"{one.baseline:.4g}", f"{one.candidate:.4g}", interval, str(one)]
            )
        for name, refusal in outcome.refused.items():
            rows.append([cell, name, outcome.num_pairs, "–", "–", "–", f"no verdict: {refusal}"])
    columns = ["cell", "metric", "pairs", "A", "B", "B / A (interval)", "B is"]
    out.print(table("Compared", columns, rows, right=(2, 3, 4)))
    left_out = [
        f"{outcome.cell_id or 'all cells'}: {outcome.num_invalid} pairs with a cell that does not count, "
        f"{outcome.num_single} runs without a partner"
        for outcome in result.outcomes
        if outcome.num_invalid or outcome.num_single
    ]
    for line in (*result.notes, *left_out):
        out.print(line, style="dim", highlight=False, markup=False)
