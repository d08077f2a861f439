"""Measure → price → publish → route, with real processes around fake engines: only MLflow is left out."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import redis.asyncio

from serving.clock import SystemClock
from serving.control.app import ControlPlane
from serving.core.state import Pool, Replica, ReplicaState, Task
from serving.settings import ControlSettings
from serving.store.connection import connect
from serving.store.cost_table import FileCostTable, StoreCostTable
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.routing_table import StoreRoutingTable
from serving.store.server import StoreServer
from tests.integration.processes import engine_log, fake_engine, free_port, gateway_worker, until
from tests.measured import PLAN, make_replica, make_vocabulary
from workbench.costs.table import MeasuredCell, build, publish
from workbench.sweeps.cells import CellKind
from workbench.sweeps.holds import StoreHold
from workbench.sweeps.run import run_sweep

MODEL = "measured"
ENGINE = ("--model", MODEL, "--ttft-ms", "4", "--itl-ms", "2", "--prefill-ms-per-token", "0.1")


class Price:
    usd_per_hour = 0.04
    source = "test"
    date = "2026-11-01"


@dataclass
class Stand:
    """Two fake replicas of one pool, a store, a control plane and a gateway worker."""

    store: redis.asyncio.Redis
    gateway_url: str
    engines: tuple[str, str]
    folder: Path

    @property
    def tables(self) -> StoreRoutingTable:
        return StoreRoutingTable(self.store)


def pool_of(urls: tuple[str, str]) -> Pool:
    return Pool(f"{MODEL}-cpu", MODEL, "1", Task.GENERATE, "cpu", 0.04, 2048, "engine-1", "hardware-1",
                tuple(Replica(f"{MODEL}-cpu-{i}", url, ReplicaState.READY) for i, url in enumerate(urls)))  # fmt: skip


@asynccontextmanager
async def repeating(step: Callable[[], Awaitable[object]], every_s: float) -> AsyncIterator[None]:
    async def run() -> None:
        while True:
            await step()
            await asyncio.sleep(every_s)

    task = asyncio.create_task(run())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


@pytest.fixture
async def stand(tmp_path: Path) -> AsyncIterator[Stand]:
    async with AsyncExitStack() as stack:
        # A socket's path holds 107 bytes: pytest's own folders can be longer.
        server = StoreServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wb-"))))
        await server.start()
        stack.push_async_callback(server.stop)
        client = await stack.enter_async_context(aclosing(connect(server.url)))
        one = await stack.enter_async_context(fake_engine(tmp_path, *ENGINE))
        two = await stack.enter_async_context(fake_engine(tmp_path, *ENGINE))
        pool, reports, clock = pool_of((one, two)), ReplicaReports(client), SystemClock()

        async def report() -> None:
            await reports.publish_pool(pool)
            for replica in pool.replicas:
                await reports.publish(ReplicaReport(pool.pool_id, replica, None, clock.now_s()))

        settings = ControlSettings(redis_url=server.url, routing_table_path=tmp_path / "table.json")
        plane = ControlPlane(settings, client, registry=None, tokens_per_byte={}, clock=clock)
        await report()
        await plane.step()
        await stack.enter_async_context(repeating(report, 0.5))
        await stack.enter_async_context(repeating(plane.step, 0.2))
        port = free_port()
        env = {"WORKBENCH_GATEWAY_REDIS_URL": server.url, "WORKBENCH_GATEWAY_METRICS_DIR": str(tmp_path)}
        await stack.enter_async_context(gateway_worker(port, tmp_path / "gateway.log", env))
        yield Stand(client, f"http://127.0.0.1:{port}", (one, two), tmp_path)


async def test_a_replica_is_measured_alone_and_its_prices_reach_the_router(stand: Stand) -> None:
    replica = replace(
        make_replica(stand.engines[0], MODEL, gateway_url=stand.gateway_url),
        replica_id=f"{MODEL}-cpu-0",
        request_model=MODEL,
    )
    result = await run_sweep(
        replace(PLAN, concurrencies=(4,)),
        replica,
        vocabulary=make_vocabulary(stand.folder / "weights"),
        results_dir=stand.folder / "results",
        hold=StoreHold(stand.store, stand.tables, replica, owner="a test", clock=SystemClock()),
    )
    assert [cell.invalid for cell in result.cells] == [None] * 4
    assert result.cells[-1].spec.kind is CellKind.GATEWAY
    assert await engine_log(stand.engines[1]) == []

    table = build([MeasuredCell(cell, "run-1") for cell in result.cells], {"cpu": Price()})
    assert [row.target for row in table.rows] == ["engine", "gateway"]
    sinks = [StoreCostTable(stand.store), FileCostTable(stand.folder / "cost.json")]
    published = await publish(table.rows, "table-1", sinks, now_s=SystemClock().now_s())

    async def taken_up() -> bool:
        routed = await stand.tables.read()
        return routed is not None and routed.cost_table_run_id == "table-1" and routed.cost_rows == published.rows

    await until(taken_up, "the control plane to take the cost table up", 5.0)
