"""Notebooks, JupyterLab and a scheduled run on one whole stack: gateway, MLflow, JupyterLab, fake engines."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import nbformat
import psutil
import pytest
import pytest_asyncio
import yaml

import workbench
from serving.control.registry import mlflow_client
from tests.integration.processes import fetch, text, until
from tests.integration.workplaces import POOL, ROOT, Workplace, new_workplace
from workbench.cli.exits import Exit
from workbench.report import Report, run_report
from workbench.tracking import Tracker

pytestmark = pytest.mark.asyncio(loop_scope="session")
SMALL = {"concurrencies": "1,2,4,8", "num_prompt_tokens": "24", "num_output_tokens": "8"}
IDLE = "idle-model"
SWEEP_TIMEOUT_S = 600.0  # of a whole sweep by papermill, on a machine that is busy
"""Of a pool that does not run, so that its engine can be tuned."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(mlflow_uri: str) -> AsyncIterator[Workplace]:
    with new_workplace() as place:
        file = place.folder / "workbench.yaml"
        config = yaml.safe_load(file.read_text())
        config["models"][IDLE] = {"source": str(place.folder / "weights")}
        config["pools"] = [
            {**POOL, "model": place.model, "id": "main"},
            {**POOL, "model": IDLE, "id": "idle", "start": "on_demand"},
        ]
        file.write_text(yaml.safe_dump(config | {"stores": {"mlflow_tracking_uri": mlflow_uri}}))
        shutil.copytree(ROOT / "notebooks", place.folder / "notebooks")
        place.env["PYTHONPATH"] = str(ROOT)
        child = await place.start("up")

        async def serves() -> bool:
            assert child.returncode is None, text(place.folder / "err")
            return "Serving until" in text(place.folder / "out") and await place.ask() == 200

        try:
            await until(serves, "the stack to serve", 180.0)
            yield place
        finally:
            if child.returncode is None:
                child.terminate()
                await asyncio.wait_for(child.wait(), 60)


async def test_mlflow_and_the_endpoints_docs_are_behind_jupyterlab_and_in_its_launcher(
    place: Workplace, mlflow_uri: str
) -> None:
    assert place.state is not None
    url = urlsplit(place.state.urls["lab"])
    assert url.path == "/lab/tree/notebooks"
    lab, token = f"http://{url.netloc}", parse_qs(url.query)["token"][0]

    async def got(path: str) -> tuple[int, bytes]:
        return await asked(lab, path, token)

    status, docs = await got("/endpoint/docs")
    assert (status, b"/v1/chat/completions" in docs) == (200, True)
    assert place.gateway.encode() in docs, "examples name the endpoint and not JupyterLab"
    status, page = await got("/mlflow/")
    [script] = re.findall(rb'src="(static-files/[^"]*main[^"]*\.js)"', page)[:1]
    assert status == 200
    status, code = await got(f"/mlflow/{script.decode()}")
    assert (status, len(code) > 10_000) == (200, True)
    status, found = await got("/mlflow/ajax-api/2.0/mlflow/experiments/search?max_results=5")
    assert status == 200 and "experiments" in json.loads(found)
    entries = json.loads((await got("/server-proxy/servers-info"))[1])["server_processes"]
    assert {entry["launcher_entry"]["path_info"] for entry in entries} >= {"mlflow/", "endpoint/docs"}
    assert (await asked(lab, "/mlflow/", ""))[0] in (302, 403), "nobody gets there without the token"


async def asked(base: str, path: str, token: str) -> tuple[int, bytes]:
    status, _, body = await fetch(base, "GET", path, **({"authorization": f"token {token}"} if token else {}))
    return status, body


async def run_notebook(place: Workplace, name: str, parameters: dict[str, object], mlflow_uri: str) -> Report:
    report = await asyncio.to_thread(
        run_report,
        name,
        parameters,
        place.folder / "reports",
        notebooks_dir=ROOT / "notebooks",
        config_file=place.folder / "workbench.yaml",
        artifacts=Tracker(mlflow_uri),
    )
    assert report.mlflow_run_id is not None
    assert "## Conclusion" not in report.html.read_text(), "headings are rendered"
    return report


