"""The Python API of notebooks: `workbench.connect()`, `sweep()`, `runs()`, `cost_table()`, `client()`.

A `Connection` is a configuration and what runs from it. The functions use the last one that `connect()` made,
and make one when there is none. Heavy packages are imported by the call that needs them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from workbench.config import WorkbenchConfig, load_config
from workbench.wiring import NotRunning, gateway_url, mlflow_uri

if TYPE_CHECKING:
    import openai
    import pandas as pd

    from workbench.sweeps.cells import Shape
    from workbench.sweeps.finished import Sweep
    from workbench.sweeps.run import SweepProgress
    from workbench.tracking import Tracker

# The notebook output that names an MLflow run; `workbench/report.py` looks for it.
RUN_MIME = "application/vnd.workbench.run+json"


@dataclass(frozen=True, slots=True)
class Connection:
    """The workbench as one configuration describes it. Addresses are looked up when they are used."""

    config: WorkbenchConfig

    @property
    def gateway_url(self) -> str:
        """The endpoint without `/v1`. Raises NotRunning."""
        return gateway_url(self.config)

    @property
    def mlflow_uri(self) -> str:
        """MLflow's address. Raises NotRunning."""
        return mlflow_uri(self.config)

    @property
    def tracker(self) -> Tracker:
        """MLflow's adapter. Raises NotRunning."""
        from workbench.tracking import Tracker

        return Tracker(self.mlflow_uri)

    def __repr__(self) -> str:
        return (
            f"<workbench of {self.config.file}: models {', '.join(self.config.models)}; "
            f"endpoint {_or_why_not(lambda: self.gateway_url + '/v1')}; MLflow {_or_why_not(lambda: self.mlflow_uri)}>"
        )


def _or_why_not(address: Callable[[], str]) -> str:
    try:
        return address()
    except NotRunning:
        return "does not run"


_connections: list[Connection] = []


def connect(config: Path | str | None = None) -> Connection:
    """Reads the configuration and makes it the one that the other calls use.

    Args:
        config: the file; else $WORKBENCH_CONFIG; else the nearest workbench.yaml from the working folder upwards.

    Raises:
        ConfigError: no file, or mistakes in it.
    """
    connection = Connection(load_config(config))
    _connections[:] = [connection]
    return connection


def connected() -> Connection:
    """What `connect()` made, or makes now."""
    return _connections[0] if _connections else connect()


def client() -> openai.OpenAI:
    """An OpenAI client of the gateway. Raises NotRunning."""
    import openai

    return openai.OpenAI(base_url=f"{connected().gateway_url}/v1", api_key="not-needed-on-loopback")


def sweep(
    model: str,
    *,
    mode: str = "short",
    concurrencies: Sequence[int] | None = None,
    num_prompt_tokens: int | None = None,
    num_output_tokens: int | None = None,
    replica: str | None = None,
    max_age_s: float | None = None,
    on_progress: Callable[[SweepProgress], None] | None = None,
) -> Sweep:
    """Measures a replica of the running stack; it serves nobody else meanwhile. Blocks until it is done.

    Args:
        model: a served name, `name@version` for another version than the champion.
        mode: `short` (about a minute on a CPU core) or `full` (the figures to publish).
        concurrencies: requests in flight, a cell each; None takes the mode's.
        num_prompt_tokens: of each request; None takes the mode's shapes.
        num_output_tokens: of each request, given together with `num_prompt_tokens`; none for embeddings.
        replica: which replica; any ready one of the model when None.
        max_age_s: finished cells older than this are measured again, 0 measures all; 15 days when None.
        on_progress: told of every step; prints a line a cell when None.

    Raises:
        NotRunning, NotFound, Unavailable, ReplicaReserved, ReplicaBusy, ReplicaLost, WorkloadError: as
            `workbench.sweeps.on_stack.sweep_on_stack`.
        ValueError: no such mode, or a shape that is none.
    """
    from workbench.sweeps.finished import Sweep
    from workbench.sweeps.on_stack import SweepRequest, sweep_on_stack
    from workbench.sweeps.run import SweepMode
    from workbench.sync import run_sync

    connection = connected()
    request = SweepRequest(
        model=model,
        mode=SweepMode(mode),
        shapes=_shapes(num_prompt_tokens, num_output_tokens),
        concurrencies=tuple(concurrencies) if concurrencies else None,
        replica_id=replica,
        max_age_s=max_age_s,
    )
    tracker = _tracker_or_none(connection)
    result = run_sync(
        lambda: sweep_on_stack(connection.config, request, tracker=tracker, on_progress=on_progress or _print_cells)
    )
    hardware_class = result.cells[0].hardware_class if result.cells else ""
    return Sweep(result, connection.config.slo.of(hardware_class), connection.config.hardware)


