"""What a result of another load generator says, in our names and units; and how its files are read."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from workbench.loadgen import RequestRecord

MAX_NAMED_ERRORS = 3
M = TypeVar("M", bound=BaseModel)


class NotImportable(Exception):
    """The file is no result that we know, or broken; the message names it and says what would be right."""


@dataclass(frozen=True, slots=True)
class ForeignRun:
    """One run of another tool.

    Attributes:
        tool: its name, with its version where the file says it.
        concurrency: requests in flight at most, 0 where there was no bound.
        load: of an open loop, such as `rate4`; empty for users who wait.
        reported: its own figures by our names, in our units; rates are of all units together.
        records: its requests, where the file has them; times count from the run's start.
        facts: what else it says of itself.
    """

    tool: str
    model: str
    started_at_s: float
    duration_s: float
    concurrency: int
    load: str
    num_requests: int
    num_failed: int
    num_prompt_tokens: float
    num_output_tokens: float
    reported: Mapping[str, float]
    records: tuple[RequestRecord, ...] = ()
    facts: Mapping[str, str] = field(default_factory=dict)


def read_text(path: Path) -> str:
    """The file's text. Raises NotImportable."""
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise NotImportable(f"{path} cannot be read: {error}") from error


def documents(path: Path) -> list[dict[str, Any]]:
    """The JSON objects of a file: one, or one a line. Raises NotImportable."""
    text = read_text(path)
    try:
        found = [json.loads(text)]
    except ValueError:
        try:
            found = [json.loads(line) for line in text.splitlines() if line.strip()]
        except ValueError as error:
            raise NotImportable(f"{path} is no JSON, or was cut off: {error}") from error
    if not found or not all(isinstance(one, dict) for one in found):
        raise NotImportable(f"{path} holds no JSON object")
    return found


def checked(kind: type[M], data: Mapping[str, Any], path: Path, tool: str) -> M:
    """The data as what the tool promises. Raises NotImportable: names the fields at fault."""
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        faults = [f"{'.'.join(map(str, e['loc']))}: {e['msg']}" for e in error.errors()[:MAX_NAMED_ERRORS]]
        raise NotImportable(f"{path} is no whole result of {tool}: {'; '.join(faults)}") from None


def finite(figures: Mapping[str, float | None]) -> dict[str, float]:
    """Those that are figures: other tools write NaN where they have none."""
    return {name: value for name, value in figures.items() if value is not None and math.isfinite(value)}
