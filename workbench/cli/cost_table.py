"""`workbench cost-table`: from measured cells to the prices that the router reads."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict
from typing import Annotated, Any

import typer

from serving.core.errors import ServingError
from serving.core.state import CostRow, RoutingTable
from serving.store.connection import connect
from serving.store.cost_table import FileCostTable, PublishedCostTable, StoreCostTable
from serving.store.routing_table import FileRoutingTable, StoreRoutingTable
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, heavy, number, out, run, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.figures import WEAK_NOTE, cost_figures
from workbench.cli.status import show_due
from workbench.config import WorkbenchConfig
from workbench.costs.due import PUBLISH, measurements_due
from workbench.wiring import NotRunning, layout, mlflow_uri, store_url

app = typer.Typer(no_args_is_help=True, help="The cost table: what a token costs, as measured.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE, Exit.MISSING)
DAY_S = 86400.0
MAX_EXPIRES_DAYS = 3650


@app.command(
    epilog=epilog(
        "workbench cost-table build",
        "workbench cost-table build --model smollm2-135m --expires-days 7 --publish",
        codes=CODES,
    )
)
def build(
    model: Annotated[list[str] | None, typer.Option(help="Only this model's cells; may be repeated.")] = None,
    expires_days: Annotated[
        float, typer.Option(help="Days for which a measurement counts.", min=0, max=MAX_EXPIRES_DAYS, callback=number)
    ] = 30.0,
    publish: Annotated[bool, typer.Option("--publish", help="Publish it to the router at once.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Builds the table from the newest valid cells in MLflow and logs it there as a run of `cost-tables`."""
    loaded = settings(config)
    tracker = heavy("workbench.tracking").Tracker(mlflow_uri(loaded))
    err.print("reading measured cells from MLflow", highlight=False)
    broken = _log_pending(loaded, tracker)
    built = heavy("workbench.costs.table").build(
        tracker.cells(model, on_broken=broken.append), loaded.hardware, expires_in_s=expires_days * DAY_S
    )
    for cell in built.skipped:
        err.print(f"left out {cell.model} {cell.cell_id}: {cell.reason}", highlight=False, markup=False)
    expired = [age for age in heavy("workbench.costs.table").ages(built.rows, time.time()) if age.expires_in_s <= 0]
    _warn_of_expired(len(expired), len(built.rows))
    if not built.rows:
        lacks = "" if not broken else "; results cannot be read:\n" + "\n".join(broken)
        raise CommandFailed(f"no cell gives a row: measure first with `workbench sweep MODEL`{lacks}")
    run_id = tracker.log_cost_table(built)
    if publish:
        run(_publish(loaded, built.rows, run_id))
    data = {"run_id": run_id, "published": publish, "rows": _plain(built.rows)}
    data["skipped"] = [asdict(cell) for cell in built.skipped]
    emit(data, as_json, lambda: _show(data["rows"], f"run {run_id}" + (", published" if publish else "")))
    if broken:
        raise CommandFailed("the table lacks results that cannot be read:\n" + "\n".join(broken))


