"""Runs a notebook as a report: parameters checked, executed by papermill, HTML beside it, both in MLflow.

    reports/01_benchmark_sweep-20261130-101500.ipynb   the executed copy
    reports/01_benchmark_sweep-20261130-101500.html    one self-contained page

A notebook says which MLflow run it made by `workbench.record_run(run_id)`; the two files become artifacts
of that run. A notebook that failed is kept, with the failing cell marked, under a name ending in `-failed`.
"""

from __future__ import annotations

import contextlib
import copy
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import nbformat
import papermill
import plotly.io
from nbconvert import HTMLExporter
from papermill.exceptions import PapermillExecutionError

from serving.core.errors import ServingError
from workbench.connection import RUN_MIME
from workbench.notebooks import BadParameter, ReportError, UnknownNotebook, check_parameters, find
from workbench.pages.publish import ArtifactSink
from workbench.pages.static import NotDrawn, make_static

__all__ = [
    "ArtifactSink", "BadParameter", "NotebookFailed", "PageNotDrawn", "Report", "ReportError", "ReportNotLogged",
    "UnknownNotebook", "recorded_run", "run_report",
]  # fmt: skip

CONFIG_VARIABLE = "WORKBENCH_CONFIG"
PLOTLY_MIME = "application/vnd.plotly.v1+json"

# nbconvert's page loads RequireJS and MathJax from a content network; our pages need neither.
_OUTSIDE_SCRIPT = re.compile(r"""<script[^>]*\ssrc="[^"]*"[^>]*>\s*</script>""")


class NotebookFailed(ReportError):
    """A cell raised. `notebook` is the executed copy with the failing cell marked."""

    def __init__(self, message: str, notebook: Path) -> None:
        super().__init__(message)
        self.notebook = notebook


class ReportNotLogged(ReportError):
    """The report is made, but MLflow did not take its files; `report` says where they are."""

    def __init__(self, message: str, report: Report) -> None:
        super().__init__(message)
        self.report = report


class PageNotDrawn(ReportError):
    """The report is made, but no browser drew its figures as images."""


@dataclass(frozen=True, slots=True)
class Report:
    """What a report left behind. `mlflow_run_id` is None when the notebook recorded no run."""

    notebook: Path
    html: Path
    mlflow_run_id: str | None


def run_report(
    name: str,
    parameters: Mapping[str, object],
    out_dir: Path,
    *,
    notebooks_dir: Path,
    config_file: Path | None = None,
    artifacts: ArtifactSink | None = None,
    on_progress: Callable[[str], None] = lambda line: None,
    cell_timeout_s: int = 4 * 3600,
    is_static: bool = False,
) -> Report:
    """Executes a notebook with parameters and keeps what comes out.

    Args:
        name: the notebook's name without its suffix.
        parameters: values by name; a string is read as the parameter's type says (`1,4` for a list).
        out_dir: receives the executed notebook and the page; created when missing.
        notebooks_dir: where notebooks lie. The kernel runs in the folder above it.
        config_file: what `workbench.connect()` reads in the notebook; else what it finds from there.
        artifacts: receives the files when the notebook recorded an MLflow run.
        on_progress: called with each line that the notebook prints.
        cell_timeout_s: bound on each cell.
        is_static: figures as images, in a page a tenth as large; a browser draws them.

    Raises:
        UnknownNotebook, BadParameter: nothing was run.
        NotebookFailed: a cell raised.
        PageNotDrawn: there is no browser for a static page; the page is there with its scripts.
        ReportNotLogged: both files are made, and MLflow did not take them.
    """
    source = find(name, notebooks_dir)
    values = check_parameters(source, parameters)
    out_dir.mkdir(parents=True, exist_ok=True)
    target = out_dir / f"{name}-{datetime.now(UTC):%Y%m%d-%H%M%S}.ipynb"
    on_progress(f"running {source} -> {target}")
    with _environment(CONFIG_VARIABLE, config_file):
        _execute(source, target, values, on_progress, cell_timeout_s)
    executed = nbformat.read(target, as_version=4)
    html = target.with_suffix(".html")
    html.write_text(_to_html(executed, name), encoding="utf-8")
    if is_static:
        _draw(html)
    run_id = recorded_run(executed)
    report = Report(target, html, run_id)
    if run_id is not None and artifacts is not None:
        try:
            artifacts.log_files(run_id, [target, html], "report")
        except ServingError as error:
            raise ReportNotLogged(f"{target} and {html.name} are made, but not in MLflow: {error}", report) from error
    return report


def _draw(html: Path) -> None:
    try:
        make_static(html)
    except NotDrawn as error:
        raise PageNotDrawn(f"{html} is made with its scripts: {error}") from None


def recorded_run(executed: nbformat.NotebookNode) -> str | None:
    """The MLflow run that the notebook recorded last, None when it recorded none."""
    run_id = None
    for cell in executed.cells:
        for output in cell.get("outputs", []):
            data = output.get("data", {}).get(RUN_MIME)
            run_id = data["mlflow_run_id"] if data is not None else run_id
    return run_id


@contextlib.contextmanager
def _environment(name: str, value: Path | None) -> Iterator[None]:
    """The variable as the kernel will inherit it: papermill has no way to hand one over."""
    before = os.environ.get(name)
    if value is not None:
        os.environ[name] = str(value.resolve())
    try:
        yield
    finally:
        if before is not None:
            os.environ[name] = before
        elif value is not None:
            del os.environ[name]


class _Lines:
    """A stream that hands on whole lines."""

    def __init__(self, on_line: Callable[[str], None]) -> None:
        self._on_line = on_line
        self._rest = ""

    def write(self, text: str) -> None:
        """Takes what the notebook printed."""
        *lines, self._rest = (self._rest + text).replace("\r", "\n").split("\n")
        for line in lines:
            if line.strip():
                self._on_line(line)

    def flush(self) -> None:
        """Nothing is held back that could be shown."""


def _execute(
    source: Path, target: Path, values: Mapping[str, Any], on_progress: Callable[[str], None], cell_timeout_s: int
) -> None:
    lines = _Lines(on_progress)
    try:
        papermill.execute_notebook(
            str(source),
            str(target),
            parameters=dict(values),
            cwd=str(source.parent.parent),
            progress_bar=False,
            stdout_file=lines,
            stderr_file=lines,
            start_timeout=120,
            execution_timeout=cell_timeout_s,
        )
    except PapermillExecutionError as error:
        failed = target.with_name(f"{target.stem}-failed.ipynb")
        target.rename(failed)
        raise NotebookFailed(
            f"{source.name} failed in cell {error.exec_count}: {error.ename}: {error.evalue}; "
            f"what it did until then is in {failed}",
            failed,
        ) from None


def _to_html(executed: nbformat.NotebookNode, title: str) -> str:
    """One page that loads nothing from elsewhere: MLflow shows it inside its own page, often offline."""
    page = copy.deepcopy(executed)
    page.metadata["title"] = title
    figures = [
        output.data
        for cell in page.cells
        for output in cell.get("outputs", [])
        if PLOTLY_MIME in output.get("data", {})
    ]
    for number, data in enumerate(figures):
        # The library, 4 MB, goes into the page once.
        figure = plotly.io.to_html(data.pop(PLOTLY_MIME), include_plotlyjs=number == 0, full_html=False, validate=False)
        data["text/html"] = figure
    body, _ = HTMLExporter().from_notebook_node(page)
    return _OUTSIDE_SCRIPT.sub("", str(body))
