"""A gateway worker with everything on, before fake engines: what benchmarks of the gateway measure.

Real parts, each a process: engines, store, worker. The routing table, cost table and tenants are published as the
control plane does it; a reporter here does the supervisors' part. What a worker keeps per request is on: one tenant
with a key and every kind of limit, default guardrails, usage events, 1 % of the decision records.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Collection, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks.processes import child, free_port, until
from serving.clock import SystemClock
from serving.core.state import CostRow, Model, Pool, Replica, ReplicaState, RoutingTable, Task
from serving.core.tenancy import ApiKey, Limits, Tenant, TenantDirectory
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from serving.settings import GatewaySettings
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.connection import connect
from serving.store.cost_table import PublishedCostTable, StoreCostTable
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.routing_table import StoreRoutingTable
from serving.store.server import StoreServer
from serving.store.tenants import StoreTenantDirectory

MODEL = "fake-model"
REPORT_EVERY_S = 0.5
# Every kind is set, so that every kind is checked; none is ever reached.
ROOMY = Limits(
    requests_per_minute=10**9,
    tokens_per_minute=10**12,
    tokens_per_day=10**15,
    max_streams=10**6,
    usd_per_request=10.0,
    usd_per_hour=10.0**6,
)


@dataclass(frozen=True, slots=True)
class Front:
    """A running gateway worker, its key, and the processes around it."""

    url: str
    pid: int
    api_key: str
    store_pid: int
    store_url: str
    log: Path


@asynccontextmanager
async def fake_engine(folder: Path, name: str, *options: str) -> AsyncIterator[tuple[str, int]]:
    """A fake engine as a process; yields its URL and its pid."""
    port_file = folder / f"{name}.port"
    arguments = ["serving.engine.fake", "--port-file", str(port_file), "--log-limit", "1000", *options]
    async with child(arguments, folder / f"{name}.log") as pid:
        await until(lambda: asyncio.to_thread(port_file.exists), f"engine {name} to listen", folder / f"{name}.log")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}", pid


@asynccontextmanager
async def gateway(
    folder: Path,
    engines: Mapping[str, Sequence[str]],
    *,
    limits: Limits = ROOMY,
    settings: Mapping[str, str] | None = None,
    max_model_len: int = 4096,
    embedders: Collection[str] = (),
) -> AsyncIterator[Front]:
    """A worker before `engines` (model to URLs), with a store of its own; yields once it serves them all.

    Settings that this gateway does not know are left out, so that a benchmark also runs on one without the feature.
    Models in `embedders` embed, the others generate.
    """
    tasks = {model: Task.EMBED if model in embedders else Task.GENERATE for model in engines}
    pools = [_pool(model, task, engines[model], max_model_len) for model, task in tasks.items()]
    async with AsyncExitStack() as parts:
        store = StoreServer(folder / "store")
        await store.start()
        parts.push_async_callback(store.stop)
        api_key = await _publish(store.url, pools, limits)
        reporter = asyncio.create_task(_report(store.url, pools))
        parts.callback(reporter.cancel)
        port, log = free_port(), folder / "gateway.log"
        env = known_settings({**_everything(folder), **(settings or {}), "REDIS_URL": store.url})
        worker = ["serving.gateway", "--port", str(port)]
        pid = await parts.enter_async_context(child(worker, log, "GATEWAY", env))
        url = f"http://127.0.0.1:{port}"
        await until(lambda: _serves(url, api_key, set(engines)), "the gateway to serve", log)
        yield Front(url, pid, api_key, store.pid or 0, store.url, log)


def _everything(folder: Path) -> dict[str, str]:
    """Settings under which a worker does all that it can per request."""
    return {
        "AUTH": "required",
        "CACHE_SALT_SECRET": "benchmark",
        "TENANTS_PATH": str(folder / "tenants.json"),
        "ROUTING_TABLE_PATH": str(folder / "table.json"),
        "METRICS_DIR": str(folder / "metrics"),
        "DECISION_LOG_PATH": str(folder / "decisions"),
        "DECISION_LOG_FRAC": "0.01",
        "USAGE_DIR": str(folder / "usage"),
        "REPLAY_SECRET": "benchmark",
    }


def known_settings(settings: Mapping[str, str]) -> dict[str, str]:
    """Those that this gateway has."""
    known = {name.upper() for name in GatewaySettings.model_fields}
    return {name: value for name, value in settings.items() if name in known}


def _pool(model: str, task: Task, urls: Sequence[str], max_model_len: int) -> Pool:
    replicas = tuple(Replica(f"{model}-{i}", url, ReplicaState.READY) for i, url in enumerate(urls))
    return Pool(
        pool_id=model,
        model=model,
        version="1",
        task=task,
        hardware_class="cpu",
        usd_per_hour=0.1,
        max_model_len=max_model_len,
        engine_fingerprint="fake",
        hardware_fingerprint="fake",
        replicas=replicas,
    )


async def _publish(store_url: str, pools: Sequence[Pool], limits: Limits) -> str:
    """Puts everything that a worker takes up into the store; returns the tenant's key."""
    key_id, now_s = new_key_id(), time.time()
    api_key = new_key(key_id)
    tenant = Tenant("benchmark", models=("*",), limits=limits)
    kept = ApiKey(key_id, tenant.tenant_id, key_sha256(api_key), now_s, limits=limits)
    models = tuple(Model(pool.model, pool.task, "1", ("1",), tokens_per_byte=0.25) for pool in pools)
    rows = tuple(_cost_row(pool, now_s) for pool in pools)
    client = connect(store_url)
    try:
        table = RoutingTable(1, now_s, models, tuple(pools), rows, cost_table_run_id="benchmark")
        await StoreRoutingTable(client).publish(table)
        await StoreCostTable(client).publish(PublishedCostTable("benchmark", rows, now_s))
        await StoreTenantDirectory(client).publish(TenantDirectory(1, now_s, (tenant,), (kept,)))
        for pool in pools:
            await ReplicaReports(client).publish_pool(replace(pool, replicas=()))
    finally:
        await client.aclose()
    return api_key


