"""Published documents: dataclasses to JSON and back with nothing guessed, and files replaced atomically."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Generic, TypeVar

from pydantic import ConfigDict, TypeAdapter, ValidationError
from pydantic_core import from_json

from serving.store.connection import BrokenDocument, StoreUnavailable

T = TypeVar("T")


class Codec(Generic[T]):
    """JSON of one dataclass. Unknown, missing or wrongly typed fields, NaN and inf are refused."""

    def __init__(self, kind: type[T], what: str, schema: int | None = None) -> None:
        """`what` names the document in errors; with `schema`, only documents of that schema are read."""
        # Pydantic hands a config down to plain dataclasses, but takes none for a dataclass at the top: hence the tuple.
        # Written as constants, NaN and inf are refused where they are read back; as null they would become "no bound".
        config = ConfigDict(extra="forbid", allow_inf_nan=False, ser_json_inf_nan="constants")
        self._adapter: TypeAdapter[Any] = TypeAdapter(tuple[kind], config=config)  # type: ignore[valid-type]
        self._what = what
        self._schema = schema

    def encode(self, value: T) -> bytes:
        """JSON bytes of `value`, read back once so that nothing unreadable is ever published.

        Raises:
            BrokenDocument: a field holds what readers would refuse (NaN, a wrong type).
        """
        data: bytes = self._adapter.dump_json((value,))[1:-1]
        self.decode(data)
        return data

    def decode(self, data: bytes | str) -> T:
        """The value in `data`.

        Raises:
            BrokenDocument: the message names the first field at fault and says how many there are.
        """
        raw = data.encode() if isinstance(data, str) else data
        if self._schema is not None:
            self._check_schema(raw)
        try:
            value: T = self._adapter.validate_json(b"[" + raw + b"]", strict=True)[0]
        except ValidationError as error:
            first = error.errors(include_url=False, include_input=False)[0]
            field = ".".join(str(part) for part in first["loc"][1:]) or "the whole"
            more = f" (and {error.error_count() - 1} more)" if error.error_count() > 1 else ""
            raise BrokenDocument(f"{self._what}: {field}: {first['msg']}{more}") from error
        return value

    def _check_schema(self, data: bytes) -> None:
        try:
            document = from_json(data)
        except ValueError as error:
            raise BrokenDocument(f"{self._what}: not JSON: {error}") from error
        found = document.get("schema") if isinstance(document, dict) else None
        if found != self._schema:
            raise BrokenDocument(f"{self._what}: schema {found!r}, this program reads {self._schema}")


def read_file(path: Path) -> bytes | None:
    """The file's bytes, or None where there is no file.

    Raises:
        StoreUnavailable: it is there and cannot be read.
    """
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise StoreUnavailable(f"cannot read {path}: {error.strerror or error}") from error


def write_file(path: Path, data: bytes, mode: int | None = None) -> None:
    """Replaces `path` by `data` in one step: a reader sees the old or the new, also after a power cut.

    Args:
        path: the file; folders above it are made.
        data: its new content.
        mode: its permissions; those that the process gives to new files when None.

    Raises:
        StoreUnavailable: the disk is full or the folder cannot be written.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise StoreUnavailable(f"cannot write {path}: {error.strerror or error}") from error


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Holds an exclusive lock beside `path` (other processes wait), so that read, compare, write is one step."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.with_name(f".{path.name}.lock").open("wb")
    except OSError as error:
        raise StoreUnavailable(f"cannot lock {path}: {error.strerror or error}") from error
    with file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
