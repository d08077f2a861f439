"""Files of schedules: written whole or not at all, readable by their owner alone (a webhook's address is a secret)."""

from __future__ import annotations

import fcntl
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any


class ScheduleBroken(Exception):
    """A file of a schedule cannot be read; the message names it and what to do."""


class AlreadyRuns(Exception):
    """Somebody else holds the lock."""


def write_json(path: Path, data: Any) -> None:
    """Replaces the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f"{path.name}.{os.getpid()}.partial")
    descriptor = os.open(partial, os.O_CREAT | os.O_WRONLY | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        json.dump(data, file, indent=1, allow_nan=False)
        file.flush()
        os.fsync(file.fileno())
    partial.replace(path)


def read_json(path: Path) -> Any:
    """What `write_json` wrote; None when there is no such file.

    Raises:
        ScheduleBroken: it is no JSON.
    """
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        raise ScheduleBroken(f"{path} cannot be read ({error}); remove it") from error


def append_json(path: Path, data: Any) -> None:
    """Adds a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(json.dumps(data, allow_nan=False) + "\n")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """The lines that `append_json` wrote; a torn one is left out."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            found.append(json.loads(line))
        except ValueError:
            continue
    return found


@contextmanager
def locked(path: Path, *, waits: bool = False) -> Iterator[int]:
    """Holds the kernel's lock on a file for the time of the block; yields its descriptor.

    A child that is given the descriptor holds the lock too, for as long as it lives.

    Raises:
        AlreadyRuns: somebody holds it, and `waits` is not set.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_CREAT | os.O_RDWR, 0o600)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB))
        except BlockingIOError:
            raise AlreadyRuns(f"{path} is held") from None
        yield descriptor
    finally:
        os.close(descriptor)
