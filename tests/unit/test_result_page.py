"""The page of a sweep: whole in one file, nothing from elsewhere, warnings before figures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from serving.core.errors import Unavailable
from tests.cells import make_cell
from tests.unit.test_result_plots import Price, served
from workbench.config import WorkbenchConfig, load_config
from workbench.costs.table import MeasuredCell, build
from workbench.loadgen import Slo
from workbench.loadgen.records import write_parquet
from workbench.pages.draw import Measured, page, warnings, write_page
from workbench.pages.publish import measured, publish_sweep
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape
from workbench.sweeps.results import LoggedRuns, ResultsFolder
from workbench.sweeps.run import SweepResult
from workbench.wiring import layout

SLO = Slo(1.0, 0.1)


def a_sweep() -> Measured:
    cells = [make_cell(CellKind.PREFILL), make_cell(CellKind.CACHED), make_cell(concurrency=1), make_cell()]
    records = {cell.measurement_id: [served(index, 0.1 + index / 100) for index in range(30)] for cell in cells}
    prices = build([MeasuredCell(cell, "run") for cell in cells], {"cpu": Price()}).to_frame()
    return Measured("smollm2-135m@1 on <cpu>", cells, records, SLO, prices)


def test_a_page_needs_nothing_from_elsewhere_and_fits_a_phone(tmp_path: Path) -> None:
    write_page(a_sweep(), tmp_path / "new" / "page.html")
    text = (tmp_path / "new" / "page.html").read_text("utf-8")
    assert "width=device-width" in text and "default-src 'none'" in text
    assert "on &lt;cpu&gt;" in text and "on <cpu>" not in text
    assert text.count("Plotly.newPlot") >= 6 and "Not drawn" not in text
    outside = re.sub(r"<script.*?</script>", "", text, flags=re.S)
    assert not re.findall(r"(?:src|href)\s*=", outside)
    assert not list(tmp_path.glob("**/*.partial"))


def test_warnings_name_what_does_not_count_and_what_is_weak() -> None:
    sound = make_cell()
    broken = replace(
        make_cell(concurrency=8), invalid="engine and client differ", num_failed=2, failures={"timeout": 2}
    )
    weak = replace(make_cell(concurrency=2), weak=("ttft_s/p99",), client_error_frac=0.02, notes=("a note",))
    assert warnings(Measured("t", [sound], {}, SLO)) == []
    told = warnings(Measured("t", [sound, broken, weak], {}, SLO, notes=["first"]))
    assert told[0] == "first"
    assert [line for line in told if "engine and client differ" in line and "c8" in line]
    assert [line for line in told if "2 of 30 requests failed (timeout 2)" in line]
    assert [line for line in told if "1 figures are more" in line] and [line for line in told if "2.0%" in line]


def test_a_page_without_anything_to_draw_says_why() -> None:
    text = page(Measured("t", [], {}, SLO))
    assert "Nothing was measured" in text and "nothing gives a price" in text


def test_requests_are_found_beside_their_cells_and_the_newest_measurement_counts(tmp_path: Path) -> None:
    config = load_config()
    old = make_cell()
    new: CellResult = replace(make_cell(), started_at_s=old.started_at_s + 60, records_file="new.parquet")
    write_parquet([served(0, 0.1)], tmp_path / "new.parquet")
    found = measured([old, new], config, [tmp_path / "absent", tmp_path], {new.measurement_id: "run"})
    assert found.cells == [new] and list(found.records) == [new.measurement_id]
    assert [note for note in found.notes if "has no price" in note]


class Sink:
    def __init__(self, trouble: str | None = None) -> None:
        self.logged: list[str] = []
        self.trouble = trouble

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        if self.trouble is not None:
            raise Unavailable(self.trouble)
        self.logged += [f"{run_id}/{folder}/{path.name}" for path in paths]


def a_kept_sweep(tmp_path: Path) -> tuple[WorkbenchConfig, SweepResult]:
    file = tmp_path / "workbench.yaml"
    file.write_text("models: {}\npools: []\n")
    config = load_config(file)
    cell = make_cell(records_file="c4.parquet")
    folder = ResultsFolder(layout(config).results_dir, cell.sweep_digest)
    folder.open({"plan": {}, "replica": {}, "cells": [], "commit": "c"})
    folder.write_cell(cell, [served(index, 0.1 + index / 100) for index in range(30)])
    folder.write_logged(LoggedRuns("http://mlflow", "parent", {cell.measurement_id: "run"}))
    return config, SweepResult(cell.sweep_digest, folder.path, (cell,), "parent")


def test_a_sweep_gets_its_page_once_in_its_folder_and_its_run(tmp_path: Path) -> None:
    config, swept = a_kept_sweep(tmp_path)
    sink = Sink("MLflow is down")
    page_file, trouble = publish_sweep(swept, config, sink)
    assert page_file == swept.folder / "page.html" and trouble == "MLflow is down"
    sink.trouble = None
    assert publish_sweep(swept, config, sink) == (page_file, None)  # what MLflow lacks is brought there by the next
    assert sink.logged == ["parent/report/page.html"]
    assert publish_sweep(swept, config, sink) == (page_file, None)
    assert len(sink.logged) == 1
    assert publish_sweep(replace(swept, cells=()), config, sink)[1] == "nothing was measured"


def test_the_timeline_of_an_open_loop_says_whether_its_queue_grew() -> None:
    spec = CellSpec(CellKind.MIXED, Shape(64, 32), 9, 60, load="poisson:rate=20")
    cell = make_cell(spec=spec)
    assert not spec.is_closed and replace(spec, load="closed:concurrency=4").is_closed
    records = [served(index, 0.1 + index / 40) for index in range(60)]
    text = page(Measured("t", [cell], {cell.measurement_id: records}, SLO))
    assert "Of mixed-64x32-c9-poisson:rate=20" in text
