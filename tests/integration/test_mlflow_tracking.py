"""Sweeps and cost tables in a real MLflow server, which may be down at any moment."""

from __future__ import annotations

import asyncio
import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.control.registered import RegistryUnavailable
from serving.control.registry import Registry, mlflow_client
from serving.core.errors import NotFound
from serving.core.state import Task
from serving.engine.fake import FakeEngine
from tests.cells import make_cell
from tests.measured import FAST, PLAN, make_replica, make_vocabulary
from workbench.costs.table import build
from workbench.loadgen import RequestRecord
from workbench.mlflow_server import is_healthy, mlflow_server
from workbench.stack.ports import free_port
from workbench.sweeps.cells import CellKind, CellResult
from workbench.sweeps.kept_results import ResultNotFound, find_cells
from workbench.sweeps.results import ResultsBroken, ResultsFolder
from workbench.sweeps.run import ProgressKind, SweepProgress, run_sweep
from workbench.tracking import Tracker

RECORDS = [RequestRecord("r-0", 0, Task.GENERATE, 64, 32, 0.0, 0.0)]


class Price:
    usd_per_hour = 0.04
    source = "test"
    date = "2026-11-01"


def keep(results_dir: Path, cells: list[CellResult], *, planned: list[str] | None = None) -> ResultsFolder:
    """The cells as a sweep would have left them on disk."""
    first = cells[0]
    folder = ResultsFolder(results_dir, first.sweep_digest)
    replica = {
        name: str(getattr(first, name))
        for name in ("model", "version", "task", "hardware_class", "engine_fingerprint", "hardware_fingerprint")
    }
    covers = {"engine_covers": dict(first.engine_covers), "hardware_covers": dict(first.hardware_covers)}
    folder.open(
        {
            "plan": {"mode": "short", "concurrencies": [1, 4]},
            "replica": {**replica, **covers},
            "cells": planned or [cell.spec.cell_id for cell in cells],
            "commit": "c0ffee",
        }
    )
    for cell in cells:
        folder.write_cell(cell, RECORDS)
    return folder


def sweep_of(model: str, **changes: Any) -> list[CellResult]:
    """Two cells of a model that no other test uses."""
    own = {"model": model, "sweep_digest": f"digest-{model}", "records_file": "r.parquet"} | changes
    return [make_cell(**own), make_cell(CellKind.PREFILL, **own)]


def cell_runs(uri: str, model: str) -> list[Any]:
    client = mlflow_client(uri)
    found = client.get_experiment_by_name(f"benchmarks/{model}")
    return list(client.search_runs([found.experiment_id], "tags.kind = 'cell'")) if found else []


def test_the_cells_of_a_run_come_back_by_the_run_of_the_sweep_or_of_a_cell(mlflow_uri: str, tmp_path: Path) -> None:
    mixed, prefill = sweep_of("track-cells-of")
    spoiled = replace(prefill, invalid="half failed")
    tracker = Tracker(mlflow_uri)
    logged = tracker.log_sweep(keep(tmp_path / "kept", [mixed, spoiled]))
    by_sweep = find_cells(logged.parent_run_ids[0], tmp_path / "elsewhere", tracker)
    assert {cell.measurement_id for cell in by_sweep} == {mixed.measurement_id, spoiled.measurement_id}
    assert find_cells(logged.runs[spoiled.measurement_id], tmp_path / "elsewhere", tracker) == [spoiled]
    with pytest.raises(ResultNotFound, match="no result"):
        find_cells("f" * 32, tmp_path / "elsewhere", tracker)


def test_a_sweep_is_a_parent_run_with_a_nested_run_a_cell(mlflow_uri: str, tmp_path: Path) -> None:
    mixed, prefill = sweep_of("track-nested")
    folder = keep(tmp_path, [mixed, prefill])
    logged = Tracker(mlflow_uri).log_sweep(folder)
    client = mlflow_client(mlflow_uri)
    parent = client.get_run(logged.parent_run_ids[0])
    assert parent.info.status == "FINISHED"
    assert parent.data.tags["sweep.digest"] == "digest-track-nested"
    assert parent.data.params["engine.version"] == "0.32.0"
    assert json.loads(parent.data.params["plan.concurrencies"]) == [1, 4]
    run = client.get_run(logged.runs[mixed.measurement_id])
    assert run.data.tags["mlflow.parentRunId"] == parent.info.run_id
    assert run.data.tags["engine_fingerprint"] == mixed.engine_fingerprint
    assert run.data.tags["commit"] == "c0ffee"
    assert run.data.metrics["ttft_s/p99"] == 0.31
    assert run.data.metrics["output_tokens_per_s_per_gpu/ci_low"] == pytest.approx(86.4)
    assert (run.info.start_time, run.info.end_time) == (
        round(mixed.started_at_s * 1000), round(mixed.ended_at_s * 1000))  # fmt: skip
    assert {artifact.path for artifact in client.list_artifacts(run.info.run_id, "cell")} == {
        "cell/cell.json", "cell/records.parquet"}  # fmt: skip


