"""Results of other load generators: files that vLLM and AIPerf wrote at the fake engine, and broken ones."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from tests.cells import make_cell
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.comparison.cells import Difference, NotComparable, compare_cells
from workbench.costs.table import MeasuredCell, build
from workbench.imported.cells import About, import_files, read_file
from workbench.imported.foreign import NotImportable
from workbench.loadgen.records import read_parquet
from workbench.sweeps.kept_results import find_cells
from workbench.sweeps.results import folders

FILES = Path(__file__).parent / "imported"
VLLM, AIPERF = FILES / "vllm.json", FILES / "profile_export_aiperf.json"
DETAILS = ("input_lens", "output_lens", "start_times", "ttfts", "itls", "errors")


class Price:
    usd_per_hour = 1.0
    source = "test"
    date = "2026-11-01"


@pytest.mark.parametrize(("file", "tool"), [(VLLM, "vllm bench serve"), (AIPERF, "AIPerf 0.13.0")])
def test_figures_made_from_the_requests_are_close_to_those_that_the_tool_made(file: Path, tool: str, tmp_path: Path):
    (cell,) = import_files([file], tmp_path, About("m@3", "h100-80g", 2)).cells()
    assert (cell.provenance, cell.model, cell.version, cell.invalid) == (tool, "m", "3", None)
    assert cell.spec.concurrency == 4 and cell.spec.load == "" and cell.num_failed == 0
    for name in ("ttft_s/p50", "tpot_s/p50", "e2e_s/p50"):
        assert cell.metrics[name] == pytest.approx(cell.metrics[f"reported/{name}"], rel=0.1), name
        assert name in cell.intervals
    rate = "output_tokens_per_s_per_gpu"
    assert cell.metrics[rate] == pytest.approx(cell.metrics[f"reported/{rate}"], rel=0.15)
    records = read_parquet(tmp_path / "imported" / cell.sweep_digest / str(cell.records_file))
    assert len(records) == cell.num_requests and all(sum(r.chunk_tokens) == r.num_output_tokens for r in records)


def test_without_requests_the_tools_own_figures_stand_without_intervals(tmp_path: Path):
    data = json.loads(VLLM.read_text())
    summary = {name: value for name, value in data.items() if name not in DETAILS} | {"mean_itl_ms": float("nan")}
    file = tmp_path / "summary.json"
    file.write_text(json.dumps(summary))
    (cell,) = import_files([file], tmp_path, About()).cells()
    assert cell.metrics["ttft_s/p99"] == pytest.approx(data["p99_ttft_ms"] / 1000)
    assert "itl_s/mean" not in cell.metrics and cell.intervals == {} and cell.records_file is None
    assert "it kept no requests" in cell.notes[0]


def test_several_results_are_one_and_the_same_again_is_nothing_new(tmp_path: Path):
    data = json.loads(VLLM.read_text())
    file = tmp_path / "appended.json"
    later = data | {"date": "20261201-050000", "request_rate": 4.0, "burstiness": 0.5, "max_concurrency": None}
    file.write_text(json.dumps(data) + "\n" + json.dumps(later))
    folder = import_files([file], tmp_path / "results", About())
    assert [cell.spec.load for cell in folder.cells()] == ["", "rate4-burst0.5"]
    assert import_files([file], tmp_path / "results", About()).cells() == folder.cells()
    assert find_cells(folder.sweep_digest[:6], tmp_path / "results") == folder.cells()
    assert folders(tmp_path / "results") == []  # nothing that goes to MLflow as a sweep of ours


def test_imported_cells_are_kept_apart_from_ours(tmp_path: Path):
    (cell,) = import_files([VLLM], tmp_path, About("smollm2-135m@1", "cpu")).cells()
    table = build([MeasuredCell(cell, "run")], {"cpu": Price()})
    assert table.rows == () and "imported from vllm" in table.skipped[0].reason
    ours = make_cell(prompt=cell.spec.shape.num_prompt_tokens, output=12)
    allowed = [Difference.HARDWARE, Difference.ENGINE]
    with pytest.raises(NotComparable, match="differ in tool") as refused:
        compare_cells([ours], [cell], allow=allowed)
    assert refused.value.difference is Difference.TOOL
    compared = compare_cells([ours], [cell], allow=[*allowed, Difference.TOOL])
    assert any("imported" in note for note in compared.notes)


def test_failed_requests_are_counted_and_too_many_make_it_invalid(tmp_path: Path):
    data = json.loads(VLLM.read_text())
    errors = ["refused"] * 10 + [""] * 20
    file = tmp_path / "failed.json"
    file.write_text(json.dumps(data | {"errors": errors, "failed": 10, "completed": 20}))
    (cell,) = import_files([file], tmp_path, About()).cells()
    assert cell.num_failed == 10 and cell.invalid == "10 of 30 requests failed"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no JSON object"),
        (VLLM.read_text()[:500], "is no JSON, or was cut off"),
        ("[1, 2]", "holds no JSON object"),
        ('{"benchmarks": []}', "no result of `vllm bench serve --save-result` .* it holds benchmarks"),
        (
            '{"backend": "x", "model_id": "m", "request_throughput": 1}',
            "no whole result of vllm bench serve: date: Field",
        ),
        ('{"schema_version": "2.0", "aiperf_version": "9"}', "no whole result of AIPerf: schema_version"),
        ('{"metadata": {}, "metrics": {}}', "profile_export_aiperf.json must lie beside it"),
    ],
)
def test_a_broken_or_foreign_file_is_named_with_what_would_be_right(text: str, message: str, tmp_path: Path):
    file = tmp_path / "result.json"
    file.write_text(text)
    with pytest.raises(NotImportable, match=message):
        read_file(file)


def test_a_cut_off_requests_file_and_lists_of_other_lengths_are_named(tmp_path: Path):
    for file in (AIPERF, FILES / "profile_export.jsonl"):
        shutil.copy(file, tmp_path)
    requests = tmp_path / "profile_export.jsonl"
    requests.write_text(requests.read_text()[:-100])
    with pytest.raises(NotImportable, match="line 24 is no JSON"):
        read_file(tmp_path / AIPERF.name)
    data = json.loads(VLLM.read_text())
    short = tmp_path / "short.json"
    short.write_text(json.dumps(data | {"ttfts": data["ttfts"][1:]}))
    with pytest.raises(NotImportable, match="not of one length"):
        read_file(short)


def test_the_command_keeps_it_and_says_where(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    config = tmp_path / "workbench.yaml"
    config.write_text("models: {}\npools: []\n")
    assert run_app(["bench", "import", str(AIPERF), "--config", str(config), "--json"]) == Exit.OK
    told = json.loads(capsys.readouterr().out)
    assert told["cells"][0]["provenance"] == "AIPerf 0.13.0" and Path(told["folder"]).is_dir()
    assert run_app(["bench", "import", str(config), "--config", str(config)]) == Exit.FAILED
    assert "is no JSON" in capsys.readouterr().err
