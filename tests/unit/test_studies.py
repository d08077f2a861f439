"""What notebooks 02 to 04 show: rows that never mix their provenance, traces as frames; and what JupyterLab proxies."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

import workbench
from workbench.config import load_config
from workbench.hardware.beside import beside
from workbench.loadgen.traces import Trace, TracedRequest
from workbench.pages.static import NotDrawn, make_static
from workbench.stack.lab import lab_url, proxied
from workbench.studies import log_study, trace_frame

FILE = Path(__file__).parents[2] / "workbench.yaml"
PROBE = {
    "hardware_class": "cpu",
    "bandwidth_tb_s": {"median": 0.01, "low": 0.009, "high": 0.011},
    "tflops": {"median": 0.2, "low": None, "high": None},
    "dtype": "bfloat16",
    "num_units": 1,
    "torch": "2",
}
COSTS = pd.DataFrame(
    {"model": ["m", "m", "other"], "concurrency": [1, 8, 1], "output_tokens_per_s_per_gpu": [30.0, 150.0, 20.0]}
)


def test_measured_published_and_predicted_are_rows_of_their_own() -> None:
    workbench.connect(FILE)
    rows = beside(PROBE, COSTS, model="m", weights_gb=0.25)
    cpu = rows[rows["hardware_class"] == "cpu"].set_index("provenance")
    measured = cpu.loc["measured"]
    assert (measured["bandwidth_tb_s"], measured["output_tokens_per_s_per_gpu"]) == (0.01, 30.0), "of one stream"
    assert cpu.loc["published", "output_tokens_per_s_per_gpu"] != cpu.loc["published", "output_tokens_per_s_per_gpu"]
    assert set(cpu.loc["predicted", "output_tokens_per_s_per_gpu"]) == {40.0, 80.0}, (
        "by measured and published bandwidth"
    )
    others = rows[rows["hardware_class"] != "cpu"]
    assert set(others["provenance"]) == {"published", "predicted"}
    assert others[others["provenance"] == "predicted"]["usd_per_gpu_hour"].isna().all()
    with pytest.raises(ValueError, match="predict nothing"):
        beside(PROBE, COSTS, model="m", weights_gb=0.0)


def test_a_trace_as_a_frame_has_its_scaled_times_and_gaps() -> None:
    frame = trace_frame(Trace("t", (TracedRequest(0.0, 10, 2), TracedRequest(4.0, 20, 3))), scale=2.0)
    assert frame.to_dict("list") == {
        "at_s": [0.0, 2.0], "gap_s": [0.0, 2.0], "num_prompt_tokens": [10, 20], "num_output_tokens": [2, 3],
    }  # fmt: skip


def test_a_table_of_a_study_has_a_name_that_is_a_file() -> None:
    with pytest.raises(ValueError, match="lower case"):
        log_study("t", {"../x": COSTS})


def test_jupyterlab_proxies_what_listens_on_this_machine(tmp_path: Path) -> None:
    own = proxied(load_config(FILE, env={}))
    assert {name: server["port"] for name, server in own.items()} == {"endpoint": 8000, "mlflow": 5000}
    assert own["endpoint"]["request_headers_override"] == {"Host": "127.0.0.1:8000"}
    elsewhere = load_config(FILE, env={"MLFLOW_TRACKING_URI": "https://mlflow.example.com"})
    assert set(proxied(elsewhere)) == {"endpoint"}
    assert lab_url(elsewhere, "t", tmp_path).endswith("/lab?token=t")
    assert lab_url(elsewhere, "t", FILE.parent).endswith("/lab/tree/notebooks?token=t")


def test_a_page_that_no_browser_draws_stays_as_it_is(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text("<html><body><p>figures</p></body></html>")
    with pytest.raises(NotDrawn, match="No such file"):
        make_static(page, browser=str(tmp_path / "none"))
    with pytest.raises(NotDrawn, match="did not draw"):
        make_static(page, browser="/bin/true")
    assert page.read_text() == "<html><body><p>figures</p></body></html>"
