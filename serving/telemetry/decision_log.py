"""Sampled routing decisions, and all that moved a rollout, as JSON lines, read back for replay.

Each worker writes to a file of its own.

A record holds token counts, loads and prices, never a prompt. `core.policies.routing.replay` makes the same
decision from the record alone. A worker begins a new file with each day (UTC), so that `workbench purge` can take
away whole files that nobody writes to.
"""

from __future__ import annotations

import logging
import os
import random
from collections.abc import Collection, Iterator
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import BinaryIO, TypeVar

import orjson
from pydantic import TypeAdapter, ValidationError

from serving.core.decisions import Decision, RouteRecord
from serving.core.policies.rollout import RolloutRecord
from serving.core.state import RequestView, RouteView

logger = logging.getLogger(__name__)

T = TypeVar("T")

DAY_S = 86_400
_RECORD = TypeAdapter(RouteRecord)
_ROLLOUT_RECORD = TypeAdapter(RolloutRecord)


class BrokenRecord(ValueError):
    """A line of a decision log cannot be read; the message names file and line."""


class DecisionLog:
    """Appends a share of the decisions to `<folder>/decisions-<day>-<pid>.jsonl`."""

    def __init__(self, folder: Path, frac: float, rng: random.Random) -> None:
        """Makes the folder. Raises OSError when it cannot be written."""
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write decision records to {folder}")
        self._folder = folder
        self._frac = frac
        self._rng = rng
        self._file: BinaryIO | None = None
        self._day: int | None = None
        self._is_failing = False

    def offer(
        self, request: RequestView, view: RouteView, seed: int, excluded: Collection[str], decision: Decision
    ) -> None:
        """Writes the decision if it is in the sample. A full disk is logged once and costs records, not requests."""
        if self._rng.random() >= self._frac:
            return
        record = RouteRecord.of(request, view, seed, excluded, decision)
        try:
            file = self._file_of(int(view.now_s // DAY_S))
            file.write(orjson.dumps(record) + b"\n")
            file.flush()
        except OSError as error:
            if not self._is_failing:
                logger.error("decision records are lost: cannot write to %s: %s", self._folder, error.strerror)
            self._is_failing = True
        else:
            self._is_failing = False

    def _file_of(self, day: int) -> BinaryIO:
        if self._file is None or day != self._day:
            self.close()
            stamp = datetime.fromtimestamp(day * DAY_S, UTC).strftime("%Y%m%d")
            self._file = (self._folder / f"decisions-{stamp}-{os.getpid()}.jsonl").open("ab")
            self._day = day
        return self._file

    def close(self) -> None:
        """Closes the file; the next record opens one again."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> DecisionLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class RolloutLog:
    """Appends decisions that moved a rollout to `<folder>/rollouts.jsonl`: a few a rollout, so that none is thinned."""

    def __init__(self, folder: Path | None) -> None:
        """`folder` None writes nothing."""
        self._path = None if folder is None else folder / "rollouts.jsonl"

    def write(self, record: RolloutRecord) -> None:
        """Appends the record. A full disk is logged and costs records, not rollouts."""
        if self._path is None:
            return
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(orjson.dumps(record) + b"\n")
        except OSError as error:
            logger.error("a record of a rollout is lost: cannot write to %s: %s", self._path, error.strerror)


def read_rollouts(path: Path) -> Iterator[RolloutRecord]:
    """The records of a file of rollouts, or of the one in a folder. Raises BrokenRecord."""
    file = path / "rollouts.jsonl" if path.is_dir() else path
    yield from _records(file, _ROLLOUT_RECORD) if file.exists() else ()


def read(path: Path) -> Iterator[RouteRecord]:
    """The records of a file, or of all files of a folder in the order of their names.

    A last line without its end (the worker was killed while writing) is left out.

    Raises:
        BrokenRecord: any other line that is no record.
    """
    for file in sorted(path.glob("decisions-*.jsonl")) if path.is_dir() else [path]:
        yield from _records(file, _RECORD)


def _records(file: Path, kind: TypeAdapter[T]) -> Iterator[T]:
    with file.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                yield kind.validate_json(line)
            except ValidationError as error:
                raise BrokenRecord(f"{file}, line {number}: {error.errors(include_url=False)[0]['msg']}") from error
