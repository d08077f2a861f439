from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import pytest

from serving.core.state import Task
from tests.cells import make_cell
from workbench.loadgen.records import RequestRecord, read_parquet
from workbench.sweeps.cells import CellKind, file_stem
from workbench.sweeps.results import LoggedRuns, ResultsBroken, ResultsFolder, ResultsNotWritten, folders

RECORDS = [RequestRecord("r-0", 0, Task.GENERATE, 64, 32, 0.0, 0.0)]
SWEEP = {"plan": {"mode": "short"}, "replica": {}, "cells": ["mixed-64x32-c4", "prefill-64x1-c4"]}


def open_folder(tmp_path: Path) -> ResultsFolder:
    folder = ResultsFolder(tmp_path, "0123456789abcdef")
    folder.open(SWEEP)
    return folder


def test_cells_come_back_oldest_first_with_their_records(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    new = make_cell(started_at_s=20.0, records_file="new.parquet")
    old = make_cell(started_at_s=10.0)
    folder.write_cell(new, RECORDS)
    folder.write_cell(old, RECORDS)
    assert folder.cells() == [old, new]
    assert read_parquet(folder.path / "new.parquet") == RECORDS
    assert [found.sweep_digest for found in folders(tmp_path)] == ["0123456789abcdef"]


def test_a_sweep_is_complete_when_each_cell_was_measured(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    folder.write_cell(make_cell(), RECORDS)
    assert not folder.is_complete()
    folder.write_cell(make_cell(CellKind.PREFILL, invalid="warm"), RECORDS)
    assert folder.is_complete()


def test_what_mlflow_has_not_is_pending(tmp_path: Path) -> None:
    folder = open_folder(tmp_path)
    first, second = make_cell(started_at_s=10.0), make_cell(started_at_s=20.0)
    folder.write_cell(first, RECORDS)
    folder.write_cell(second, RECORDS)
    assert folder.logged() is None
    assert folder.pending() == [first, second]
    logged = LoggedRuns("http://mlflow", "parent", {first.measurement_id: "run"})
    folder.write_logged(logged)
    assert folder.logged() == logged
    assert folder.pending() == [second]


def test_opening_again_keeps_what_is_there(tmp_path: Path) -> None:
    open_folder(tmp_path)
    folder = ResultsFolder(tmp_path, "0123456789abcdef")
    folder.open({"plan": "another"})
    assert folder.sweep() == SWEEP


def test_a_full_disk_says_so_and_leaves_nothing_half_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = open_folder(tmp_path)
    folder.write_cell(make_cell(started_at_s=10.0), RECORDS)
    before = sorted(path.name for path in folder.path.iterdir())

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(ResultsNotWritten, match=r"disk is full: free some space, then run the sweep again"):
        folder.write_cell(make_cell(started_at_s=20.0), RECORDS)
    assert sorted(path.name for path in folder.path.iterdir()) == before
    assert len(folder.cells()) == 1


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "results").write_text("a file")
    with pytest.raises(ResultsNotWritten, match="results"):
        ResultsFolder(tmp_path / "results", "digest").open(SWEEP)
    assert folders(tmp_path / "nothing") == []


@pytest.mark.parametrize("text", ["", "[]", '{"schema": 99}', '{"schema": 1}', '{"schema": 1, "spec": 5}'])
def test_a_broken_cell_is_named(tmp_path: Path, text: str) -> None:
    folder = open_folder(tmp_path)
    (folder.path / f"{file_stem('mixed-64x32-c4', 1.0)}.json").write_text(text)
    with pytest.raises(ResultsBroken, match="mixed-64x32-c4"):
        folder.cells()
