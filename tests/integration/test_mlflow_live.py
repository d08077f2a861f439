"""What MLflow shows of a measurement while it runs, what it was measured on, and runs that are logged as a family."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

from serving.control.registry import mlflow_client
from serving.engine.fake import FakeEngine
from tests.measured import FAST, PLAN, make_replica, make_vocabulary
from workbench.benchmark.logged import Following
from workbench.benchmark.request import BenchRequest
from workbench.benchmark.run import abench
from workbench.run_fields import RunFields
from workbench.sweeps.results import ResultsFolder
from workbench.sweeps.run import run_sweep
from workbench.tracking import LiveRun, Tracker


def nested(uri: str, experiment: str, parent_run_id: str) -> list[Any]:
    client = mlflow_client(uri)
    found = client.get_experiment_by_name(experiment)
    assert found is not None
    return list(client.search_runs([found.experiment_id], f"tags.`mlflow.parentRunId` = '{parent_run_id}'"))


async def test_a_cell_is_followed_in_the_run_that_its_measurement_ends_in(mlflow_uri: str, tmp_path: Path) -> None:
    tracker, client = Tracker(mlflow_uri), mlflow_client(mlflow_uri)
    vocabulary = make_vocabulary(tmp_path / "weights")
    async with FakeEngine(FAST) as engine:
        swept = await run_sweep(
            replace(PLAN, concurrencies=(1,)), make_replica(engine.url, "live-cell"), vocabulary=vocabulary,
            results_dir=tmp_path / "results", tracker=tracker)  # fmt: skip
    assert swept.run_id is not None and swept.mlflow_error is None
    runs = await asyncio.to_thread(nested, mlflow_uri, "benchmarks/live-cell", swept.run_id)
    assert {run.info.run_id for run in runs} == set(swept.run_ids.values())
    assert {run.data.tags["kind"] for run in runs} == {"cell"}
    cell = swept.cells[0]
    run = client.get_run(swept.run_ids[cell.measurement_id])
    assert run.data.metrics["live/num_ended"] == cell.num_requests
    assert run.data.metrics["live/request_rps"] > 0
    (dataset,) = run.inputs.dataset_inputs
    assert dataset.dataset.name == f"{cell.spec.kind.value} prompts {cell.spec.shape}"
    assert str(cell.prompt_seed) in dataset.dataset.source
    models = {client.get_run(one.info.run_id).inputs.model_inputs[0].model_id for one in runs}
    assert len(models) == 1 and client.get_logged_model(models.pop()).tags["version"] == "1"


def test_an_attempt_that_broke_off_is_ended_by_the_next_and_is_no_result(mlflow_uri: str, tmp_path: Path) -> None:
    tracker, client = Tracker(mlflow_uri), mlflow_client(mlflow_uri)
    folder = ResultsFolder(tmp_path, "digest-broke-off")
    replica = make_replica("http://nowhere", "live-broken")
    names = ("model", "version", "task", "hardware_class", "engine_fingerprint", "hardware_fingerprint")
    about = {name: str(getattr(replica, name)) for name in names} | {"engine_covers": {}, "hardware_covers": {}}
    folder.open({"plan": {"mode": "short"}, "replica": about, "cells": ["one"], "commit": "c0ffee"})
    first = tracker.start_cell(folder, "one")
    second = tracker.start_cell(folder, "one")
    assert client.get_run(first.run_id).info.status == "KILLED"
    assert client.get_run(second.run_id).info.status == "RUNNING"
    second.start()
    second.on_requests(3, 8)
    second.abandon()
    run = client.get_run(second.run_id)
    assert (run.info.status, run.data.metrics["live/num_ended"]) == ("KILLED", 3.0)
    logged = folder.logged()
    assert logged is not None and tracker.cells_of(logged.parent_run_id) == []


async def test_a_benchmark_is_followed_and_logged_into_one_run(mlflow_uri: str, tmp_path: Path) -> None:
    make_vocabulary(tmp_path / "weights")
    request = BenchRequest(
        "fake-model", workload="completion:prompt=24,output=8", num_requests=60, tokenizer=str(tmp_path / "weights")
    )
    async with FakeEngine(FAST) as engine:
        request = replace(request, url=engine.url)
        following = Following(Tracker(mlflow_uri), request)
        result = await abench(None, request, open_run=following.open_run)
    run_id = await asyncio.to_thread(following.log, result)
    run = mlflow_client(mlflow_uri).get_run(run_id)
    assert (run.info.status, run.data.tags["kind"]) == ("FINISHED", "bench")
    assert run.data.metrics["live/num_ended"] == 60 and "request_rps" in run.data.metrics
    assert run.inputs.dataset_inputs[0].dataset.name == request.workload
    assert result.facts["prompt_seed"] in run.inputs.dataset_inputs[0].dataset.source


async def test_mlflow_going_away_stops_no_measurement_and_is_said(tmp_path: Path) -> None:
    make_vocabulary(tmp_path / "weights")
    told: list[str] = []
    async with FakeEngine(FAST) as engine:
        request = BenchRequest("fake-model", url=engine.url, num_requests=40, tokenizer=str(tmp_path / "weights"))
        following = Following(Tracker("http://127.0.0.1:9"), request)
        result = await abench(None, request, open_run=following.open_run, on_trouble=told.append)
    assert result.summary.num_requests == 40
    assert len(told) == 1 and "does not answer" in told[0]


def test_a_family_that_goes_on_gets_only_what_is_new(mlflow_uri: str, tmp_path: Path) -> None:
    tracker, client = Tracker(mlflow_uri), mlflow_client(mlflow_uri)
    file = tmp_path / "search.json"
    file.write_text("{}")
    parent = RunFields("search-1", "SLO search", tags={"reason": "cut off"}, metrics={"num_cells": 1.0})
    one, two = (RunFields(str(n), f"cell {n}", metrics={"load": float(n)}, is_failed=n == 2) for n in (1, 2))
    run_id = tracker.log_family("benchmarks/live-family", parent, [one], {"slo_search": [file]})
    again = replace(parent, tags={"reason": "found"}, metrics={"num_cells": 2.0})
    assert tracker.log_family("benchmarks/live-family", again, [one, two], {"slo_search": [file]}) == run_id
    children = nested(mlflow_uri, "benchmarks/live-family", run_id)
    assert sorted((run.data.metrics["load"], run.info.status) for run in children) == [
        (1.0, "FINISHED"),
        (2.0, "FAILED"),
    ]
    run = client.get_run(run_id)
    assert (run.data.tags["reason"], run.data.metrics["num_cells"]) == ("found", 2.0)
    other = replace(parent, key="search-2")
    assert tracker.log_family("benchmarks/live-family", other, [], {}) != run_id


def test_points_come_while_it_runs_from_a_process_of_their_own(mlflow_uri: str) -> None:
    client = mlflow_client(mlflow_uri)
    run_id = Tracker(mlflow_uri).start_run("benchmarks/live-points", "a run").run_id
    live = LiveRun(client, run_id, every_s=0.0)
    live.start()
    for ended in (1, 2, 3):
        live.on_requests(ended, 3)
    live.stop()
    assert live.trouble is None
    assert [point.value for point in client.get_metric_history(run_id, "live/num_ended")] == [1.0, 2.0, 3.0]
    client.delete_run(run_id)
    gone = LiveRun(client, run_id, every_s=0.0)
    gone.start()
    gone.on_requests(4, 4)
    gone.stop()
    assert gone.trouble is not None and "does not take live metrics" in gone.trouble


def test_a_live_metric_that_is_refused_is_said_once(mlflow_uri: str) -> None:
    tracker, client = Tracker(mlflow_uri), mlflow_client(mlflow_uri)
    live = tracker.start_run("benchmarks/live-gone", "a run")
    client.delete_run(live.run_id)
    live.start()
    live.on_requests(1, 2)
    live.stop()
    assert live.trouble is not None and "refused" in live.trouble
