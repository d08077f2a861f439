"""Sweeps, cells and cost tables in MLflow.

    experiment benchmarks/<model>   a sweep is a parent run, each measurement a nested run
    experiment cost-tables          a run holds one table as parquet and JSON
    any other                       `log_run`, for reports and decisions

Logging always goes from disk to MLflow: a sweep keeps its cells in a `ResultsFolder`, and `log_pending` brings
over what is missing there. So a server that is down costs nothing but time, and a call that is repeated, or was
cut off in the middle, finds its runs by their ids and makes no second ones.
"""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run
from mlflow.exceptions import MlflowException

from serving.control.registry import experiment, is_answer, mlflow_client, mlflow_errors
from serving.core.errors import NotFound
from workbench import run_fields
from workbench.costs import schema
from workbench.costs.schema import CostTableRow
from workbench.costs.table import CostTable, MeasuredCell
from workbench.provenance import git_commit
from workbench.run_fields import PARENT_RUN, TAG_CELL_KEY, TAG_KIND, TAG_MEASUREMENT, TAG_SWEEP, TAG_VALID
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import SWEEP_FILE, LoggedRuns, ResultsBroken, ResultsFolder, folders

T = TypeVar("T")

BENCHMARKS = "benchmarks/"
COST_TABLES = "cost-tables"
CELL_FOLDER = "cell"
CELL_FILE = "cell.json"
RECORDS_FILE = "records.parquet"
SWEEP_FOLDER = "sweep"
COST_TABLE_FOLDER = "cost_table"
PAGE_SIZE = 500


@dataclass(frozen=True, slots=True)
class Logged:
    """What a call of `log_pending` brought over: run ids by measurement id, and the sweeps' parent runs."""

    runs: Mapping[str, str]
    parent_run_ids: tuple[str, ...]