def printed(report: Report) -> str:
    cells = nbformat.read(report.notebook, as_version=4).cells
    outputs = [output for cell in cells for output in cell.get("outputs", [])]
    assert all(output.output_type != "error" for output in outputs)
    return "".join(output.get("text", "") for output in outputs)


async def test_notebook_02_sets_measured_published_and_predicted_apart(
    place: Workplace, mlflow_uri: str, importable: None
) -> None:
    parameters = SMALL | {"models": place.model, "concurrencies": "1", "probe_seconds": 1.0}
    report = await run_notebook(place, "02_hardware_and_cost", parameters, mlflow_uri)
    assert "of what the bandwidth allows" in printed(report)
    page = report.html.read_text()
    assert all(word in page for word in ("measured", "published", "predicted", "usd_per_million_output_tokens"))


async def test_notebook_03_batches_faster_than_one_at_a_time(
    place: Workplace, mlflow_uri: str, importable: None
) -> None:
    small = {"concurrency": 4, "num_prompt_tokens": 16, "num_output_tokens": 8, "num_requests": 16}
    parameters = small | {"model": IDLE, "num_long_tokens": 0, "vary": "max_num_seqs", "values": "2,8"}
    report = await run_notebook(place, "03_engine_tuning", parameters, mlflow_uri)
    [times] = re.findall(r"continuous batching: ([\d.]+) times", printed(report))
    assert float(times) > 1.0


async def test_notebook_04_replays_a_trace_by_its_own_times(
    place: Workplace, mlflow_uri: str, importable: None
) -> None:
    parameters = {"model": place.model, "num_requests": 60, "scale": 6.0}
    report = await run_notebook(place, "04_trace_replay", parameters, mlflow_uri)
    said = printed(report)
    assert "60 requests in 2.5 s" in said and "- 60 requests; 0 failed" in said
    assert "send_lag_s/p99" in said


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


@contextmanager
def webhook() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """An address, and what was posted there."""
    told: list[dict[str, Any]] = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            told.append(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing on the tests' output."""

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/hook", told
    finally:
        server.shutdown()
        thread.join(10)
        server.server_close()


async def scheduled(place: Workplace) -> tuple[int, dict[str, Any]]:
    code, output = await place.run("schedule", "run-now", "nightly", "--json", timeout_s=SWEEP_TIMEOUT_S)
    return code, json.loads(output)


@pytest.mark.long
async def test_a_kernel_killed_mid_sweep_is_gone_on_with_compared_priced_and_told_of(
    place: Workplace, mlflow_uri: str
) -> None:
    with webhook() as (url, told):
        words = ("--compare", "output_tokens_per_s_per_gpu", "--tolerance", "0.9", "--cost-table", "publish")
        values = [f"{name}={value}" for name, value in (SMALL | {"model": place.model}).items()]
        parameters = [word for value in values for word in ("-p", value)]
        name = ("nightly", "*/5 * * * *", "01_benchmark_sweep")
        code, _ = await place.run("schedule", "add", *name, *parameters, *words, "--no-crontab", "--webhook", url)
        assert code == Exit.OK
        run_id = await kill_mid_sweep(place, told)
        await goes_on(place, run_id, mlflow_uri)
        await a_worse_run_is_told_of(place, told)
        await a_run_that_never_came_is_told_of_once(place, told)


async def kill_mid_sweep(place: Workplace, told: list[dict[str, Any]]) -> str:
    """`kill -9` of the kernel once cells are on disk; returns the run's id."""
    began_s = time.time()
    results = place.folder / ".workbench" / "results"
    running = asyncio.create_task(scheduled(place))

    async def has_measured() -> bool:
        assert not running.done(), text(place.folder / "err")[-2000:]
        return sum(path.stat().st_mtime > began_s for path in results.glob("*/*-c*.json")) >= 2

    try:
        await until(has_measured, "two cells on disk", SWEEP_TIMEOUT_S)
        kernels = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ipykernel_launcher" in " ".join(process.cmdline())
        ]
        assert len(kernels) == 1
        kernels[0].kill()
        code, run = await running
    finally:
        running.cancel()
    assert (code, run["outcome"], run["reason"]) == (Exit.FAILED, "interrupted", "the notebook's kernel died")
    assert [alert["kind"] for alert in told] == ["interrupted"]
    return str(run["run_id"])


