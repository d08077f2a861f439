"""One line of a JSONL file."""

from __future__ import annotations

from typing import Any

import orjson


def object_of(line: bytes) -> dict[str, Any]:
    """The object in `line`. Raises ValueError, saying what else it is; whoever reads the file adds where."""
    try:
        row = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise ValueError(f"no JSON ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"a line is an object, not {type(row).__name__}")
    return row
