"""Notebooks as committed: paired, without outputs, small cells, one cell of typed literals, imports of ours alone."""

from __future__ import annotations

import ast
from pathlib import Path

import jupytext
import nbformat
import pytest

from workbench.notebooks import PARAMETER_TYPES, BadParameter, check_parameters, declared_parameters

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
NAMES = sorted(path.stem for path in NOTEBOOKS.glob("*.ipynb"))
MAX_CELL_LINES = 25
OURS = {"workbench", "evals"}

each_notebook = pytest.mark.parametrize("name", NAMES)


def notebook(name: str) -> nbformat.NotebookNode:
    return nbformat.read(NOTEBOOKS / f"{name}.ipynb", as_version=4)


def test_there_are_notebooks_and_each_has_its_pair() -> None:
    assert NAMES
    assert sorted(path.stem for path in NOTEBOOKS.glob("*.py")) == NAMES


@each_notebook
def test_the_pair_is_equal(name: str) -> None:
    script = jupytext.read(NOTEBOOKS / f"{name}.py")
    in_script = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in script.cells]
    in_notebook = [(cell.cell_type, cell.source, cell.metadata.get("tags", [])) for cell in notebook(name).cells]
    assert in_notebook == in_script, f"run: jupytext --sync notebooks/{name}.py"
    assert notebook(name).metadata.jupytext.formats == "ipynb,py:percent"


@each_notebook
def test_it_begins_with_its_question_and_ends_with_conclusion_limits_and_run_id(name: str) -> None:
    cells = notebook(name).cells
    assert cells[0].cell_type == "markdown"
    assert cells[0].source.splitlines()[0].rstrip().endswith("?")
    headings = [line for cell in cells if cell.cell_type == "markdown" for line in cell.source.splitlines()]
    assert [line for line in headings if line.startswith("## ")][-2:] == ["## Conclusion", "## Limits"]
    assert "workbench.record_run(" in cells[-1].source


@each_notebook
def test_its_parameters_are_typed_literals_that_fit_their_types(name: str) -> None:
    declared = declared_parameters(notebook(name))
    assert {annotation for annotation, _ in declared.values()} <= set(PARAMETER_TYPES)
    defaults = {parameter: default for parameter, (_, default) in declared.items()}
    assert check_parameters(NOTEBOOKS / f"{name}.ipynb", defaults) == defaults


@each_notebook
def test_it_is_committed_without_outputs_and_with_small_cells(name: str) -> None:
    for cell in notebook(name).cells:
        assert len(cell.source.splitlines()) <= MAX_CELL_LINES, f"move code into workbench:\n{cell.source}"
        if cell.cell_type == "code":
            assert cell.outputs == []
            assert cell.execution_count is None


@each_notebook
def test_it_imports_only_ours(name: str) -> None:
    code = "\n".join(cell.source for cell in notebook(name).cells if cell.cell_type == "code")
    imported = set()
    for node in ast.walk(ast.parse(code)):
        if isinstance(node, ast.Import):
            imported |= {alias.name.split(".")[0] for alias in node.names}
        if isinstance(node, ast.ImportFrom):
            imported.add((node.module or "").split(".")[0])
    assert imported <= OURS


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1", "not of the form"),
        ("x: int = 2 * 3", "no literal"),
        ("import os", "not of the form"),
        ("x: int", "not of the form"),
    ],
)
def test_a_parameters_cell_with_anything_else_is_refused(source: str, says: str) -> None:
    cell = nbformat.v4.new_code_cell(source, metadata={"tags": ["parameters"]})
    with pytest.raises(BadParameter, match=says):
        declared_parameters(nbformat.v4.new_notebook(cells=[cell]))


def test_a_notebook_without_a_parameters_cell_is_refused() -> None:
    with pytest.raises(BadParameter, match="0 cells are tagged"):
        declared_parameters(nbformat.v4.new_notebook())
