"""Weights in bf16 as numpy sees them: read, changed and written a tensor at a time.

numpy has no bf16; a tensor is its bit patterns (uint16) on disk and float32 (2-D or 1-D, as in the file) in memory.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from serving.core.errors import WeightsError
from serving.engine.bf16 import to_bf16

Floats = NDArray[np.float32]
# A tensor's new name and values; None leaves it out.
Edit = Callable[[str, Floats], tuple[str, Floats] | None]


@dataclass(frozen=True, slots=True)
class Entry:
    """Where one tensor lies: byte offsets from the end of the header."""

    name: str
    shape: tuple[int, ...]
    begin: int
    end: int


def to_float(bits: NDArray[np.uint16]) -> Floats:
    """bf16 bit patterns → float32, exact."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def entries(path: Path) -> tuple[tuple[Entry, ...], int]:
    """The tensors of a file in their order, and the byte at which data begins.

    Raises:
        WeightsError: a tensor is not bf16.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        head: Mapping[str, Any] = json.loads(file.read(length))
    found = []
    for name, entry in head.items():
        if name == "__metadata__":
            continue
        if entry["dtype"] != "BF16":
            raise WeightsError(f"{path}: {name} is {entry['dtype']}; faults are made of bf16 weights")
        found.append(Entry(name, tuple(entry["shape"]), *entry["data_offsets"]))
    return tuple(sorted(found, key=lambda one: one.begin)), 8 + length


def rewrite(source: Path, target: Path, edit: Edit) -> None:
    """Writes `target` with each tensor of `source` as `edit` gives it; memory stays near one tensor's.

    Raises:
        WeightsError: a tensor is not bf16.
        OSError: the disk is full.
    """
    tensors, base = entries(source)
    data = np.memmap(source, dtype=np.uint8, mode="r")
    head: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    body = target.with_suffix(".data")
    try:
        with body.open("wb") as file:
            for tensor in tensors:
                bits = data[base + tensor.begin : base + tensor.end].view("<u2")
                edited = edit(tensor.name, to_float(bits).reshape(tensor.shape))
                if edited is None:
                    continue
                name, values = edited
                begin = file.tell()
                file.write(to_bf16(values).data)
                head[name] = {"dtype": "BF16", "shape": list(values.shape), "data_offsets": [begin, file.tell()]}
        _join(head, body, target)
    finally:
        body.unlink(missing_ok=True)


def _join(head: Mapping[str, Any], body: Path, target: Path) -> None:
    text = json.dumps(head, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file, body.open("rb") as data:
        file.write(len(text).to_bytes(8, "little") + text)
        while piece := data.read(1 << 24):
            file.write(piece)