def test_logging_again_makes_no_second_run_even_without_the_marker(mlflow_uri: str, tmp_path: Path) -> None:
    folder = keep(tmp_path, sweep_of("track-once"))
    tracker = Tracker(mlflow_uri)
    first = tracker.log_sweep(folder)
    assert tracker.log_sweep(folder).runs == {}
    assert tracker.log_pending(tmp_path).runs == {}
    (folder.path / "mlflow.json").unlink()
    again = tracker.log_sweep(folder)
    assert again == first
    assert len(cell_runs(mlflow_uri, "track-once")) == 2


def test_a_cell_whose_logging_was_cut_off_is_completed_in_its_run(mlflow_uri: str, tmp_path: Path) -> None:
    cells = sweep_of("track-cut")
    folder = keep(tmp_path, cells)
    tracker = Tracker(mlflow_uri)
    logged = tracker.log_sweep(folder)
    run_id = logged.runs[cells[0].measurement_id]
    client = mlflow_client(mlflow_uri)
    client.update_run(run_id, status="RUNNING")
    (folder.path / "mlflow.json").unlink()
    assert tracker.log_sweep(folder).runs[cells[0].measurement_id] == run_id
    assert client.get_run(run_id).info.status == "FINISHED"


def test_a_sweep_that_is_not_complete_stays_open(mlflow_uri: str, tmp_path: Path) -> None:
    cells = sweep_of("track-open")
    folder = keep(tmp_path, cells[:1], planned=[cell.spec.cell_id for cell in cells])
    tracker = Tracker(mlflow_uri)
    (parent,) = tracker.log_sweep(folder).parent_run_ids
    client = mlflow_client(mlflow_uri)
    assert client.get_run(parent).info.status == "RUNNING"
    folder.write_cell(cells[1], RECORDS)
    tracker.log_pending(tmp_path)
    assert client.get_run(parent).info.status == "FINISHED"


def test_the_newest_valid_cells_come_back_and_make_a_table(mlflow_uri: str, tmp_path: Path) -> None:
    old = sweep_of("track-table")
    new = replace(old[0], started_at_s=old[0].started_at_s + 100, ended_at_s=old[0].ended_at_s + 100)
    warm = replace(old[0], started_at_s=old[0].started_at_s + 200, invalid="warm")
    tracker = Tracker(mlflow_uri)
    runs = tracker.log_sweep(keep(tmp_path, [*old, new, warm])).runs
    cells = tracker.cells(["track-table"])
    assert {cell.result.measurement_id for cell in cells} == {new.measurement_id, old[1].measurement_id}
    table = build(cells, {"cpu": Price()})
    assert [row.mlflow_run_id for row in table.rows] == [runs[new.measurement_id]]
    run_id = tracker.log_cost_table(table)
    assert tracker.cost_table() == (run_id, table.rows)
    assert tracker.cost_table(run_id)[1] == table.rows
    frame = tracker.runs("benchmarks/track-table")
    assert set(frame["tags.kind"]) == {"sweep", "cell"}
    assert new.measurement_id in set(frame["tags.measurement.id"])
    assert any(cell.result.model == "track-table" for cell in tracker.cells())


@pytest.mark.parametrize("text", [None, "", "{", "[]", "null", '{"schema": 0}', "spec"])
def test_a_broken_artifact_is_named_and_holds_up_no_other(mlflow_uri: str, tmp_path: Path, text: str | None) -> None:
    model = f"track-broken-{tmp_path.name}"[:60].lower().replace("_", "-")
    tracker, client = Tracker(mlflow_uri), mlflow_client(mlflow_uri)
    first, second = sweep_of(model)
    runs = tracker.log_sweep(keep(tmp_path, [first, second])).runs
    if text is None:  # a run without it, as one that was cut off before it was logged
        broken = client.get_run(runs[first.measurement_id])
        later = {**broken.data.tags, "mlflow.runName": "later"}
        broken = client.create_run(broken.info.experiment_id, tags=later)
    else:
        broken = client.get_run(runs[first.measurement_id])
        if text == "spec":
            text = json.dumps(first.to_json() | {"spec": {}})
        client.log_text(broken.info.run_id, text, "cell/cell.json")
    named: list[str] = []
    (cell,) = tracker.cells([model], on_broken=named.append)
    assert cell.result.measurement_id == second.measurement_id
    assert len(named) == 1 and broken.info.run_id in named[0] and "cell/cell.json" in named[0]
    with pytest.raises(ResultsBroken, match=broken.info.run_id):
        tracker.cells([model])


