"""What is older than its kind of data may be kept, and taking it away. A plan first, so that it can be shown.

replays    stored answers of requests with an Idempotency-Key, in the store: the only content that is kept at all
decisions  decision records, whole files
logs       lines of the gateway's and the control plane's logs; whole files of the other parts
records    request records of measurements that are in MLflow; their figures stay
usage      usage events: they are money, and go only when that is said
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from enum import StrEnum
from functools import partial
from pathlib import Path

import orjson

from serving.metering.events import BrokenEvent, decode
from serving.metering.segments import closed_segments
from workbench.wiring import Layout

DAY_S = 86_400.0
SUFFIX = ".purging"
"""Of the copy that a file's remaining lines wait in; one that lies there was left by a purge that was cut off."""


class Kind(StrEnum):
    """Kinds of data, as settings and tenants name them."""

    REPLAYS = "replays"
    DECISIONS = "decisions"
    LOGS = "logs"
    RECORDS = "records"
    USAGE = "usage"


OF_A_TENANT = (Kind.REPLAYS, Kind.USAGE)
"""Kinds in which a tenant's data can be told from others'. Logs, decision and request records name no tenant."""


@dataclass(frozen=True, slots=True)
class Removal:
    """One thing to take away; `act()` does it and may raise OSError."""

    kind: Kind
    path: Path
    num_bytes: int
    is_whole: bool
    act: Callable[[], object]


@dataclass(frozen=True, slots=True)
class Scope:
    """What to look for.

    Attributes:
        kinds: of data.
        before_s: for each kind, the Unix time before which its data goes.
        tenant: only this tenant's data, in kinds that can tell.
        is_running: whether a stack runs here: its files are emptied then, never unlinked under a process.
        drops_usage: whether usage events may go.
    """

    kinds: tuple[Kind, ...]
    before_s: Mapping[Kind, float]
    tenant: str | None = None
    is_running: bool = False
    drops_usage: bool = False


def plan(places: Layout, scope: Scope) -> list[Removal]:
    """What is to go from the data folder. The store's part, `replays`, is its own. Raises OSError."""
    found: list[Removal] = []
    if Kind.DECISIONS in scope.kinds and scope.tenant is None:
        found += _whole(Kind.DECISIONS, sorted(places.decisions_dir.glob("decisions-*.jsonl")), scope)
    if Kind.LOGS in scope.kinds and scope.tenant is None:
        for path in sorted(places.log_dir.glob("*.log")):
            found += _of_log(path, scope)
        others = [places.mlflow_dir / "server.log", places.store_dir / "store.log"]
        found += _whole(Kind.LOGS, [path for path in others if path.exists()], scope)
    if Kind.RECORDS in scope.kinds and scope.tenant is None:
        found += _whole(Kind.RECORDS, _logged_records(places.results_dir), scope)
    if Kind.USAGE in scope.kinds and scope.drops_usage:
        found += _of_usage(places.usage_dir, scope)
    return found


def num_kept_usage(places: Layout, scope: Scope) -> int:
    """Segments of usage that are old enough to go and stay, because no ledger has committed them."""
    if Kind.USAGE not in scope.kinds or scope.drops_usage:
        return 0
    return sum(_age_is_over(path, scope.before_s[Kind.USAGE]) for path in closed_segments(places.usage_dir))


def drop_lines(path: Path, drops: Callable[[bytes], bool]) -> None:
    """Rewrites a file without some of its lines, though a process may be appending to it.

    Who appends has the file itself open and not its name, so the file is emptied and filled again. A line that comes
    in the microseconds between the last look and the emptying is lost, as with any rotation of a log in use.

    Raises:
        OSError: the rest of the lines could not be kept, and nothing was changed; or they wait in the copy beside it.
    """
    copy = path.with_name(path.name + SUFFIX)
    with path.open("r+b") as file, copy.open("wb") as kept:
        try:
            for line in file:
                if not drops(line):
                    kept.write(line)
            kept.flush()
        except OSError:
            copy.unlink()
            raise
        for line in iter(file.readline, b""):  # what came while the copy was written
            kept.write(line)
        kept.flush()
        file.truncate(0)
    with copy.open("rb") as kept, path.open("ab") as out:
        shutil.copyfileobj(kept, out)
    copy.unlink()


def _whole(kind: Kind, paths: Iterable[Path], scope: Scope) -> Iterator[Removal]:
    """Files whose last write is old enough: all in them is older."""
    for path in paths:
        if _age_is_over(path, scope.before_s[kind]):
            size = path.stat().st_size
            in_use = scope.is_running and kind is Kind.LOGS
            if size or not in_use:
                yield Removal(kind, path, size, True, partial(os.truncate, path, 0) if in_use else path.unlink)


def _of_log(path: Path, scope: Scope) -> Iterator[Removal]:
    """A log of ours line by line, one of another format as a whole."""
    with path.open("rb") as file:
        is_ours = file.readline().startswith(b'{"at"')
    if not is_ours:
        yield from _whole(Kind.LOGS, [path], scope)
        return
    before_s = scope.before_s[Kind.LOGS]
    num_bytes = _num_bytes(path, _older_line(before_s))
    if num_bytes:
        yield Removal(Kind.LOGS, path, num_bytes, False, lambda: drop_lines(path, _older_line(before_s)))


def _older_line(before_s: float) -> Callable[[bytes], bool]:
    """Whether a line goes. One without a time belongs to the one before it: a traceback, a remark of a library."""
    goes = False

    def is_old(line: bytes) -> bool:
        nonlocal goes
        with contextlib.suppress(ValueError, TypeError, KeyError):
            goes = datetime.fromisoformat(orjson.loads(line)["at"]).timestamp() < before_s
        return goes

    return is_old


def _of_usage(folder: Path, scope: Scope) -> Iterator[Removal]:
    before_s, tenant = scope.before_s[Kind.USAGE], scope.tenant
    if tenant is None:
        yield from _whole(Kind.USAGE, closed_segments(folder), scope)
        return

    def is_theirs(line: bytes) -> bool:
        try:
            event = decode(line)
        except BrokenEvent:
            return False
        return event.tenant == tenant and event.ended_at_s < before_s

    for path in closed_segments(folder):
        num_bytes = _num_bytes(path, is_theirs)
        if num_bytes:
            yield Removal(Kind.USAGE, path, num_bytes, False, partial(drop_lines, path, is_theirs))


def _logged_records(results_dir: Path) -> Iterator[Path]:
    """Request records beside a cell whose measurement MLflow has: `mlflow.json` names it by sweep, cell and time."""
    for marker in sorted(results_dir.glob("*/mlflow.json")):
        try:
            runs = orjson.loads(marker.read_bytes())["runs"]
        except (ValueError, TypeError, KeyError):
            continue
        for measurement in runs:
            _, _, name = str(measurement).partition("/")
            cell, _, began_ms = name.rpartition("/")
            path = marker.parent / f"{cell}.{began_ms}.parquet"
            if path.exists():
                yield path


def _num_bytes(path: Path, drops: Callable[[bytes], bool]) -> int:
    with path.open("rb") as file:
        return sum(len(line) for line in file if drops(line))


def _age_is_over(path: Path, before_s: float) -> bool:
    return path.stat().st_mtime < before_s
