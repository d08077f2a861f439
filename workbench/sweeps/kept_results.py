"""Finds the cells that somebody means: by path, by sweep digest, by measurement or by MLflow run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import IMPORTED_FOLDER, SWEEP_FILE, ResultsBroken, ResultsFolder, folders

MIN_DIGEST = 4


class ResultNotFound(LookupError):
    """Nothing measured goes by that name; the message says what names there are."""


class RunReader(Protocol):
    """`tracking.Tracker`, as far as this module needs it."""

    def cells_of(self, run_id: str) -> list[CellResult]:
        """The measurements of a sweep's run, or that of a cell's run; empty when it is neither."""
        ...


def find_cells(reference: str, results_dir: Path, runs: RunReader | None = None) -> list[CellResult]:
    """The cells that `reference` names, oldest first.

    Args:
        reference: a folder of a sweep or one above several; a cell's JSON file; a sweep's digest, or enough of it;
            a measurement's id; the id of an MLflow run, of a sweep or of a cell.
        results_dir: where sweeps are kept.
        runs: MLflow, asked last.

    Raises:
        ResultNotFound: nothing goes by that name.
        ResultsBroken: a file of it cannot be read.
    """
    cells = _at_path(Path(reference)) or _by_digest(reference, results_dir) or _by_run(reference, results_dir)
    if not cells and runs is not None:
        cells = runs.cells_of(reference)
    if not cells:
        known = ", ".join(folder.sweep_digest for folder in folders(results_dir)) or "none"
        raise ResultNotFound(
            f"no result {reference!r}: name a folder, a sweep ({known} in {results_dir}), a cell's JSON file, "
            "or an MLflow run id"
        )
    return sorted(cells, key=lambda cell: cell.started_at_s)


def _at_path(path: Path) -> list[CellResult]:
    if path.is_file():
        try:
            return [CellResult.from_json(json.loads(path.read_text(encoding="utf-8")))]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise ResultsBroken(f"{path} is no measured cell: {error}") from error
    if (path / SWEEP_FILE).is_file():
        return ResultsFolder(path.parent, path.name).cells()
    return _cells_of(folders(path))


def _by_digest(reference: str, results_dir: Path) -> list[CellResult]:
    digest, _, rest = reference.partition("/")
    if len(digest) < MIN_DIGEST:
        return []
    every = [*folders(results_dir), *folders(results_dir / IMPORTED_FOLDER)]
    found = [folder for folder in every if folder.sweep_digest.startswith(digest)]
    if len(found) > 1:
        raise ResultNotFound(f"{digest!r} fits {', '.join(folder.sweep_digest for folder in found)}: give more of it")
    return [cell for cell in _cells_of(found) if not rest or _is_named(cell, rest)]


def _is_named(cell: CellResult, rest: str) -> bool:
    return rest in (cell.spec.cell_id, cell.measurement_id.partition("/")[2])


def _by_run(run_id: str, results_dir: Path) -> list[CellResult]:
    for folder in folders(results_dir):
        logged = folder.logged()
        if logged is None:
            continue
        if logged.parent_run_id == run_id:
            return folder.cells()
        ids = {measurement for measurement, run in logged.runs.items() if run == run_id}
        if ids:
            return [cell for cell in folder.cells() if cell.measurement_id in ids]
    return []


def _cells_of(found: Sequence[ResultsFolder]) -> list[CellResult]:
    return [cell for folder in found for cell in folder.cells()]