@pytest.mark.parametrize("text", ["{", '{"schema_version": 99}', '{"schema_version": 1}'])
def test_a_broken_cost_table_is_named(mlflow_uri: str, text: str) -> None:
    tracker = Tracker(mlflow_uri)
    run_id = tracker.log_run("cost-tables", "a table")
    mlflow_client(mlflow_uri).log_text(run_id, text, "cost_table/cost_table.json")
    with pytest.raises(ResultsBroken, match=run_id):
        tracker.cost_table(run_id)
    with pytest.raises(ResultsBroken, match="artifact"):
        tracker.cost_table(tracker.log_run("cost-tables", "nothing"))


def test_what_does_not_exist_is_said(mlflow_uri: str) -> None:
    tracker = Tracker(mlflow_uri)
    assert tracker.cells(["track-nobody"]) == []
    assert tracker.runs("track-nobody").empty
    with pytest.raises(ValueError, match="ttft_s"):
        tracker.log_run("operations", "a run", metrics={"ttft_s": float("nan")})


def test_an_artifact_can_be_added_later(mlflow_uri: str, tmp_path: Path) -> None:
    tracker = Tracker(mlflow_uri)
    run_id = tracker.log_run("operations", "a run", params={"a": 1}, metrics={"b": 2.0})
    page = tmp_path / "report.html"
    page.write_text("<p>hello")
    tracker.log_files(run_id, [page], "report")
    artifacts = mlflow_client(mlflow_uri).list_artifacts(run_id, "report")
    assert [artifact.path for artifact in artifacts] == ["report/report.html"]


def test_with_mlflow_down_pending_results_stay(tmp_path: Path) -> None:
    folder = keep(tmp_path, sweep_of("track-down"))
    tracker = Tracker(f"http://127.0.0.1:{free_port()}")
    started_s = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        tracker.log_pending(tmp_path)
    assert time.monotonic() - started_s < 5
    assert len(folder.pending()) == 2


async def test_mlflow_down_at_the_start_and_in_the_middle_of_a_sweep_loses_nothing(tmp_path: Path) -> None:
    """One server through a life: down, up, killed in the middle, up again."""
    port = free_port()
    uri = f"http://127.0.0.1:{port}"
    server = mlflow_server(tmp_path / "mlflow", port)
    tracker = Tracker(uri)
    vocabulary = make_vocabulary(tmp_path / "weights")
    results_dir = tmp_path / "results"
    stopping: list[asyncio.Task[None]] = []

    def stop_after_one(progress: SweepProgress) -> None:
        if progress.kind is ProgressKind.CELL_STARTED and progress.cell_number == 2:
            stopping.append(asyncio.create_task(server.stop()))

    async with FakeEngine(FAST) as engine:
        down = await run_sweep(
            replace(PLAN, concurrencies=(1,)), make_replica(engine.url, "track-life"),
            vocabulary=vocabulary, results_dir=results_dir, tracker=tracker)  # fmt: skip
        assert (down.run_id, down.num_pending) == (None, 3)
        assert "does not answer" in str(down.mlflow_error)
        try:
            await server.start()
            registry = Registry(uri)
            await asyncio.to_thread(registry.register, "track-life", "here", "digest", task=Task.GENERATE, first=True)
            cut = await run_sweep(
                PLAN, make_replica(engine.url, "track-life"), vocabulary=vocabulary, results_dir=results_dir,
                tracker=tracker, on_progress=stop_after_one)  # fmt: skip
            await asyncio.gather(*stopping)
            assert not await is_healthy(uri)
            assert cut.run_id is not None
            assert [cell.invalid for cell in cut.cells] == [None] * 4
            assert 1 <= cut.num_pending <= 3
            with pytest.raises(RegistryUnavailable):
                await asyncio.to_thread(registry.champions)
            await server.start()
            assert await asyncio.to_thread(registry.champions) == {"track-life": "1"}
            logged = await asyncio.to_thread(tracker.log_pending, results_dir)
            assert len(logged.runs) == 3 + cut.num_pending
            assert len(await asyncio.to_thread(cell_runs, uri, "track-life")) == 7
            assert (await asyncio.to_thread(tracker.log_pending, results_dir)).runs == {}
            assert len(await asyncio.to_thread(tracker.cells)) == 4
            with pytest.raises(NotFound, match="no cost table yet"):
                await asyncio.to_thread(tracker.cost_table)
        finally:
            await server.stop()