class Tracker:
    """The MLflow server at `tracking_uri`. Every method blocks; call it from a thread.

    Every method raises `RegistryUnavailable` when the server does not answer (within seconds) and
    `RegistryRefused` when it answers with an error.
    """

    def __init__(self, tracking_uri: str) -> None:
        self.tracking_uri = tracking_uri

    def log_sweep(self, folder: ResultsFolder) -> Logged:
        """Logs each measurement of the sweep that MLflow does not have yet, exactly once.

        The parent run ends when every cell of the plan has been measured.

        Raises:
            ResultsBroken: a file of the sweep cannot be read.
        """
        with self._client() as client:
            sweep = _sweep_of(folder)
            experiment_id = experiment(client, BENCHMARKS + str(sweep["replica"]["model"]))
            logged = folder.logged()
            if logged is None or not self._holds(client, logged):
                logged = LoggedRuns(self.tracking_uri, _parent_run(client, experiment_id, folder, sweep))
            new: dict[str, str] = {}
            for cell in folder.cells():
                if cell.measurement_id in logged.runs:
                    continue
                run_id = _log_cell(client, experiment_id, logged.parent_run_id, folder, cell)
                new[cell.measurement_id] = run_id
                logged = replace(logged, runs={**logged.runs, cell.measurement_id: run_id})
                folder.write_logged(logged)
            if folder.is_complete():
                client.set_terminated(logged.parent_run_id)
            folder.write_logged(logged)
            return Logged(new, (logged.parent_run_id,))

    def log_pending(self, results_dir: Path) -> Logged:
        """Logs whatever any sweep under `results_dir` still keeps for MLflow.

        Raises:
            ResultsBroken: sweeps of which a file cannot be read; every other one has been logged by then.
        """
        runs: dict[str, str] = {}
        parents: list[str] = []
        broken: list[str] = []
        for folder in folders(results_dir):
            try:
                if not folder.pending():
                    continue
                logged = self.log_sweep(folder)
            except ResultsBroken as error:
                broken.append(str(error))
            else:
                runs.update(logged.runs)
                parents.extend(logged.parent_run_ids)
        if broken:
            raise ResultsBroken("\n".join(broken))
        return Logged(runs, tuple(parents))

    def _holds(self, client: MlflowClient, logged: LoggedRuns) -> bool:
        """Whether the marker speaks of this server, and of a database that was not emptied since."""
        if logged.tracking_uri != self.tracking_uri:
            return False
        try:
            return bool(client.get_run(logged.parent_run_id).info.lifecycle_stage == "active")
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return False
            raise

    def cells(
        self, models: Sequence[str] | None = None, *, on_broken: Callable[[str], object] | None = None
    ) -> list[MeasuredCell]:
        """The newest valid measurement of each cell that MLflow holds, of all models or of those named.

        Args:
            models: their names.
            on_broken: told of each run whose artifact cannot be read, which is then left out.

        Raises:
            ResultsBroken: an artifact cannot be read, and there is no `on_broken`.
        """
        with self._client() as client, tempfile.TemporaryDirectory() as scratch:
            names = None if models is None else [BENCHMARKS + model for model in models]
            newest: dict[str, Run] = {}
            for run in _runs(client, names, f"tags.{TAG_KIND} = 'cell' and tags.{TAG_VALID} = 'true'"):
                newest.setdefault(run.data.tags[TAG_CELL_KEY], run)
            found = []
            for run in newest.values():
                try:
                    found.append(_measured(client, run, Path(scratch)))
                except ResultsBroken as error:
                    if on_broken is None:
                        raise
                    on_broken(str(error))
            return found

    def cells_of(self, run_id: str) -> list[CellResult]:
        """Every measurement of a sweep's run, valid or not, or that of a cell's run; none of any other run.

        Raises:
            ResultsBroken: an artifact cannot be read.
        """
        with self._client() as client, tempfile.TemporaryDirectory() as scratch:
            try:
                run = client.get_run(run_id)
            except MlflowException as error:
                if error.error_code in ("RESOURCE_DOES_NOT_EXIST", "INVALID_PARAMETER_VALUE"):
                    return []
                raise
            found = [run] if run.data.tags.get(TAG_KIND) == "cell" else []
            if run.data.tags.get(TAG_KIND) == "sweep":
                name = client.get_experiment(run.info.experiment_id).name
                found = list(_runs(client, [name], f"tags.`{PARENT_RUN}` = '{run_id}'"))
            return [_measured(client, cell, Path(scratch)).result for cell in found]

    def log_cost_table(self, table: CostTable, *, params: Mapping[str, object] | None = None) -> str:
        """Logs the table as a run of `cost-tables`; returns the run's id."""
        models = sorted({row.model for row in table.rows})
        with tempfile.TemporaryDirectory() as scratch:
            files = schema.write(table.rows, Path(scratch))
            return self.log_run(
                COST_TABLES,
                f"cost table of {', '.join(models) or 'nothing'}",
                tags={TAG_KIND: "cost-table", "models": ",".join(models)},
                params={"schema_version": schema.COST_TABLE_SCHEMA, **(params or {})},
                metrics={"num_rows": len(table.rows), "num_skipped": len(table.skipped)},
                files={COST_TABLE_FOLDER: files},
            )

    def cost_table(self, run_id: str | None = None) -> tuple[str, tuple[CostTableRow, ...]]:
        """A table and its run: that of `run_id`, else the newest.

        Raises:
            NotFound: there is none yet.
            ResultsBroken: its artifact cannot be read.
        """
        with self._client() as client, tempfile.TemporaryDirectory() as scratch:
            if run_id is None:
                run = next(_runs(client, [COST_TABLES], f"tags.{TAG_KIND} = 'cost-table'"), None)
                if run is None:
                    raise NotFound(
                        "no cost table yet: measure with `workbench sweep`, then `workbench cost-table build`"
                    )
                run_id = run.info.run_id
            name = f"{COST_TABLE_FOLDER}/{schema.JSON_NAME}"
            return run_id, _artifact(client, run_id, name, Path(scratch), schema.from_json)

    def log_run(
        self,
        experiment_name: str,
        run_name: str,
        *,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, Sequence[Path]] | None = None,
    ) -> str:
        """Logs a finished run of any experiment; `files` are artifacts by folder. Returns the run's id.

        Raises:
            ValueError: a metric is NaN or infinite.
        """
        with self._client() as client:
            experiment_id = experiment(client, experiment_name)
            all_tags = {"commit": git_commit(), **(tags or {})}
            run_id = client.create_run(experiment_id, run_name=run_name, tags=all_tags).info.run_id
            _log_values(client, run_id, params or {}, metrics or {})
            for folder, paths in (files or {}).items():
                for path in paths:
                    client.log_artifact(run_id, str(path), folder)
            client.set_terminated(run_id)
            return str(run_id)

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        """Adds artifacts to a run, such as an executed notebook to its sweep."""
        with self._client() as client:
            for path in paths:
                client.log_artifact(run_id, str(path), folder)

    def runs(self, experiment_name: str) -> pd.DataFrame:
        """The experiment's runs, newest first: `run_id`, `status`, `started_at`, then params, metrics and tags."""
        with self._client() as client:
            rows = [_run_row(run) for run in _runs(client, [experiment_name], "")]
        return pd.DataFrame(rows, columns=None if rows else ["run_id", "status", "started_at"])

    @contextmanager
    def _client(self) -> Iterator[MlflowClient]:
        with mlflow_errors(self.tracking_uri):
            yield mlflow_client(self.tracking_uri)


def _sweep_of(folder: ResultsFolder) -> dict[str, Any]:
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


