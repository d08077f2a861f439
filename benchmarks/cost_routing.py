"""Whether the router follows the cost table: prices swapped and the table republished under load, then left to expire.

Two pools of one model, each a fake engine as a process, behind a real gateway worker, store and control plane. One
closed loop runs through three tables: `left` three times dearer than `right`; the prices swapped; the cheaper pool's
row expired. The split of requests and the usd per good token that the core predicts (the same policy on a virtual
clock) are held against what the engines' own logs say. The decision log of the run is replayed at the end.

Money is told three ways: by the table's prices; busy ($/h of a replica x time with a request running); provisioned
($/h x wall time). A replica's $/h is in proportion to its price. Under many streams both replicas are always busy and
only the table's money can move; under few the dear one stands idle and busy money moves too.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from benchmarks.cost_routing_model import (
    ITL_MS,
    MODEL,
    NUM_OUTPUT_TOKENS,
    NUM_PROMPT_TOKENS,
    PHASES,
    POOLS,
    REPORT_EVERY_S,
    TTFT_MS,
    Phase,
    busy_s,
    pool_of,
    predict,
    service_s,
    usd_of,
)
from benchmarks.harness import Bar, Mode, at_most, equal_to, run
from benchmarks.processes import child, free_port, until
from serving.clock import SystemClock
from serving.core.policies import routing
from serving.core.state import Replica, ReplicaState
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from serving.store.connection import connect
from serving.store.cost_table import PublishedCostTable, StoreCostTable
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.server import StoreServer
from serving.telemetry import decision_log
from workbench.loadgen import ClosedLoop, LoadResult, Prompt, Slo, Target, TargetKind, run_load

CONCURRENCIES = (24, 4)  # both pools are needed; one is enough
TAKEN_UP_WITHIN_S = 2.0
SPLIT_TOLERANCE = 0.05
USD_TOLERANCE = 0.05
SLO = Slo(ttft_s=1.0, tpot_s=0.05)


@dataclass(frozen=True, slots=True)
class Window:
    """When a phase was in force everywhere, on `time.perf_counter`, and how long its table took to be taken up."""

    phase: Phase
    start_s: float
    end_s: float
    taken_up_s: float
    expired_seen: bool


def measure(mode: Mode, console: Console) -> list[Bar]:
    """The router's choice under changing prices against the core's prediction."""
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), 8.0 if mode is Mode.QUICK else 30.0, console))


async def _measure(folder: Path, phase_s: float, console: Console) -> list[Bar]:
    bars: list[Bar] = []
    async with stack(folder) as (gateway_url, engines, redis_url):
        client = connect(redis_url)
        try:
            for concurrency in CONCURRENCIES:
                load = asyncio.create_task(_load(gateway_url, concurrency, phase_s * len(PHASES) + 15.0))
                windows = []
                for phase in PHASES:
                    console.print(f"[dim]{phase.name}: {phase_s:g} s under {concurrency} streams …")
                    windows.append(await _hold(phase, StoreCostTable(client), gateway_url, phase_s))
                result = await load
                logs = {pool: await _log(url) for pool, url in engines.items()}
                bars += [bar for window in windows for bar in _judge(window, concurrency, logs, result)]
        finally:
            await client.aclose()
    return [*bars, *_replay(folder / "decisions")]


@asynccontextmanager
async def stack(folder: Path) -> AsyncIterator[tuple[str, dict[str, str], str]]:
    """Two fake engines, store, control plane and one gateway worker; yields their URLs."""
    async with AsyncExitStack() as parts:
        store = StoreServer(folder / "store")
        await store.start()
        parts.push_async_callback(store.stop)
        engines = {pool: await parts.enter_async_context(_engine(folder, pool)) for pool in POOLS}
        reporter = asyncio.create_task(_report(store.url, engines))
        parts.callback(reporter.cancel)
        port = free_port()
        table = str(folder / "table.json")
        control = {"REDIS_URL": store.url, "ROUTING_TABLE_PATH": table}
        gateway = {**control, "DECISION_LOG_PATH": str(folder / "decisions"), "DECISION_LOG_FRAC": "1"}
        await parts.enter_async_context(child(["serving.control"], folder / "control.log", "CONTROL", control))
        worker = ["serving.gateway", "--port", str(port)]
        await parts.enter_async_context(child(worker, folder / "gateway.log", "GATEWAY", gateway))
        url = f"http://127.0.0.1:{port}"
        await until(lambda: _is_ready(url), "the gateway to know both replicas", folder / "gateway.log")
        yield url, engines, store.url


@asynccontextmanager
async def _engine(folder: Path, pool: str) -> AsyncIterator[str]:
    port_file = folder / f"{pool}.port"
    arguments = ["serving.engine.fake", "--model", MODEL, "--port-file", str(port_file), "--log-limit", "100000"]
    arguments += ["--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)]
    async with child(arguments, folder / f"{pool}.log"):
        await until(lambda: asyncio.to_thread(port_file.exists), f"engine {pool} to listen", folder / f"{pool}.log")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"


async def _report(redis_url: str, engines: dict[str, str]) -> None:
    """What a supervisor does: scrapes its replicas and publishes what it saw."""
    redis, clock = connect(redis_url), SystemClock()
    reports = ReplicaReports(redis)
    clients = {pool: EngineClient(url) for pool, url in engines.items()}
    try:
        for pool in POOLS:
            await reports.publish_pool(pool_of(pool))
        while True:
            for pool, url in engines.items():
                snapshot = await scrape(clients[pool], f"{pool}-0", clock)
                replica = Replica(f"{pool}-0", url, ReplicaState.READY)
                await reports.publish(ReplicaReport(pool, replica, snapshot, clock.now_s()))
            await asyncio.sleep(REPORT_EVERY_S)
    finally:
        for client in clients.values():
            await client.close()
        await redis.aclose()


async def _is_ready(url: str) -> bool:
    async with EngineClient(url) as client:
        response = await client.request("GET", "/metrics", timeout_s=5.0)
        page = (await response.read()).decode()
    return all(f'pool="{pool}"' in page for pool in POOLS)


async def _load(url: str, concurrency: int, duration_s: float) -> LoadResult:
    target = Target(url, f"{MODEL}@1", kind=TargetKind.GATEWAY, takes_extras=False)
    num_requests = int(concurrency * duration_s / service_s()) + concurrency
    prompts = (
        Prompt(NUM_PROMPT_TOKENS, NUM_OUTPUT_TOKENS, token_ids=tuple(rng.randrange(5000) for _ in range(32)))
        for rng in [random.Random(1)]
        for _ in range(num_requests)
    )
    arrival = ClosedLoop(concurrency)
    return await run_load(target, prompts, arrival, num_requests=num_requests, max_duration_s=duration_s)


async def _hold(phase: Phase, costs: StoreCostTable, url: str, phase_s: float) -> Window:
    """Publishes the phase's table, waits until the gateway routes by it, and holds it for `phase_s`."""
    run_id = phase.name.replace(" ", "-")
    published_s = time.perf_counter()
    await costs.publish(PublishedCostTable(run_id, phase.rows(time.time()), time.time()))
    async with EngineClient(url) as client:
        while run_id not in await _served_by(client):
            if time.perf_counter() - published_s > 30.0:
                raise RuntimeError(f"the gateway did not take up the table of phase {phase.name!r} within 30 s")
            await asyncio.sleep(0.02)
        taken_up_s = time.perf_counter() - published_s
        await asyncio.sleep(1.0)  # what was sent under the old table ends
        start_s = time.perf_counter()
        await asyncio.sleep(phase_s)
        response = await client.request("GET", "/metrics", timeout_s=5.0)
        page = (await response.read()).decode()
    sample = f'workbench_cost_rows_state{{pool="{phase.expired}",state="expired"}} 1.0'
    return Window(phase, start_s, time.perf_counter(), taken_up_s, sample in page)


