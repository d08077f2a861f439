"""What MLflow holds: runs of experiments, and the artifacts of a run as what they were."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

import pandas as pd
from mlflow import MlflowClient
from mlflow.entities import Run
from mlflow.exceptions import MlflowException

from serving.control.registry import is_answer
from workbench.costs.table import MeasuredCell
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import ResultsBroken
from workbench.tracking.names import BENCHMARKS, CELL_FILE, CELL_FOLDER

T = TypeVar("T")
PAGE_SIZE = 500


def found_runs(client: MlflowClient, experiment_names: Sequence[str] | None, filter_string: str) -> Iterator[Run]:
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


def measured(client: MlflowClient, run: Run, scratch: Path) -> MeasuredCell:
    """The cell of a run, as it was measured. Raises ResultsBroken."""
    folder = scratch / run.info.run_id
    folder.mkdir()
    name = f"{CELL_FOLDER}/{CELL_FILE}"
    return MeasuredCell(artifact(client, run.info.run_id, name, folder, CellResult.from_json), run.info.run_id)


def artifact(client: MlflowClient, run_id: str, name: str, folder: Path, parse: Callable[[dict[str, Any]], T]) -> T:
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


def run_row(run: Run) -> dict[str, Any]:
    """The run as a row of a frame."""
    return {
        "run_id": run.info.run_id,
        "status": run.info.status,
        "started_at": pd.Timestamp(run.info.start_time, unit="ms", tz="UTC"),
        **{f"params.{name}": value for name, value in run.data.params.items()},
        **run.data.metrics,
        **{f"tags.{name}": value for name, value in run.data.tags.items() if not name.startswith("mlflow.")},
    }
