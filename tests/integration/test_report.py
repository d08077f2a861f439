"""Reports: a notebook run by papermill with checked parameters, its page, its MLflow run, its failures."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import jupytext
import nbformat
import pytest

from serving.core.errors import Unavailable
from workbench.notebooks import check_parameters
from workbench.report import (
    BadParameter,
    NotebookFailed,
    ReportNotLogged,
    UnknownNotebook,
    run_report,
)

NOTEBOOK = """
# %% [markdown]
# # How many?
# Some mathematics: $x^2$.

# %% tags=["parameters"]
num: int = 2  # how many
names: list[str] = ["a"]
factor: float | None = None
label: str = "x"
where: str | None = None
odd: dict = {}

# %%
import pandas as pd
import plotly.graph_objects as go

import workbench

print(f"num {num + 1}, names {names}, factor {factor}, label {label}")
workbench.record_run("an-earlier-run")
go.Figure(go.Scatter(x=[1, 2], y=[1, num]), layout={"template": workbench.plots.TEMPLATE})

# %%
if num > 100:
    raise ValueError("too many")
workbench.record_run("run-7")
"""


class Artifacts:
    """Keeps what would go to MLflow."""

    def __init__(self) -> None:
        self.logged: list[tuple[str, list[Path], str]] = []

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        assert all(path.is_file() for path in paths)
        self.logged.append((run_id, list(paths), folder))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    notebook = jupytext.reads(NOTEBOOK, fmt="py:percent")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "09_count.ipynb")
    return tmp_path / "notebooks"


@pytest.fixture
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[2]))


@pytest.mark.usefixtures("importable")
def test_a_report_is_a_notebook_a_page_and_two_artifacts(folder: Path, tmp_path: Path) -> None:
    artifacts, lines = Artifacts(), []
    report = run_report(
        "09_count",
        {"num": "4", "names": "b,c", "factor": 0.5},
        tmp_path / "reports",
        notebooks_dir=folder,
        artifacts=artifacts,
        on_progress=lines.append,
    )
    assert report.mlflow_run_id == "run-7"
    assert artifacts.logged == [("run-7", [report.notebook, report.html], "report")]
    assert "num 5, names ['b', 'c'], factor 0.5, label x" in lines
    assert re.fullmatch(r"09_count-\d{8}-\d{6}\.ipynb", report.notebook.name)
    page = report.html.read_text()
    assert "How many?" in page and "Plotly.newPlot" in page
    assert not re.findall(r"<script[^>]*\ssrc=|<link[^>]*\shref=.http", page), "the page loads nothing from elsewhere"


@pytest.mark.usefixtures("importable")
def test_a_failed_notebook_is_kept_and_named(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(NotebookFailed, match="ValueError: too many") as failure:
        run_report("09_count", {"num": 101}, tmp_path / "reports", notebooks_dir=folder)
    kept = failure.value.notebook
    assert kept.name.endswith("-failed.ipynb") and str(kept) in str(failure.value)
    assert list((tmp_path / "reports").iterdir()) == [kept]
    outputs = [output for cell in nbformat.read(kept, as_version=4).cells for output in cell.get("outputs", [])]
    assert "num 102" in outputs[0]["text"]


@pytest.mark.usefixtures("importable")
def test_a_report_that_mlflow_does_not_take_is_still_made(folder: Path, tmp_path: Path) -> None:
    class Dead:
        def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
            raise Unavailable("MLflow does not answer")

    with pytest.raises(ReportNotLogged, match="MLflow does not answer") as failure:
        run_report("09_count", {}, tmp_path / "reports", notebooks_dir=folder, artifacts=Dead())
    assert failure.value.report.notebook.is_file()
    assert failure.value.report.html.is_file()


def test_an_unknown_notebook_is_named_with_the_nearest(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UnknownNotebook, match=r"no notebook 09_cuont in .*; did you mean 09_count"):
        run_report("09_cuont", {}, tmp_path, notebooks_dir=folder)
    with pytest.raises(UnknownNotebook, match="there are 09_count"):
        run_report("zzz", {}, tmp_path, notebooks_dir=folder)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"nums": 1}, "no parameter nums; did you mean num"),
        ({"zzz": 1}, "it has num, names, factor, label, where, odd"),
        ({"num": "four"}, "num: 'four' is no int"),
        ({"num": 1.5}, "num: 1.5 is no int"),
        ({"names": "1,2", "factor": "much"}, "factor: 'much' is no float | None"),
        ({"odd": "{}"}, "the notebook types it 'dict'"),
        ({"num": "x", "zzz": 1}, "num: .*; no parameter zzz"),
    ],
)
def test_a_wrong_parameter_is_refused_before_anything_runs(folder: Path, given: dict[str, object], says: str) -> None:
    with pytest.raises(BadParameter, match=says.replace("|", r"\|")):
        check_parameters(folder / "09_count.ipynb", given)


@pytest.mark.parametrize(
    ("given", "value"),
    [
        ({"num": "8"}, 8),
        ({"names": "a"}, ["a"]),
        ({"names": '["a", "b"]'}, ["a", "b"]),
        ({"names": ["a"]}, ["a"]),
        ({"factor": "None"}, None),
        ({"factor": "null"}, None),
        ({"factor": "1"}, 1.0),
        ({"label": "7"}, "7"),
        ({"where": "7"}, "7"),
        ({"where": "None"}, None),
        ({"names": "7"}, ["7"]),
        ({"label": "[x"}, "[x"),
    ],
)
def test_strings_of_a_command_line_are_read_by_the_parameters_type(
    folder: Path, given: dict[str, object], value: object
) -> None:
    assert list(check_parameters(folder / "09_count.ipynb", given).values()) == [value]