async def _served_by(client: EngineClient) -> str:
    body = orjson.dumps({"model": f"{MODEL}@1", "prompt": "probe", "max_tokens": 1})
    headers = [(b"content-type", b"application/json")]
    response = await client.request("POST", "/v1/completions", headers=headers, body=body, timeout_s=10.0)
    await response.read()
    return response.headers.get(b"x-served-by", b"").decode()


async def _log(url: str) -> list[dict[str, Any]]:
    """Requests that the engine has ended, probes aside."""
    async with EngineClient(url) as client:
        log = await client.get_json("/fake/log", timeout_s=60.0)
    return [entry for entry in log if entry["num_output_tokens"] > 1]


def _judge(window: Window, concurrency: int, logs: dict[str, list[dict[str, Any]]], result: LoadResult) -> list[Bar]:
    phase, name = window.phase, f"{window.phase.name}, {concurrency} streams"
    sent = [r for r in result.records if window.start_s <= r.sent_at_s + result.started_perf_s < window.end_s]
    tokens_good = sum(record.num_output_tokens for record in sent if SLO.is_met(record))
    if not tokens_good:
        return [equal_to(f"{name}: good tokens", "none", "some")]
    served = {
        pool: [entry for entry in log if window.start_s <= entry["received_at_s"] < window.end_s]
        for pool, log in logs.items()
    }
    share = len(served["left"]) / sum(map(len, served.values()))
    length_s = window.end_s - window.start_s
    busy = {pool: busy_s(_runs(log), window.start_s, window.end_s) / length_s for pool, log in logs.items()}
    priced = sum(usd_of(phase.usd[pool], e["num_output_tokens"]) for pool in POOLS for e in served[pool]) / tokens_good
    expected = predict(phase, concurrency, seed=1)
    expected_priced = sum(expected.share[pool] * usd_of(phase.usd[pool], NUM_OUTPUT_TOKENS) for pool in POOLS)
    good_tokens_per_s, expected_per_s = tokens_good / length_s, concurrency * NUM_OUTPUT_TOKENS / service_s()
    money, expected_money = (
        phase.usd_per_s(busy) / good_tokens_per_s,
        phase.usd_per_s(expected.busy_frac) / expected_per_s,
    )
    provisioned = phase.usd_per_s(dict.fromkeys(POOLS, 1.0)) / good_tokens_per_s
    bars = [
        at_most(f"{name}: table taken up, s", window.taken_up_s, TAKEN_UP_WITHIN_S),
        Bar(f"{name}: share of left", share, f"predicted {expected.share['left']:.3f}", None),
        at_most(f"{name}: share off the prediction", abs(share - expected.share["left"]), SPLIT_TOLERANCE),
        _off(f"{name}: usd per good token by the table", priced, expected_priced / NUM_OUTPUT_TOKENS),
        Bar(f"{name}: usd_busy_per_good_token, millionths", 1e6 * money, f"predicted {1e6 * expected_money:.3g}", None),
        _off(f"{name}: usd_busy_per_good_token", money, expected_money),
        Bar(f"{name}: usd_provisioned_per_good_token, millionths", 1e6 * provisioned, "shown", None),
    ]
    if phase.expired is not None:
        bars.append(equal_to(f"{name}: seen in the metric", str(window.expired_seen), "True"))
    return bars


def _off(name: str, value: float, predicted: float) -> Bar:
    return at_most(f"{name}, off the prediction", abs(value / predicted - 1.0), USD_TOLERANCE)


def _runs(log: list[dict[str, Any]]) -> list[tuple[float, float]]:
    return [(entry["received_at_s"], entry["writes"][-1]["at_s"]) for entry in log if entry["writes"]]


def _replay(folder: Path) -> list[Bar]:
    """Every decision of the run, made again from the file."""
    records = [record for path in sorted(folder.iterdir()) for record in decision_log.read(path)]
    changed = sum(routing.replay(record) != record.decision for record in records)
    return [equal_to(f"decisions of {len(records)} that replay differently", changed, 0)]


if __name__ == "__main__":
    sys.exit(run("cost_routing", measure))
