"""A sweep on disk: what was measured is safe here before anybody else hears of it.

    results/<sweep digest>/sweep.json                        the plan and the replica
                           mixed-64x32-c4.1790000000000.json     a cell, named by when it began
                           mixed-64x32-c4.1790000000000.parquet  its request records
                           mlflow.json                       which cell is which MLflow run
                           skipped.json                      cells that need no measurement, and why

Every file is written whole or not at all; a cell's JSON comes after its parquet, so that a cell that is
there is complete. Nothing is overwritten: a cell that is measured again lies beside the older one.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from workbench.loadgen.records import RequestRecord, write_parquet
from workbench.sweeps.cells import CellResult, file_stem

SWEEP_FILE = "sweep.json"
MARKER_FILE = "mlflow.json"
SKIPPED_FILE = "skipped.json"
IMPORTED_FOLDER = "imported"
"""Of results that other tools measured: beside ours, never among them."""


class ResultsNotWritten(Exception):
    """A result could not be kept; the message names the folder and what to do. What lies there is untouched."""


class ResultsBroken(Exception):
    """A file of a sweep cannot be read; the message names it."""


@dataclass(frozen=True, slots=True)
class LoggedRuns:
    """Where a sweep is in MLflow: its parent run, and the run of each measurement by its id.

    `attempts` are runs of cells that were being measured when this was written, by the cell's id.
    """

    tracking_uri: str
    parent_run_id: str
    runs: Mapping[str, str] = field(default_factory=dict)
    attempts: Mapping[str, str] = field(default_factory=dict)


class ResultsFolder:
    """The folder of one sweep."""

    def __init__(self, results_dir: Path, sweep_digest: str) -> None:
        self.path = results_dir / sweep_digest
        self.sweep_digest = sweep_digest

    def open(self, sweep: Mapping[str, Any]) -> None:
        """Makes the folder and keeps what the sweep is, unless it is already there.

        Raises:
            ResultsNotWritten: the disk is full or the folder is not ours.
        """
        with _writing(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        if not (self.path / SWEEP_FILE).exists():
            self._write_json(SWEEP_FILE, sweep)

    def sweep(self) -> dict[str, Any]:
        """What the sweep is. Raises ResultsBroken."""
        return self._read_json(SWEEP_FILE)

    def write_cell(self, cell: CellResult, records: Sequence[RequestRecord]) -> None:
        """Keeps a cell and its request records.

        Raises:
            ResultsNotWritten: the disk is full or the folder is not ours.
        """
        data = cell.to_json()
        if cell.records_file is not None:
            path = self.path / cell.records_file
            self._whole(path, lambda: write_parquet(records, path))
        self._write_json(f"{file_stem(cell.spec.cell_id, cell.started_at_s)}.json", data)

    def cells(self) -> list[CellResult]:
        """Every measurement of this sweep, oldest first. Raises ResultsBroken."""
        found = []
        for path in sorted(self.path.glob("*.json")):
            if path.name in (SWEEP_FILE, MARKER_FILE, SKIPPED_FILE):
                continue
            try:
                found.append(CellResult.from_json(self._read_json(path.name)))
            except (ValueError, KeyError, TypeError, AttributeError) as error:
                raise ResultsBroken(f"{path}: {error}; remove it to measure the cell again") from error
        return sorted(found, key=lambda cell: cell.started_at_s)

    def is_complete(self) -> bool:
        """Whether every cell of the plan has been measured, validly or not, or needs none. Raises ResultsBroken."""
        return set(self.sweep()["cells"]) <= {cell.spec.cell_id for cell in self.cells()} | set(self.skipped())

    def skipped(self) -> dict[str, str]:
        """Why a cell needs no measurement, by its id. Raises ResultsBroken."""
        return self._read_json(SKIPPED_FILE) if (self.path / SKIPPED_FILE).exists() else {}

    def write_skipped(self, reasons: Mapping[str, str]) -> None:
        """Keeps which cells need no measurement. Raises ResultsNotWritten."""
        self._write_json(SKIPPED_FILE, reasons)

    def logged(self) -> LoggedRuns | None:
        """What is in MLflow of it; None when nothing is. Raises ResultsBroken."""
        if not (self.path / MARKER_FILE).exists():
            return None
        try:
            return LoggedRuns(**self._read_json(MARKER_FILE))
        except TypeError as error:
            raise ResultsBroken(f"{self.path / MARKER_FILE}: {error}; remove it: runs are found again") from error

    def write_logged(self, logged: LoggedRuns) -> None:
        """Keeps what is in MLflow. Raises ResultsNotWritten."""
        self._write_json(MARKER_FILE, asdict(logged))

    def pending(self) -> list[CellResult]:
        """Measurements that are not in MLflow yet, oldest first. Raises ResultsBroken."""
        logged = self.logged()
        known = logged.runs if logged is not None else {}
        return [cell for cell in self.cells() if cell.measurement_id not in known]

    def _write_json(self, name: str, data: Mapping[str, Any]) -> None:
        path = self.path / name
        partial = _partial(path)

        def write() -> None:
            with partial.open("w", encoding="utf-8") as file:
                json.dump(data, file, indent=1, allow_nan=False)
                file.flush()
                os.fsync(file.fileno())
            partial.replace(path)

        self._whole(path, write)

    def _whole(self, path: Path, write: Callable[[], None]) -> None:
        with _writing(path):
            try:
                write()
            except BaseException:
                _partial(path).unlink(missing_ok=True)
                raise

    def _read_json(self, name: str) -> dict[str, Any]:
        path = self.path / name
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ResultsBroken(f"{path} cannot be read: {error}") from error
        if not isinstance(data, dict):
            raise ResultsBroken(f"{path} holds no JSON object")
        return data


def folders(results_dir: Path) -> list[ResultsFolder]:
    """The sweeps kept under `results_dir`."""
    if not results_dir.is_dir():
        return []
    return [ResultsFolder(results_dir, path.parent.name) for path in sorted(results_dir.glob(f"*/{SWEEP_FILE}"))]


def _partial(path: Path) -> Path:
    return path.with_name(path.name + ".partial")


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    """A failure to write, as one that says what to do."""
    try:
        yield
    except OSError as error:
        what = "the disk is full: free some space" if error.errno == errno.ENOSPC else error.strerror or str(error)
        raise ResultsNotWritten(
            f"cannot write {path}: {what}, then run the sweep again: finished cells are kept"
        ) from error
