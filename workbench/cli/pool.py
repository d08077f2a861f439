"""`workbench pool`: start and end pools of the running stack."""

from __future__ import annotations

import asyncio
import time
from typing import Annotated

import typer

from serving.core.state import ReplicaState
from serving.store import wanted_pools
from serving.store.connection import connect
from serving.store.replicas import ReplicaReports
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, run, settings, table
from workbench.cli.exits import CommandFailed, Exit
from workbench.wiring import store_url

app = typer.Typer(no_args_is_help=True, help="Pools: replicas of one model on one hardware class.")
CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE)
PoolArgument = Annotated[str, typer.Argument(help="A pool of workbench.yaml.")]
TimeoutOption = Annotated[float, typer.Option(help="Seconds to wait.", min=0)]


@app.command("list", epilog=epilog("workbench pool list", "workbench pool list --json"))
def list_pools(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows the pools of workbench.yaml."""
    loaded = settings(config)
    data = [
        {
            "pool": pool.pool_id,
            "model": pool.model,
            "hardware": pool.hardware,
            "replicas": pool.replicas,
            "start": pool.start.value,
            "launcher": pool.launcher.value,
            "zone": pool.zone,
        }
        for pool in loaded.pools
    ]
    columns = list(data[0]) if data else ["pool"]
    emit(data, as_json, lambda: out.print(table(None, columns, [list(row.values()) for row in data])))


@app.command(epilog=epilog("workbench pool start all-minilm-l6-v2-cpu", codes=CODES))
def start(
    pool: PoolArgument, timeout_s: TimeoutOption = 300.0, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Starts a pool of the running stack and waits until one of its replicas is ready."""
    run(_wish(config, pool, True, timeout_s))
    emit({"pool": pool, "state": "ready"}, as_json, lambda: out.print(f"{pool} is ready"))


@app.command(epilog=epilog("workbench pool stop all-minilm-l6-v2-cpu", codes=CODES))
def stop(
    pool: PoolArgument, timeout_s: TimeoutOption = 60.0, config: ConfigOption = None, as_json: JsonOption = False
) -> None:
    """Drains and ends a pool of the running stack."""
    run(_wish(config, pool, False, timeout_s))
    emit({"pool": pool, "state": "ended"}, as_json, lambda: out.print(f"{pool} has ended"))


async def _wish(config_path: ConfigOption, pool_id: str, to_run: bool, timeout_s: float) -> None:
    loaded = settings(config_path)
    loaded.pool(pool_id)
    client = connect(store_url(loaded))
    try:
        await wanted_pools.ask(client, pool_id, to_run)
        deadline_s = time.monotonic() + timeout_s
        with err.status(f"waiting for {pool_id} to {'be ready' if to_run else 'end'}"):
            while await _is_ready(ReplicaReports(client), pool_id) is not to_run:
                if time.monotonic() > deadline_s:
                    raise CommandFailed(f"{pool_id} did not get there within {timeout_s:g} s: see `workbench logs`")
                await asyncio.sleep(0.25)
    finally:
        await client.aclose()


async def _is_ready(reports: ReplicaReports, pool_id: str) -> bool:
    found = [report for report in (await reports.all()).values() if report.pool_id == pool_id]
    return any(report.replica.state is ReplicaState.READY for report in found)
