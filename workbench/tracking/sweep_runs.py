"""A sweep's parent run and the nested run of each of its measurements, from what its folder keeps."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mlflow import MlflowClient
from mlflow.entities import RunTag

from workbench import run_fields
from workbench.run_fields import KIND_ATTEMPT, PARENT_RUN, TAG_CELL_ID, TAG_KIND, TAG_MEASUREMENT, TAG_SWEEP
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import SWEEP_FILE, LoggedRuns, ResultsBroken, ResultsFolder
from workbench.tracking.inputs import Inputs, log_inputs
from workbench.tracking.names import CELL_FILE, CELL_FOLDER, RECORDS_FILE, SWEEP_FOLDER
from workbench.tracking.values import log_values


def sweep_of(folder: ResultsFolder) -> dict[str, Any]:
    """What the sweep is, with everything that its run needs."""
    sweep = folder.sweep()
    try:
        run_fields.sweep_tags(sweep, folder.sweep_digest)
        run_fields.sweep_params(sweep)
        _ = sweep["plan"]["mode"], set(sweep["cells"])
    except (KeyError, TypeError, AttributeError) as error:
        path = folder.path / SWEEP_FILE
        raise ResultsBroken(f"{path} is no sweep ({error!r}); remove its folder to measure again") from error
    return sweep


def parent_run(client: MlflowClient, experiment_id: str, folder: ResultsFolder, sweep: Mapping[str, Any]) -> str:
    """The sweep's run: found by its digest, else made with the sweep's plan as parameters and artifact."""
    digest = folder.sweep_digest
    wanted = f"tags.{TAG_KIND} = 'sweep' and tags.`{TAG_SWEEP}` = '{digest}'"
    found = client.search_runs([experiment_id], wanted, max_results=1)
    if found:
        return str(found[0].info.run_id)
    replica = sweep["replica"]
    name = f"{replica['model']}@{replica['version']} on {replica['hardware_class']}, {sweep['plan']['mode']}"
    run = client.create_run(experiment_id, run_name=name, tags=run_fields.sweep_tags(sweep, digest))
    run_id = str(run.info.run_id)
    log_values(client, run_id, run_fields.sweep_params(sweep), {})
    client.log_dict(run_id, dict(sweep), f"{SWEEP_FOLDER}/sweep.json")
    return run_id


def log_cell(
    client: MlflowClient, experiment_id: str, logged: LoggedRuns, folder: ResultsFolder, cell: CellResult
) -> str:
    """The measurement's run: one that an earlier call or a live run left open, completed, or a new one."""
    found = client.search_runs([experiment_id], f"tags.`{TAG_MEASUREMENT}` = '{cell.measurement_id}'", max_results=1)
    if found and found[0].info.status != "RUNNING":
        return str(found[0].info.run_id)
    run_id = str(found[0].info.run_id) if found else _open_run(client, experiment_id, logged, cell)
    ended_at_ms = round(cell.ended_at_s * 1000)
    log_values(client, run_id, run_fields.cell_params(cell), run_fields.cell_metrics(cell), at_ms=ended_at_ms)
    log_inputs(client, experiment_id, run_id, _inputs(cell))
    client.log_dict(run_id, cell.to_json(), f"{CELL_FOLDER}/{CELL_FILE}")
    if cell.records_file is not None:
        with tempfile.TemporaryDirectory() as scratch:
            link = Path(scratch) / RECORDS_FILE
            link.symlink_to((folder.path / cell.records_file).resolve())
            client.log_artifact(run_id, str(link), CELL_FOLDER)
    client.set_terminated(run_id, "FINISHED" if cell.invalid is None else "FAILED", end_time=ended_at_ms)
    return run_id


def start_attempt(client: MlflowClient, experiment_id: str, logged: LoggedRuns, digest: str, cell_id: str) -> str:
    """A run for a cell that is about to be measured; one that an attempt before it left open is ended."""
    wanted = (
        f"tags.{TAG_KIND} = '{KIND_ATTEMPT}' and tags.`{TAG_SWEEP}` = '{digest}' "
        f"and tags.`{TAG_CELL_ID}` = '{cell_id}' and attributes.status = 'RUNNING'"
    )
    for left in client.search_runs([experiment_id], wanted):
        client.set_terminated(left.info.run_id, "KILLED")
    tags = {TAG_KIND: KIND_ATTEMPT, PARENT_RUN: logged.parent_run_id, TAG_SWEEP: digest, TAG_CELL_ID: cell_id}
    return str(client.create_run(experiment_id, run_name=cell_id, tags=tags).info.run_id)


def _open_run(client: MlflowClient, experiment_id: str, logged: LoggedRuns, cell: CellResult) -> str:
    """The run that followed the measurement live, else a new one."""
    tags = run_fields.cell_tags(cell, logged.parent_run_id)
    attempt = logged.attempts.get(cell.spec.cell_id)
    if attempt is not None:
        run = client.get_run(attempt)
        is_open = run.info.status == "RUNNING" and run.data.tags.get(TAG_KIND) == KIND_ATTEMPT
        if is_open and run.info.start_time <= cell.ended_at_s * 1000:
            client.log_batch(attempt, tags=[RunTag(name, value) for name, value in tags.items()])
            return attempt
    started_at_ms = round(cell.started_at_s * 1000)
    run = client.create_run(experiment_id, start_time=started_at_ms, run_name=cell.spec.cell_id, tags=tags)
    return str(run.info.run_id)


def _inputs(cell: CellResult) -> Inputs:
    spec = cell.spec
    made_from = {
        "seed": cell.prompt_seed,
        "num_requests": spec.num_requests,
        "vocabulary": f"{cell.model}@{cell.version}",
    }
    facts = {"engine_fingerprint": cell.engine_fingerprint, "hardware_fingerprint": cell.hardware_fingerprint}
    return Inputs(cell.model, cell.version, f"{spec.kind.value} prompts {spec.shape}", made_from, facts)
