"""What `workbench status` shows, read from the state file and the store."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console

from serving.control.app import ControlHealth, control_health
from serving.core.errors import ServingError
from serving.core.state import RoutingTable
from serving.store.connection import connect
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.reservations import reservations
from serving.store.routing_table import StoreRoutingTable
from workbench.cli.common import table
from workbench.costs.due import PUBLISH, MeasurementDue, measurements_due
from workbench.stack.state import StackState
from workbench.wiring import NotRunning


@dataclass(frozen=True, slots=True)
class Seen:
    """What the store says; `trouble` says why it says nothing."""

    reports: tuple[ReplicaReport, ...] = ()
    reserved: tuple[tuple[str, str], ...] = ()
    routing_table: RoutingTable | None = None
    control: ControlHealth | None = None
    trouble: str | None = None


async def look(state: StackState) -> Seen:
    """Reads the store once; a dead one is part of the answer.

    Raises:
        NotRunning: the stack has only begun to start.
    """
    if "store" not in state.urls:
        raise NotRunning(f"the stack (pid {state.supervisor.pid}) begins to start and has no store yet: ask again")
    client = connect(state.urls["store"])
    try:
        reports = await ReplicaReports(client).all()
        return Seen(
            reports=tuple(reports[name] for name in sorted(reports)),
            reserved=tuple((await reservations(client, list(reports))).items()),
            routing_table=await StoreRoutingTable(client).read(),
            control=await control_health(client),
        )
    except ServingError as error:
        return Seen(trouble=error.message)
    finally:
        await client.aclose()


def as_data(state: StackState, seen: Seen) -> dict[str, Any]:
    """The same for programs."""
    now_s = time.time()
    published = seen.routing_table
    return {
        "supervisor": asdict(state.supervisor),
        "processes": [asdict(record) | {"running": record.is_running} for record in state.processes],
        "urls": state.urls,
        "replicas": [asdict(report) | {"age_s": now_s - report.updated_at_s} for report in seen.reports],
        "reserved": dict(seen.reserved),
        "routing_table": None
        if published is None
        else {
            "epoch": published.epoch,
            "age_s": now_s - published.published_at_s,
            "pools": [pool.pool_id for pool in published.pools],
            "num_cost_rows": len(published.cost_rows),
            "cost_table_run_id": published.cost_table_run_id,
        },
        "measurements_due": [asdict(due) for due in _due(seen, now_s)],
        "control": None if seen.control is None else asdict(seen.control),
        "trouble": seen.trouble,
    }


def show_due(console: Console, due: Sequence[MeasurementDue]) -> None:
    """Which pools are routed by load alone, and what to type."""
    if not due:
        return
    rows = [[pool.pool_id, f"{pool.model}@{pool.version}", pool.why, pool.command] for pool in due]
    columns = ["pool", "model", "no cost row counts", "measure it"]
    console.print(table("\nrouted by load alone", columns, rows))
    console.print(f"then publish: {PUBLISH}", highlight=False)


def _due(seen: Seen, now_s: float) -> list[MeasurementDue]:
    return [] if seen.routing_table is None else measurements_due(seen.routing_table, now_s)


def show(console: Console, state: StackState, seen: Seen) -> None:
    """The same for people."""
    now_s = time.time()
    rows = [
        [record.name, record.pid, "running" if record.is_running else "[red]not running[/]", record.log_path]
        for record in (state.supervisor, *state.processes)
    ]
    console.print(table("processes", ["name", "pid", "state", "log"], rows, right=(1,)))
    reserved = dict(seen.reserved)
    replicas = [
        [
            report.replica.replica_id,
            f"reserved by {reserved[report.replica.replica_id]}"
            if report.replica.replica_id in reserved
            else report.replica.state.value,
            report.snapshot.num_running if report.snapshot else None,
            report.snapshot.num_waiting if report.snapshot else None,
            f"{report.snapshot.kv_cache_usage_frac:.0%}" if report.snapshot else None,
            f"{now_s - report.updated_at_s:.1f}",
            report.error or report.replica.url,
        ]
        for report in seen.reports
    ]
    columns = ["replica", "state", "running", "waiting", "kv used", "age s", "url or error"]
    console.print(table("\nreplicas", columns, replicas, right=(2, 3, 4, 5)))
    if seen.routing_table is not None:
        published = seen.routing_table
        console.print(
            f"\nrouting table: epoch {published.epoch}, {len(published.pools)} pools, "
            f"{len(published.cost_rows)} cost rows (run {published.cost_table_run_id})"
        )
    show_due(console, _due(seen, now_s))
    if seen.control is None:
        console.print("[red]the control plane gives no sign of life[/]: the gateway serves by its last table")
    if seen.trouble:
        console.print(f"[red]store[/] {seen.trouble}")
    console.print(table("\nurls", ["what", "where"], [[name, url] for name, url in sorted(state.urls.items())]))