@app.command(epilog=epilog("workbench cost-table publish", "workbench cost-table publish RUN_ID --json", codes=CODES))
def publish(
    run_id: Annotated[str | None, typer.Argument(help="A run of `cost-tables`; the newest when left out.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Publishes a table that was built; the gateway routes by it within seconds, without a restart."""
    loaded = settings(config)
    found, rows = _logged_table(loaded, run_id)
    run(_publish(loaded, rows, found))
    emit(
        {"run_id": found, "num_rows": len(rows)},
        as_json,
        lambda: out.print(f"{len(rows)} rows of run {found} published"),
    )


@app.command(epilog=epilog("workbench cost-table show", "workbench cost-table show --run RUN_ID --json", codes=CODES))
def show(
    run_id: Annotated[
        str | None, typer.Option("--run", help="A run of `cost-tables` instead of what is published.")
    ] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows the published table with each row's age and whether it counts, and the pools that need a measurement."""
    loaded = settings(config)
    if run_id is not None:
        found, rows = _logged_table(loaded, run_id)
        plain = _plain(rows)
        emit({"run_id": found, "rows": plain}, as_json, lambda: _show(plain, f"run {found}"))
        return
    published, routing = run(_published(loaded))
    now_s = time.time()
    due = [] if routing is None else measurements_due(routing, now_s)
    if published is None:
        measure = "" if not due else "; measure first: " + ", ".join(pool.command for pool in due)
        raise CommandFailed(f"no cost table is published: {PUBLISH}{measure}", Exit.UNAVAILABLE)
    aged = [_aged(row, now_s) for row in published.rows]
    _warn_of_expired(sum(row["state"] == "expired" for row in aged), len(aged))
    data = {"run_id": published.run_id, "age_s": now_s - published.published_at_s, "rows": aged}
    data["measurements_due"] = [asdict(pool) for pool in due]

    def show_all() -> None:
        _show(aged, f"run {published.run_id}")
        show_due(out, due)

    emit(data, as_json, show_all)


def _log_pending(config: WorkbenchConfig, tracker: Any) -> list[str]:
    """Brings over what waits on disk; returns what cannot be read there, which holds up nothing else."""
    try:
        tracker.log_pending(layout(config).results_dir)
    except heavy("workbench.sweeps.results").ResultsBroken as error:
        return str(error).splitlines()
    return []


def _logged_table(config: WorkbenchConfig, run_id: str | None) -> tuple[str, Sequence[Any]]:
    tracker = heavy("workbench.tracking").Tracker(mlflow_uri(config))
    try:
        found: tuple[str, Sequence[Any]] = tracker.cost_table(run_id)
    except heavy("workbench.sweeps.results").ResultsBroken as error:
        raise CommandFailed(str(error)) from None
    return found


async def _publish(config: WorkbenchConfig, rows: Sequence[Any], run_id: str) -> None:
    publish_rows = heavy("workbench.costs.table").publish
    async with AsyncExitStack() as stack:
        client = connect(store_url(config))
        stack.push_async_callback(client.aclose)
        sinks = [StoreCostTable(client), FileCostTable(layout(config).cost_table_path)]
        await publish_rows(rows, run_id, sinks, now_s=time.time())


def _warn_of_expired(num_expired: int, num_rows: int) -> None:
    if num_expired:
        err.print(f"[yellow]{num_expired} of {num_rows} rows have expired[/] and route nothing: measure again")


async def _published(config: WorkbenchConfig) -> tuple[PublishedCostTable | None, RoutingTable | None]:
    """The cost table, and the routing table that has the pools: the store's word, else the files'."""
    where = layout(config)
    try:
        client = connect(store_url(config))
        try:
            found = await StoreCostTable(client).read()
            routing = await StoreRoutingTable(client).read()
        finally:
            await client.aclose()
        if found is not None:
            return found, routing
    except (NotRunning, ServingError) as error:
        err.print(f"[yellow]from the file[/] {error}")
        routing = await FileRoutingTable(where.routing_table_path).read()
    return await FileCostTable(where.cost_table_path).read(), routing


def _aged(row: CostRow, now_s: float) -> dict[str, Any]:
    left_s = row.expires_at_s - now_s
    return asdict(row) | {"age_s": now_s - row.measured_at_s, "state": "fresh" if left_s > 0 else "expired"}


def _plain(rows: Sequence[Any]) -> list[dict[str, Any]]:
    return [asdict(row) for row in rows]


def _show(rows: Sequence[dict[str, Any]], title: str) -> None:
    columns, figures, right = cost_figures(rows)
    out.print(table(f"Cost table: {title}", columns, figures, right=right))
    out.print(WEAK_NOTE, style="dim", highlight=False)
