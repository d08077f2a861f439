"""Segments of a usage spool: files of events, written by one worker each, read by whoever adds up or ships.

    usage-20261130T070512.123456Z-gateway-0.open      being written: its writer holds a lock on it
    usage-20261130T070512.123456Z-gateway-0.jsonl     closed, and never written to again

Names sort by time. The kernel lets go of a lock when its process dies, however it dies: so an open segment that
nobody holds was left by a dead worker, and any worker may close it. Its last line, if it was cut off in the middle
of a write, is taken away then; every other line is whole, for each is one write.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from serving.metering.events import BrokenEvent, UsageEvent, decode

OPEN, CLOSED = ".open", ".jsonl"
WORKER_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")
_STAMP = "%Y%m%dT%H%M%S.%fZ"
_NAME = re.compile(r"usage-\d{8}T\d{6}\.\d{6}Z-[A-Za-z0-9._-]{1,64}")
_TAIL_BYTES = 64 * 1024
_MODE = 0o600

OnBroken = Callable[[str], None]
"""Told of a line that holds no event: file, line and what is wrong."""


@dataclass(slots=True)
class Segment:
    """An open segment and the lock that comes with it.

    Attributes:
        size: where its last whole line ends.
        torn: a part of a line stands behind that; it goes before anything else is written.
    """

    path: Path
    fd: int
    size: int = 0
    torn: bool = False

    @classmethod
    def create(cls, folder: Path, worker_id: str, now_s: float) -> Segment:
        """A new segment of this worker. Raises OSError."""
        microseconds = round(now_s * 1e6)
        while True:
            stamp = datetime.fromtimestamp(microseconds / 1e6, UTC).strftime(_STAMP)
            path = folder / f"usage-{stamp}-{worker_id}{OPEN}"
            microseconds += 1
            if path.with_suffix(CLOSED).exists():
                continue
            try:
                fd = _locked(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL)
            except FileExistsError:
                continue
            if fd is not None:  # else another worker looked in between, and took it for one that was left
                return cls(path, fd)

    def append(self, data: bytes) -> None:
        """Writes whole lines at once, or nothing of them that stays. Raises OSError."""
        if self.torn:
            self._repair()
        written = os.write(self.fd, data)
        if written != len(data):  # the disk is full to the byte
            self.torn = True
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        self.size += written

    def close(self) -> None:
        """Lets go of it under its closed name; an empty one is removed. Raises OSError."""
        try:
            if self.torn:
                self._repair()
            if self.size:
                self.path.rename(self.path.with_suffix(CLOSED))
            else:
                self.path.unlink()
        finally:
            os.close(self.fd)

    def _repair(self) -> None:
        os.ftruncate(self.fd, self.size)
        self.torn = False


def close_left(folder: Path) -> int:
    """Closes the segments that dead workers left; returns how many ended in half a line. Raises OSError."""
    return sum(_close_left(path) for path in sorted(folder.glob(f"usage-*{OPEN}")))


def _close_left(path: Path) -> bool:
    try:
        fd = _locked(path, os.O_RDWR)
    except FileNotFoundError:
        return False  # closed in between
    if fd is None:
        return False
    size = os.fstat(fd).st_size
    end = _end_of_last_line(fd, size)
    Segment(path, fd, end, torn=end < size).close()
    return end < size


def segments(folder: Path) -> list[Path]:
    """All segments, open and closed, oldest first; each by the name that it has now."""
    found = {path.stem: path for path in sorted(folder.glob("usage-*")) if _is_segment(path)}
    return [found[stem] for stem in sorted(found)]


def closed_segments(folder: Path) -> list[Path]:
    """Those that nobody writes to any more, oldest first."""
    return [path for path in segments(folder) if path.suffix == CLOSED]


def read_events(folder: Path, on_broken: OnBroken | None = None) -> Iterator[UsageEvent]:
    """The events of a spool, segment by segment; a worker may be writing to it.

    Each is there once. Delivery from here on is at least once: who adds up what was shipped counts an id once.

    Args:
        folder: of the spool.
        on_broken: told of each line that holds no event, which is left out then.

    Raises:
        BrokenEvent: a line holds no event and there is no `on_broken`.
    """
    for path in segments(folder):
        yield from read_segment(path, on_broken)


def read_segment(path: Path, on_broken: OnBroken | None = None) -> Iterator[UsageEvent]:
    """The events of one segment, which may be closed or removed meanwhile. A last line without its end is left out.

    Raises:
        BrokenEvent: as `read_events`.
    """
    file = None
    for candidate in (path, path.with_suffix(CLOSED)):
        try:
            file = candidate.open("rb")
            break
        except FileNotFoundError:
            continue
    if file is None:
        return
    with file:
        for number, line in enumerate(file, start=1):
            if not line.endswith(b"\n"):
                continue
            try:
                yield decode(line)
            except BrokenEvent as error:
                where = f"{file.name}, line {number}: {error}"
                if on_broken is None:
                    raise BrokenEvent(where) from None
                on_broken(where)


def _is_segment(path: Path) -> bool:
    return path.suffix in (OPEN, CLOSED) and _NAME.fullmatch(path.stem) is not None


def _locked(path: Path, flags: int) -> int | None:
    """The file, opened and locked; None when somebody else has it or has just closed it."""
    fd = os.open(path, flags | os.O_CLOEXEC, _MODE)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.path.samestat(os.fstat(fd), path.stat()):
            return fd
    except (BlockingIOError, FileNotFoundError):
        pass
    except OSError:
        os.close(fd)
        raise
    os.close(fd)
    return None


def _end_of_last_line(fd: int, size: int) -> int:
    """Where the last whole line ends: what stands behind it was cut off."""
    end = size
    while end > 0:
        start = max(end - _TAIL_BYTES, 0)
        found = os.pread(fd, end - start, start).rfind(b"\n")
        if found >= 0:
            return start + found + 1
        end = start
    return 0