def runs(model: str | None = None, *, kind: str = "cell") -> pd.DataFrame:
    """What MLflow holds of a model's sweeps (of all models in the configuration when None), newest first.

    Args:
        model: the served name.
        kind: `cell` for measurements, `sweep` for the sweeps that they belong to.

    Returns:
        A row a run: `run_id`, `status`, `started_at`, then `params.…`, metrics and `tags.…`.

    Raises:
        NotRunning, RegistryUnavailable, RegistryRefused: MLflow is not there, or said no.
    """
    import pandas as pd

    connection = connected()
    tracker = connection.tracker
    names = [model] if model is not None else list(connection.config.models)
    frames = [tracker.runs(f"benchmarks/{name}") for name in names]
    found = pd.concat(frames, ignore_index=True)
    if "tags.kind" in found.columns:
        found = found[found["tags.kind"] == kind]
    return found.sort_values("started_at", ascending=False, ignore_index=True).dropna(axis="columns", how="all")


def cost_table(run_id: str | None = None) -> pd.DataFrame:
    """A cost table that was built: that of `run_id`, else the newest. A row a model, hardware, shape, concurrency.

    Raises:
        NotFound: there is none yet.
        NotRunning, RegistryUnavailable, RegistryRefused: MLflow is not there, or said no.
    """
    from workbench.costs.schema import to_frame

    _, rows = connected().tracker.cost_table(run_id)
    return to_frame(rows)


def record_run(mlflow_run_id: str | None) -> None:
    """Says that this notebook's results are in that MLflow run: a report adds its files to it.

    Shows the id; outside a notebook it only prints it. None says that MLflow has nothing of it yet.
    """
    text = f"MLflow run {mlflow_run_id}" if mlflow_run_id else "not in MLflow yet; results are on disk"
    if mlflow_run_id is None or "IPython" not in sys.modules:
        sys.stdout.write(text + "\n")
        return
    from IPython.display import display

    display({RUN_MIME: {"mlflow_run_id": mlflow_run_id}, "text/plain": text}, raw=True)


def _shapes(num_prompt_tokens: int | None, num_output_tokens: int | None) -> tuple[Shape, ...] | None:
    from workbench.sweeps.cells import Shape

    if num_prompt_tokens is None:
        if num_output_tokens is not None:
            raise ValueError("num_output_tokens is given without num_prompt_tokens: a shape needs both")
        return None
    return (Shape(num_prompt_tokens, num_output_tokens or 0),)


def _tracker_or_none(connection: Connection) -> Tracker | None:
    """Without MLflow a sweep keeps its results on disk."""
    try:
        return connection.tracker
    except NotRunning:
        return None


def _print_cells(progress: SweepProgress) -> None:
    """A line a step; requests inside a cell are not printed."""
    if progress.message:
        where = f"[{progress.cell_number}/{progress.num_cells}] " if progress.cell_number else ""
        sys.stdout.write(f"{where}{progress.message}\n")
        sys.stdout.flush()
