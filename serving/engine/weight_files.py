"""What a folder of weights must hold, whether it is whole, and its digest.

The digest is over all that decides what the model answers: weights, config, tokenizer. It is the SHA-256
of the sorted lines `<sha256 of the file>  <name>`, so two folders with equal files have equal digests.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.core.errors import WeightsError

MANIFEST = "manifest.json"
_SUFFIXES = frozenset({".safetensors", ".json", ".jinja", ".model", ".txt"})
_LONGEST_HEADER_BYTES = 100_000_000  # the limit of the safetensors format itself


@dataclass(frozen=True, slots=True)
class FileRecord:
    """Digest and size of one file."""

    sha256: str
    size_bytes: int


def model_files(folder: Path) -> list[Path]:
    """The files that the digest covers, sorted by their name relative to `folder`."""
    found = (path for path in folder.rglob("*") if path.suffix in _SUFFIXES and path.is_file())
    return sorted(path for path in found if path.name != MANIFEST)


def record_files(folder: Path) -> dict[str, FileRecord]:
    """Reads every model file once. Keys are names relative to `folder`."""
    return {path.relative_to(folder).as_posix(): _record(path) for path in model_files(folder)}


def digest_of(files: dict[str, FileRecord]) -> str:
    """`sha256:<hex>` over the records."""
    lines = "".join(f"{record.sha256}  {name}\n" for name, record in sorted(files.items()))
    return "sha256:" + hashlib.sha256(lines.encode()).hexdigest()


def check_folder(folder: Path, *, remedy: str) -> None:
    """Checks that an engine can load `folder`, reading no more than the headers.

    Raises:
        WeightsError: names the file that is missing, cut off or unreadable, and says `remedy`.
    """
    if not folder.is_dir():
        raise WeightsError(f"{folder} is not a folder. {remedy}")
    if not (folder / "config.json").is_file():
        raise WeightsError(f"{folder} holds no config.json, so it is no model in Hugging Face's layout. {remedy}")
    _load_json(folder / "config.json", remedy)
    shards = sorted(folder.glob("*.safetensors"))
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        named = set(_load_json(index, remedy).get("weight_map", {}).values())
        if missing := sorted(named - {shard.name for shard in shards}):
            raise WeightsError(f"{folder / missing[0]} is missing; {index.name} names it. {remedy}")
    if not shards:
        raise WeightsError(f"{folder} holds no *.safetensors. {remedy}")
    for shard in shards:
        _check_safetensors(shard, remedy)


def check_sizes(folder: Path, files: dict[str, FileRecord], *, remedy: str) -> None:
    """Checks every recorded file for its presence and size.

    Raises:
        WeightsError: names the first file that is missing or of another size.
    """
    for name, record in files.items():
        path = folder / name
        if not path.is_file():
            raise WeightsError(f"{path} is missing. {remedy}")
        if (size := path.stat().st_size) != record.size_bytes:
            raise WeightsError(f"{path} has {size:,} bytes instead of {record.size_bytes:,}. {remedy}")


def _record(path: Path) -> FileRecord:
    with path.open("rb") as file:
        return FileRecord(hashlib.file_digest(file, "sha256").hexdigest(), path.stat().st_size)


def _load_json(path: Path, remedy: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise WeightsError(f"{path} is no valid JSON ({error}). {remedy}") from error


def _check_safetensors(path: Path, remedy: str) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or length > min(size - 8, _LONGEST_HEADER_BYTES):
            raise WeightsError(f"{path} is cut off or no safetensors file: its header is not whole. {remedy}")
        head = file.read(length)
    try:
        entries = json.loads(head)
        ends = [entry["data_offsets"][1] for name, entry in entries.items() if name != "__metadata__"]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise WeightsError(f"{path} has a header that cannot be read ({error}). {remedy}") from error
    expected = 8 + length + max(ends, default=0)
    if size != expected:
        raise WeightsError(f"{path} has {size:,} bytes; its header says {expected:,}. {remedy}")