async def goes_on(place: Workplace, run_id: str, mlflow_uri: str) -> None:
    """The next start is the same run: what it finds on disk is kept, the rest measured, the page whole."""
    code, run = await scheduled(place)
    assert (code, run["outcome"], run["run_id"], run["attempt"]) == (Exit.OK, "ok", run_id, 2), json.dumps(run)
    page = text(Path(run["html"]))
    kept = set(re.findall(r"(\S+-c\d+): kept from before", page))
    assert 2 <= len(kept) < 7 and "mixed-24x8-c8" not in kept
    for title in ("Throughput against concurrency", "What is worth choosing", "The run over time", "a million output"):
        assert title in page
    assert run["mlflow_run_id"] in page and run["num_cells"] == 7
    assert "accepted as the first" in run["compared"][0]
    client = mlflow_client(mlflow_uri)
    experiment = client.get_experiment_by_name(f"benchmarks/{place.model}")
    ours = f"tags.`mlflow.parentRunId` = '{run['mlflow_run_id']}'"
    cells = client.search_runs([experiment.experiment_id], ours)
    assert len({cell.info.run_name for cell in cells}) == len(cells) == 7, "no cell is in MLflow twice"
    code, table = await place.run("cost-table", "show", "--json")
    assert code == Exit.OK and {row["concurrency"] for row in json.loads(table)["rows"]} >= {1, 2, 4, 8}


async def a_worse_run_is_told_of(place: Workplace, told: list[dict[str, Any]]) -> None:
    """As if the accepted run had been a hundred times as fast: no new cost table, exit code, alert."""
    file = place.folder / ".workbench" / "schedules" / "nightly" / "accepted.json"
    accepted = json.loads(file.read_text())
    metric = "output_tokens_per_s_per_gpu"
    for cell in accepted["cells"]:
        if metric in cell["metrics"]:
            cell["metrics"][metric] *= 100
            cell["intervals"] = {name: ends for name, ends in cell["intervals"].items() if name != metric}
            cell["intervals"][metric] = [cell["metrics"][metric] * 0.99, cell["metrics"][metric] * 1.01]
    file.write_text(json.dumps(accepted))
    code, run = await scheduled(place)
    assert (code, run["outcome"]) == (Exit.FAILED, "regression"), run
    assert run["reason"] == f"{metric} is worse than in the accepted run"
    assert told[-1]["kind"] == "regression" and "worse" in told[-1]["text"] and told[-1]["report"] == run["html"]
    tracker = workbench.connect(place.folder / "workbench.yaml").tracker
    outcomes = tracker.runs("operations").query("`tags.schedule` == 'nightly'")["tags.outcome"]
    assert sorted(outcomes) == ["interrupted", "ok", "regression"]


async def a_run_that_never_came_is_told_of_once(place: Workplace, told: list[dict[str, Any]]) -> None:
    file = place.folder / ".workbench" / "schedules" / "nightly" / "runs.jsonl"
    runs = [json.loads(line) for line in file.read_text().splitlines()]
    for run in runs:
        run["attempt_began_at_s"] -= 7200
    file.write_text("".join(json.dumps(run) + "\n" for run in runs))
    schedule = place.folder / ".workbench" / "schedules" / "nightly" / "schedule.json"
    kept = json.loads(schedule.read_text())
    schedule.write_text(json.dumps(kept | {"created_at_s": kept["created_at_s"] - 7200}))
    for _ in range(2):
        code, states = await place.run("schedule", "status", "--json")
        assert code == Exit.FAILED and json.loads(states)[0]["overdue_since"]
    assert [alert["kind"] for alert in told].count("overdue") == 1