def _cost_row(pool: Pool, now_s: float) -> CostRow:
    return CostRow(
        model=pool.model,
        version="1",
        task=pool.task,
        hardware_class="cpu",
        engine_fingerprint="fake",
        hardware_fingerprint="fake",
        num_prompt_tokens=128,
        num_output_tokens=128,
        concurrency=1,
        output_tokens_per_s_per_gpu=None,
        prefill_tokens_per_s_per_gpu=None,
        ttft_p50_s=None,
        ttft_p99_s=None,
        tpot_p50_s=None,
        tpot_p99_s=None,
        usd_per_million_input_tokens=0.1,
        usd_per_million_cached_input_tokens=None,
        usd_per_million_output_tokens=1.0,
        provenance="measured",
        measured_at_s=now_s,
        expires_at_s=now_s + 86400.0,
        mlflow_run_id="benchmark",
    )


async def _report(store_url: str, pools: Sequence[Pool]) -> None:
    """What a supervisor does: scrapes its replicas and publishes what it saw."""
    redis, clock = connect(store_url), SystemClock()
    reports = ReplicaReports(redis)
    clients = {replica.url: EngineClient(replica.url) for pool in pools for replica in pool.replicas}
    try:
        while True:
            for pool in pools:
                for replica in pool.replicas:
                    snapshot = await scrape(clients[replica.url], replica.replica_id, clock)
                    await reports.publish(ReplicaReport(pool.pool_id, replica, snapshot, clock.now_s()))
            await asyncio.sleep(REPORT_EVERY_S)
    finally:
        for client in clients.values():
            await client.close()
        await redis.aclose()


async def _serves(url: str, api_key: str, models: set[str]) -> bool:
    headers = [(b"authorization", b"Bearer " + api_key.encode())]
    async with EngineClient(url) as client:
        response = await client.request("GET", "/v1/models", headers=headers, timeout_s=5.0)
        page = (await response.read()).decode()
    return all(f'"{model}"' in page for model in models)
