"""The MLflow server as everybody else uses it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Run, RunTag
from mlflow.exceptions import MlflowException

from serving.control.registry import experiment, mlflow_client, mlflow_errors
from serving.core.errors import NotFound
from workbench.costs import schema
from workbench.costs.schema import CostTableRow
from workbench.costs.table import CostTable, MeasuredCell
from workbench.provenance import git_commit
from workbench.run_fields import KIND_ATTEMPT, PARENT_RUN, TAG_CELL_KEY, TAG_KIND, TAG_VALID, RunFields
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import LoggedRuns, ResultsBroken, ResultsFolder, folders
from workbench.tracking.family import log_family
from workbench.tracking.inputs import Inputs, log_inputs
from workbench.tracking.live import LiveRun
from workbench.tracking.names import BENCHMARKS, COST_TABLE_FOLDER, COST_TABLES
from workbench.tracking.reading import artifact, found_runs, measured, run_row
from workbench.tracking.sweep_runs import log_cell, parent_run, start_attempt, sweep_of
from workbench.tracking.values import log_values


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
            experiment_id, logged = self._opened(client, folder)
            new: dict[str, str] = {}
            for cell in folder.cells():
                if cell.measurement_id in logged.runs:
                    continue
                run_id = log_cell(client, experiment_id, logged, folder, cell)
                new[cell.measurement_id] = run_id
                logged = replace(logged, runs={**logged.runs, cell.measurement_id: run_id})
                folder.write_logged(logged)
            if folder.is_complete():
                client.set_terminated(logged.parent_run_id)
            folder.write_logged(logged)
            return Logged(new, (logged.parent_run_id,))

    def start_cell(self, folder: ResultsFolder, cell_id: str) -> LiveRun:
        """A run for a cell that is about to be measured; `log_sweep` puts the measurement into it.

        Raises:
            ResultsBroken: a file of the sweep cannot be read.
        """
        with self._client() as client:
            experiment_id, logged = self._opened(client, folder)
            run_id = start_attempt(client, experiment_id, logged, folder.sweep_digest, cell_id)
            folder.write_logged(replace(logged, attempts={**logged.attempts, cell_id: run_id}))
            return LiveRun(client, run_id)

    def start_run(self, experiment_name: str, run_name: str, *, tags: Mapping[str, str] | None = None) -> LiveRun:
        """A run for what is about to be measured; `log_run` with its id completes it."""
        with self._client() as client:
            experiment_id = experiment(client, experiment_name)
            all_tags = {TAG_KIND: KIND_ATTEMPT, "commit": git_commit(), **(tags or {})}
            return LiveRun(client, client.create_run(experiment_id, run_name=run_name, tags=all_tags).info.run_id)

    def _opened(self, client: MlflowClient, folder: ResultsFolder) -> tuple[str, LoggedRuns]:
        """The sweep's experiment, and what is in MLflow of it: its parent run at least."""
        sweep = sweep_of(folder)
        experiment_id = experiment(client, BENCHMARKS + str(sweep["replica"]["model"]))
        logged = folder.logged()
        if logged is None or not self._holds(client, logged):
            logged = LoggedRuns(self.tracking_uri, parent_run(client, experiment_id, folder, sweep))
        return experiment_id, logged

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
            for run in found_runs(client, names, f"tags.{TAG_KIND} = 'cell' and tags.{TAG_VALID} = 'true'"):
                newest.setdefault(run.data.tags[TAG_CELL_KEY], run)
            found = []
            for run in newest.values():
                try:
                    found.append(measured(client, run, Path(scratch)))
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
                found = list(
                    found_runs(client, [name], f"tags.{TAG_KIND} = 'cell' and tags.`{PARENT_RUN}` = '{run_id}'")
                )
            return [measured(client, cell, Path(scratch)).result for cell in found]

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
                run = next(found_runs(client, [COST_TABLES], f"tags.{TAG_KIND} = 'cost-table'"), None)
                if run is None:
                    raise NotFound(
                        "no cost table yet: measure with `workbench sweep`, then `workbench cost-table build`"
                    )
                run_id = run.info.run_id
            name = f"{COST_TABLE_FOLDER}/{schema.JSON_NAME}"
            return run_id, artifact(client, run_id, name, Path(scratch), schema.from_json)

    def log_run(
        self,
        experiment_name: str,
        run_name: str,
        *,
        tags: Mapping[str, str] | None = None,
        params: Mapping[str, object] | None = None,
        metrics: Mapping[str, float] | None = None,
        files: Mapping[str, Sequence[Path]] | None = None,
        inputs: Inputs | None = None,
        run_id: str | None = None,
    ) -> str:
        """Logs a finished run of any experiment; returns its id.

        Args:
            experiment_name: made when there is none.
            run_name: what people read.
            tags: of the run.
            params: of the run.
            metrics: finite ones.
            files: artifacts by folder.
            inputs: dataset and model that it was measured on.
            run_id: a run of `start_run` to complete instead of a new one.

        Raises:
            ValueError: a metric is NaN or infinite.
        """
        with self._client() as client:
            experiment_id = experiment(client, experiment_name)
            all_tags = {"commit": git_commit(), **(tags or {})}
            if run_id is None:
                run_id = str(client.create_run(experiment_id, run_name=run_name, tags=all_tags).info.run_id)
            else:
                client.log_batch(run_id, tags=[RunTag(name, value) for name, value in all_tags.items()])
            if inputs is not None:
                log_inputs(client, experiment_id, run_id, inputs)
            log_values(client, run_id, params or {}, metrics or {})
            for folder, paths in (files or {}).items():
                for path in paths:
                    client.log_artifact(run_id, str(path), folder)
            client.set_terminated(run_id)
            return run_id

    def log_family(
        self,
        experiment_name: str,
        parent: RunFields,
        children: Sequence[RunFields],
        files: Mapping[str, Sequence[Path]] | None = None,
    ) -> str:
        """Logs a run with nested ones; called again it adds what is new. Returns the parent's id."""
        with self._client() as client:
            return log_family(client, experiment(client, experiment_name), parent, children, files or {})

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        """Adds artifacts to a run, such as an executed notebook to its sweep."""
        with self._client() as client:
            for path in paths:
                client.log_artifact(run_id, str(path), folder)

    def runs(self, experiment_name: str) -> pd.DataFrame:
        """The experiment's runs, newest first: `run_id`, `status`, `started_at`, then params, metrics and tags."""
        with self._client() as client:
            rows = [run_row(run) for run in found_runs(client, [experiment_name], "")]
        return pd.DataFrame(rows, columns=None if rows else ["run_id", "status", "started_at"])

    @contextmanager
    def _client(self) -> Iterator[MlflowClient]:
        with mlflow_errors(self.tracking_uri):
            yield mlflow_client(self.tracking_uri)
