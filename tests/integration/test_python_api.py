"""What notebooks call, and notebook 01 itself, on a small stack: store, control plane, MLflow, a fake engine.

The stack lives in this test's event loop; what blocks runs in a thread, as it would in a notebook's kernel.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import dedent

import nbformat
import pytest

import workbench
from serving.clock import SystemClock
from serving.control.app import ControlPlane
from serving.core.errors import NotFound
from serving.core.state import Pool, Replica, ReplicaState, Task
from serving.engine.fake import FakeEngine
from serving.settings import ControlSettings
from serving.store.connection import connect
from serving.store.replicas import ReplicaReport, ReplicaReports
from serving.store.reservations import ReplicaReserved, reservations, reserve
from serving.store.routing_table import StoreRoutingTable
from serving.store.server import StoreServer
from tests.measured import FAST, make_vocabulary
from workbench.benchmark.result import BenchResult
from workbench.plots import throughput
from workbench.report import run_report
from workbench.stack.state import PoolFacts, ProcessRecord, StackState
from workbench.sweeps.finished import Sweep
from workbench.tracking import Tracker
from workbench.wiring import layout

ROOT = Path(__file__).parents[2]
MODEL = "api-model"
REPLICA = f"{MODEL}-cpu-0"
POOL = Pool(
    pool_id=f"{MODEL}-cpu",
    model=MODEL,
    version="1",
    task=Task.GENERATE,
    hardware_class="cpu",
    usd_per_hour=0.04,
    max_model_len=2048,
    engine_fingerprint="engine-1",
    hardware_fingerprint="hardware-1",
    replicas=(),
)
QUICK = {"concurrencies": (1, 4), "num_prompt_tokens": 48, "num_output_tokens": 16}


@dataclass
class SmallStack:
    """What runs, and where its configuration lies."""

    folder: Path
    store: StoreServer

    @property
    def config_file(self) -> Path:
        return self.folder / "workbench.yaml"


@pytest.fixture
async def stack(mlflow_uri: str) -> AsyncIterator[SmallStack]:
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        small = SmallStack(Path(name), StoreServer(Path(name) / "store"))
        write_config(small, mlflow_uri)
        await small.store.start()
        client = connect(small.store.url)
        async with FakeEngine(FAST.model_copy(update={"model": MODEL})) as engine:
            settings = ControlSettings(redis_url=small.store.url, compose_poll_s=0.1)
            plane = ControlPlane(settings, client, registry=None, tokens_per_byte={}, clock=SystemClock())
            tasks = [
                asyncio.create_task(plane.run(asyncio.Event())),
                asyncio.create_task(supervise(ReplicaReports(client), engine.url)),
            ]
            try:
                await until_ready(StoreRoutingTable(client))
                yield small
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
                await client.aclose()
                await small.store.stop()


def write_config(small: SmallStack, mlflow_uri: str) -> None:
    small.config_file.write_text(
        dedent(f"""
        models: {{{MODEL}: {{source: "pypi:none==0", task: generate}}}}
        pools: [{{model: {MODEL}, hardware: cpu, launcher: fake}}]
        stores: {{mlflow_tracking_uri: "{mlflow_uri}"}}
        """)
    )
    make_vocabulary(small.folder / "weights")
    supervisor = ProcessRecord.of("supervisor", os.getpid())
    assert supervisor is not None
    facts = PoolFacts(str(small.folder / "weights"), {"engine": "fake"}, {"device": "none"}, {})
    state = StackState(supervisor, urls={"store": small.store.url}, pools={POOL.pool_id: facts})
    layout(workbench.connect(small.config_file).config).state_file.write(state)


async def supervise(reports: ReplicaReports, url: str) -> None:
    await reports.publish_pool(POOL)
    while True:
        replica = Replica(REPLICA, url, ReplicaState.READY)
        await reports.publish(ReplicaReport(POOL.pool_id, replica, None, SystemClock().now_s()))
        await asyncio.sleep(0.25)


async def until_ready(tables: StoreRoutingTable) -> None:
    async with asyncio.timeout(10):
        while True:
            table = await tables.read()
            if table is not None and table.pools and table.pools[0].replicas:
                return
            await asyncio.sleep(0.05)


async def sweep(**arguments: object) -> Sweep:
    return await asyncio.to_thread(workbench.sweep, MODEL, **(QUICK | arguments))  # type: ignore[arg-type]


async def test_a_sweep_is_measured_held_logged_priced_and_told(
    stack: SmallStack, capsys: pytest.CaptureFixture[str]
) -> None:
    held: set[str] = set()

    async def watch() -> None:
        client = connect(stack.store.url)
        while True:
            held.update((await reservations(client, [REPLICA])).values())
            await asyncio.sleep(0.05)

    watching = asyncio.create_task(watch())
    swept = await sweep()
    watching.cancel()

    assert swept.run_id is not None
    assert swept.result.mlflow_error is None
    assert list(swept.cells["kind"]) == ["prefill", "cached", "mixed", "mixed"]
    assert swept.cells["invalid"].isna().all()
    assert [owner.split(" (")[0] for owner in held] == [f"sweep of {MODEL}"]
    assert "[4/4] mixed-48x16-c4: " in capsys.readouterr().out

    costs = swept.cost_table()
    assert list(costs["concurrency"]) == [1, 4]
    assert (costs["usd_per_million_output_tokens"] > 0).all()
    text = swept.conclusion()
    assert f"{MODEL}@1 on 1 x cpu" in text
    assert "within the SLO" in text and "a million output tokens costs $" in text
    assert f"MLflow run {swept.run_id}" in repr(swept)
    assert len(throughput(swept.cells).data) == 1
    assert "slo_good_frac" in swept.overview().columns

    cells = await asyncio.to_thread(workbench.runs, MODEL)
    assert set(cells["run_id"]) == set(swept.result.run_ids.values())
    (parent,) = (await asyncio.to_thread(workbench.runs, MODEL, kind="sweep"))["run_id"]
    assert parent == swept.run_id


async def test_a_sweep_works_inside_a_running_event_loop_and_is_not_repeated(stack: SmallStack) -> None:
    await sweep(concurrencies=(2,))
    # As in JupyterLab: this very thread runs a loop. All cells are on disk, so nothing in the loop is needed.
    again = workbench.sweep(MODEL, **(QUICK | {"concurrencies": (2,)}), on_progress=lambda progress: None)
    assert again.cells["invalid"].isna().all()


async def test_a_replica_that_somebody_holds_is_refused_by_name(stack: SmallStack) -> None:
    client = connect(stack.store.url)
    async with await reserve(client, REPLICA, "a colleague", ttl_s=30):
        with pytest.raises(ReplicaReserved, match="reserved by a colleague"):
            await sweep()
    await client.aclose()


async def test_what_cannot_be_measured_is_named(stack: SmallStack) -> None:
    with pytest.raises(NotFound, match=f"no pool serves model 'other'; served are {MODEL}"):
        await asyncio.to_thread(workbench.sweep, "other")
    with pytest.raises(NotFound, match=f"no replica of {MODEL}-cpu-7; {MODEL} has {REPLICA}"):
        await sweep(replica=f"{MODEL}-cpu-7")
    with pytest.raises(NotFound, match=f"no replica of {MODEL}@9"):
        await asyncio.to_thread(workbench.sweep, f"{MODEL}@9")
    with pytest.raises(ValueError, match="medium"):
        await sweep(mode="medium")
    with pytest.raises(ValueError, match="a shape needs both"):
        await asyncio.to_thread(workbench.sweep, MODEL, num_output_tokens=4)


async def test_a_benchmark_of_the_stack_is_logged_with_its_notes_and_records(stack: SmallStack) -> None:
    def measured() -> tuple[BenchResult, str]:
        load, workload = "poisson:rate=60", "completion:prompt=24,output=8"
        result = workbench.bench(MODEL, load=load, workload=workload, target="engine", num_requests=60)
        return result, result.log()

    result, run_id = await asyncio.to_thread(measured)
    assert result.invalid is None
    assert result.facts["engine_fingerprint"] == "engine-1"
    assert result.metrics["usd_per_million_tokens"] > 0
    (run,) = (await asyncio.to_thread(workbench.runs, MODEL, kind="bench")).to_dict("records")
    assert (run["run_id"], run["params.load"], run["tags.valid"]) == (run_id, "poisson:rate=60", "true")
    assert run["goodput_rps/ci_low"] <= run["goodput_rps"]
    assert (run["num_unsent"], run["tags.engine_counters"]) == (0.0, "agree")
    assert run["tags.energy"] and run["tags.steady"]
    assert run["send_lag_s/p99"] == result.metrics["send_lag_s/p99"]


async def test_notebook_01_becomes_a_report(
    stack: SmallStack, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mlflow_uri: str
) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    lines: list[str] = []
    report = await asyncio.to_thread(
        run_report,
        "01_benchmark_sweep",
        {"model": MODEL, "concurrencies": "1,4,8", "num_prompt_tokens": "32", "num_output_tokens": "16"},
        tmp_path / "reports",
        notebooks_dir=ROOT / "notebooks",
        config_file=stack.config_file,
        artifacts=Tracker(mlflow_uri),
        on_progress=lines.append,
    )
    assert report.mlflow_run_id is not None
    assert any(line.startswith("[5/5] mixed-32x16-c8: ") for line in lines)
    page = report.html.read_text()
    for title in ("Throughput against concurrency", "Latency against load", "What a million tokens costs"):
        assert title in page
    assert "a million output tokens costs $" in page
    assert report.mlflow_run_id in page
    code = [cell for cell in nbformat.read(report.notebook, as_version=4).cells if cell.cell_type == "code"]
    assert all(output.output_type != "error" for cell in code for output in cell.outputs)