def _parent_run(client: MlflowClient, experiment_id: str, folder: ResultsFolder, sweep: Mapping[str, Any]) -> str:
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
    _log_values(client, run_id, run_fields.sweep_params(sweep), {})
    client.log_dict(run_id, dict(sweep), f"{SWEEP_FOLDER}/sweep.json")
    return run_id


def _log_cell(
    client: MlflowClient, experiment_id: str, parent_run_id: str, folder: ResultsFolder, cell: CellResult
) -> str:
    """The measurement's run: the one that a call before this one made, completed if it was cut off, or a new one."""
    found = client.search_runs([experiment_id], f"tags.`{TAG_MEASUREMENT}` = '{cell.measurement_id}'", max_results=1)
    if found and found[0].info.status != "RUNNING":
        return str(found[0].info.run_id)
    run = found[0] if found else _start_cell(client, experiment_id, parent_run_id, cell)
    run_id = str(run.info.run_id)
    ended_at_ms = round(cell.ended_at_s * 1000)
    _log_values(client, run_id, run_fields.cell_params(cell), run_fields.cell_metrics(cell), at_ms=ended_at_ms)
    client.log_dict(run_id, cell.to_json(), f"{CELL_FOLDER}/{CELL_FILE}")
    if cell.records_file is not None:
        with tempfile.TemporaryDirectory() as scratch:
            link = Path(scratch) / RECORDS_FILE
            link.symlink_to((folder.path / cell.records_file).resolve())
            client.log_artifact(run_id, str(link), CELL_FOLDER)
    client.set_terminated(run_id, "FINISHED" if cell.invalid is None else "FAILED", end_time=ended_at_ms)
    return run_id


def _start_cell(client: MlflowClient, experiment_id: str, parent_run_id: str, cell: CellResult) -> Run:
    tags = run_fields.cell_tags(cell, parent_run_id)
    started_at_ms = round(cell.started_at_s * 1000)
    return client.create_run(experiment_id, start_time=started_at_ms, run_name=cell.spec.cell_id, tags=tags)


def _log_values(
    client: MlflowClient,
    run_id: str,
    params: Mapping[str, object],
    metrics: Mapping[str, float],
    at_ms: int | None = None,
) -> None:
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} is {value}: MLflow would store it as another number")
    at_ms = round(time.time() * 1000) if at_ms is None else at_ms
    client.log_batch(
        run_id,
        metrics=[Metric(name, float(value), at_ms, 0) for name, value in metrics.items()],
        params=[Param(name, str(value)[: run_fields.MAX_VALUE_LENGTH]) for name, value in params.items()],
    )


def _runs(client: MlflowClient, experiment_names: Sequence[str] | None, filter_string: str) -> Iterator[Run]:
    """Runs of the named experiments (all of the benchmarks when None), newest first, page by page."""
    if experiment_names is None:
        ids = [e.experiment_id for e in client.search_experiments(filter_string=f"name LIKE '{BENCHMARKS}%'")]
    else:
        found = [client.get_experiment_by_name(name) for name in experiment_names]
        ids = [e.experiment_id for e in found if e is not None]
    token = None
    while ids:
        page = client.search_runs(
            ids, filter_string, max_results=PAGE_SIZE, order_by=["attributes.start_time DESC"], page_token=token
        )
        yield from page
        token = page.token
        if not token:
            return


def _measured(client: MlflowClient, run: Run, scratch: Path) -> MeasuredCell:
    folder = scratch / run.info.run_id
    folder.mkdir()
    name = f"{CELL_FOLDER}/{CELL_FILE}"
    return MeasuredCell(_artifact(client, run.info.run_id, name, folder, CellResult.from_json), run.info.run_id)


def _artifact(client: MlflowClient, run_id: str, name: str, folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
    """The parsed JSON of a run's artifact.

    Raises:
        ResultsBroken: it is not there, or is not what was logged; names the run.
    """
    try:
        path = client.download_artifacts(run_id, name, str(folder))
        return parse(json.loads(Path(path).read_text(encoding="utf-8")))
    except (MlflowException, OSError) as error:
        if not is_answer(error):
            raise
        raise _broken(run_id, name, error) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise _broken(run_id, name, error) from error


def _broken(run_id: str, name: str, error: Exception) -> ResultsBroken:
    return ResultsBroken(
        f"artifact {name} of MLflow run {run_id} cannot be read ({type(error).__name__}: {error}); "
        "delete the run in MLflow and measure again"
    )


def _run_row(run: Run) -> dict[str, Any]:
    return {
        "run_id": run.info.run_id,
        "status": run.info.status,
        "started_at": pd.Timestamp(run.info.start_time, unit="ms", tz="UTC"),
        **{f"params.{name}": value for name, value in run.data.params.items()},
        **run.data.metrics,
        **{f"tags.{name}": value for name, value in run.data.tags.items() if not name.startswith("mlflow.")},
    }
