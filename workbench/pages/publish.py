"""From what is kept to a page: the cells of a name with their requests, SLO and prices."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Protocol

from serving.core.errors import ServingError
from workbench.config import WorkbenchConfig
from workbench.costs.table import MeasuredCell, build
from workbench.loadgen import RequestRecord, Slo
from workbench.loadgen.records import read_parquet
from workbench.pages.draw import Measured, write_page
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import IMPORTED_FOLDER, ResultsFolder
from workbench.sweeps.run import SweepResult
from workbench.wiring import layout

PAGE_FOLDER = "report"
PAGE_FILE = "page.html"


class ArtifactSink(Protocol):
    """Where the files of a report go: MLflow."""

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        """Adds the files to the run's artifacts below `folder`. Raises ServingError."""
        ...


def publish_sweep(
    swept: SweepResult, config: WorkbenchConfig, artifacts: ArtifactSink | None
) -> tuple[Path | None, str | None]:
    """The page of a finished sweep, in its folder and its run: the file, and why it is not (or not in MLflow).

    A page that already shows the newest measurement is left as it is: its run has it.
    """
    if not swept.cells:
        return None, "nothing was measured"
    target = swept.folder / PAGE_FILE
    if target.exists() and target.stat().st_mtime >= max(cell.ended_at_s for cell in swept.cells):
        return target, None
    trouble = None
    try:
        run_ids = publish(swept.cells, config, target, swept.folder, artifacts)
    except (OSError, ValueError) as error:
        return None, str(error)
    except ServingError as error:
        run_ids, trouble = (), error.message
    if not run_ids:
        os.utime(target, (0, 0))  # older than every measurement: the next sweep brings it to MLflow
    return target, trouble


def publish(
    cells: Sequence[CellResult], config: WorkbenchConfig, target: Path, place: Path, artifacts: ArtifactSink | None
) -> tuple[str, ...]:
    """Writes the page of these cells and adds it to the runs of their sweeps; returns those runs.

    Args:
        cells: at least one.
        config: where sweeps are kept, SLO and prices.
        target: the file.
        place: where they were found, if that is a folder or file.
        artifacts: MLflow, or None where it does not run.

    Raises:
        OSError, ValueError: the page is not written, or a file of records is not readable.
        ServingError: MLflow did not take the page, which is written by then.
    """
    digests = sorted({cell.sweep_digest for cell in cells})
    results_dir = layout(config).results_dir
    kept = [ResultsFolder(at, digest) for at in (results_dir, results_dir / IMPORTED_FOLDER) for digest in digests]
    beside = [place, place.parent, *(place / digest for digest in digests)]
    logged = [one for folder in kept if folder.path.is_dir() and (one := folder.logged()) is not None]
    runs = {measurement: run_id for one in logged for measurement, run_id in one.runs.items()}
    write_page(measured(cells, config, [*(folder.path for folder in kept), *beside], runs), target)
    if artifacts is None:
        return ()
    run_ids = tuple(one.parent_run_id for one in logged)
    for run_id in run_ids:
        artifacts.log_files(run_id, [target], PAGE_FOLDER)
    return run_ids


def newest(cells: Sequence[CellResult]) -> list[CellResult]:
    """The last measurement of each cell of each sweep, in the order of their first."""
    found: dict[tuple[str, str], CellResult] = {}
    for cell in sorted(cells, key=lambda cell: cell.started_at_s):
        found[cell.sweep_digest, cell.spec.cell_id] = cell
    return list(found.values())


def measured(
    cells: Sequence[CellResult], config: WorkbenchConfig, folders: Sequence[Path], runs: Mapping[str, str]
) -> Measured:
    """What a page of these cells shows.

    Args:
        cells: at least one; of a cell that was measured again the newest counts.
        config: for SLO and prices of the hardware classes.
        folders: where request records may lie, first one first; a cell without them is shown without curves.
        runs: the MLflow run of each measurement; one that has none gets no price.

    Raises:
        ValueError: a file of records is not readable.
    """
    shown = newest(cells)
    classes = sorted({cell.hardware_class for cell in shown})
    slo = config.slo.of(classes[0])
    records = {cell.measurement_id: found for cell in shown if (found := _records(cell, folders)) is not None}
    table = build([MeasuredCell(cell, runs.get(cell.measurement_id)) for cell in shown], config.hardware)
    models = ", ".join(sorted({f"{cell.model}@{cell.version}" for cell in shown}))
    without = [cell.spec.cell_id for cell in shown if cell.measurement_id not in records]
    notes = [f"no request records here of {', '.join(without)}: no curves of them"] if without else []
    if len(classes) > 1:
        notes.append(f"the SLO drawn is that of {classes[0]}; cells are of {', '.join(classes)}")
    notes += [f"{skipped.cell_id} has no price: {skipped.reason}" for skipped in table.skipped]
    return Measured(
        title=f"{models} on {', '.join(classes)}",
        cells=shown,
        records=records,
        slo=Slo(slo.ttft_p99_s, slo.tpot_p99_s),
        prices=table.to_frame() if table.rows else None,
        notes=notes,
    )


def _records(cell: CellResult, folders: Sequence[Path]) -> list[RequestRecord] | None:
    for folder in folders:
        path = folder / str(cell.records_file)
        if cell.records_file is not None and path.is_file():
            return read_parquet(path)
    return None
