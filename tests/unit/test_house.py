"""The rules of the house that no linter knows: sizes, names, what the core may import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("serving", "workbench", "evals", "benchmarks")
MAX_MODULE_LINES = 400
MAX_FUNCTION_LINES = 60
# The core decides without I/O: these parts of the standard library are not for it.
IMPURE = {"asyncio", "time", "logging", "socket", "threading", "subprocess", "os", "pathlib", "io", "sys", "datetime"}


def modules(*folders: str) -> Iterator[Path]:
    for folder in folders:
        yield from sorted(path for path in (ROOT / folder).rglob("*.py") if "__pycache__" not in path.parts)


def test_modules_are_small():
    lengths = {path: len(path.read_text("utf-8").splitlines()) for path in modules(*PACKAGES, "tests")}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_MODULE_LINES} == {}


def test_functions_are_small():
    long = []
    for path in modules(*PACKAGES, "tests"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    long.append(f"{path.relative_to(ROOT)}:{node.lineno} {node.name} has {length} lines")
    assert long == []


def test_no_drawers():
    assert [
        path for path in modules(*PACKAGES) if path.stem in ("utils", "util", "helpers", "misc", "common_utils")
    ] == []


def test_the_core_is_standard_library_without_io():
    for path in modules("serving/core"):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            names = []
            if isinstance(node, ast.Import):
                names = [alias.name for alias in node.names]
            elif isinstance(node, ast.ImportFrom):
                names = [node.module or ""]
            for name in names:
                top = name.split(".")[0]
                inside = name.startswith("serving.core")
                assert inside or top == "__future__" or top in sys.stdlib_module_names, f"{path} imports {name}"
                assert top not in IMPURE, f"{path} imports {name}"


def test_every_module_says_what_it_is_for():
    silent = [path for path in modules(*PACKAGES) if not ast.get_docstring(ast.parse(path.read_text("utf-8")))]
    assert silent == []


def test_nothing_is_read_from_outside_the_repository():
    sibling = "../" + "shared"
    tooling = [ROOT / "Makefile", ROOT / "pyproject.toml", ROOT / "workbench.yaml", ROOT / ".ci" / "run"]
    pages = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "requirements").glob("*.sh")]
    for path in [*modules(*PACKAGES, "tests", "notebooks"), *pages, *tooling]:
        assert sibling not in path.read_text("utf-8"), path


def test_no_module_has_the_name_of_a_public_function():
    """Importing a submodule sets it as its package's attribute and would hide the function."""
    import workbench

    taken = {entry.stem for entry in (ROOT / "workbench").iterdir() if entry.suffix == ".py" or entry.is_dir()}
    assert taken & set(workbench.__all__) == {"plots"}, "rename the module; `workbench.plots` is meant as one"
