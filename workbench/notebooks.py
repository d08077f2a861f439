"""Notebooks by name, and their parameters: what a notebook declares, and whether given values fit it."""

from __future__ import annotations

import ast
import contextlib
import json
from collections.abc import Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import nbformat
from pydantic import TypeAdapter, ValidationError

# The annotations that a parameters cell may use: what papermill can write back as a literal.
PARAMETER_TYPES: dict[str, Any] = {
    "str": str,
    "int": int,
    "float": float,
    "bool": bool,
    "str | None": str | None,
    "int | None": int | None,
    "float | None": float | None,
    "list[str]": list[str],
    "list[int]": list[int],
    "list[float]": list[float],
}


class ReportError(Exception):
    """A report could not be made; the message says why and what to do."""


class UnknownNotebook(ReportError):
    """There is no notebook of that name."""


class BadParameter(ReportError):
    """A parameter that the notebook does not have, or a value that does not fit its type."""


def notebooks(folder: Path) -> list[str]:
    """Names of the notebooks in `folder`, sorted."""
    return sorted(path.stem for path in folder.glob("*.ipynb"))


def find(name: str, folder: Path) -> Path:
    """The notebook's file. Raises UnknownNotebook with the nearest name that there is."""
    path = folder / f"{name}.ipynb"
    known = notebooks(folder)
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"did you mean {near[0]}?" if near else f"there are {', '.join(known) or 'none'}"
        raise UnknownNotebook(f"no notebook {name} in {folder}; {hint}")
    return path


def declared_parameters(notebook: nbformat.NotebookNode) -> dict[str, tuple[str, Any]]:
    """Annotation and default of each parameter, from the one cell tagged `parameters`.

    Read here and not by papermill, whose patterns miss `str | None`.

    Raises:
        BadParameter: there is not exactly one such cell, or it holds anything but `name: type = literal`.
    """
    cells = [cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", [])]
    if len(cells) != 1:
        raise BadParameter(f"{len(cells)} cells are tagged `parameters`, not one")
    declared: dict[str, tuple[str, Any]] = {}
    for statement in ast.parse(cells[0].source).body:
        if not (isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name) and statement.value):
            raise BadParameter(
                f"`{ast.unparse(statement)}` in the parameters cell is not of the form name: type = literal"
            )
        try:
            default = ast.literal_eval(statement.value)
        except ValueError:
            raise BadParameter(f"the default of parameter {statement.target.id} is no literal") from None
        declared[statement.target.id] = (ast.unparse(statement.annotation), default)
    return declared


def check_parameters(notebook: Path, given: Mapping[str, object]) -> dict[str, Any]:
    """The values as the notebook's own parameters cell types them.

    Raises:
        BadParameter: the notebook has no such parameter, or the value does not fit; all mistakes are named.
    """
    declared = declared_parameters(nbformat.read(notebook, as_version=4))
    values, mistakes = {}, []
    for name, value in given.items():
        if name not in declared:
            near = get_close_matches(name, declared, n=1)
            hint = f"did you mean {near[0]}?" if near else f"it has {', '.join(declared) or 'none'}"
            mistakes.append(f"no parameter {name}; {hint}")
            continue
        try:
            values[name] = _typed(declared[name][0], value)
        except ValueError as error:
            mistakes.append(f"{name}: {error}")
    if mistakes:
        raise BadParameter(f"{notebook.name}: {'; '.join(mistakes)}")
    return values


def _typed(annotation: str, value: object) -> Any:
    """The value as the annotation says. Raises ValueError."""
    kind = PARAMETER_TYPES.get(annotation)
    if kind is None:
        raise ValueError(f"the notebook types it {annotation!r}; use one of {', '.join(PARAMETER_TYPES)}")
    if isinstance(value, str) and kind is not str:
        value = _parsed(value, annotation)
    try:
        return TypeAdapter(kind).validate_python(value)
    except ValidationError as error:
        raise ValueError(f"{value!r} is no {annotation}: {error.errors()[0]['msg']}") from None


def _parsed(text: str, annotation: str) -> object:
    """A command line's string: `a,b` or JSON for a list, None or null for nothing, else as pydantic reads it."""
    if annotation.endswith("| None") and text in ("None", "null"):
        return None
    if annotation.startswith("list"):
        if text.startswith("["):
            with contextlib.suppress(json.JSONDecodeError):
                return json.loads(text)
        return [part.strip() for part in text.split(",") if part.strip()]
    return text
