"""A worker's usage spool: each event is in the kernel's hands before `append` returns, and no request ever waits or
fails for it.

    append ── one write ──▶ page cache           survives kill -9 of the worker; not fsynced: a power cut may cost
                │                                the last seconds
                └── disk full ──▶ backlog        in memory, bounded; written first as soon as there is room
                                    └── full ──▶ lost: counted, and told to whoever watches

A segment is closed when it is large or old enough to be shipped. What dead workers left is closed by those who live.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from types import TracebackType

from serving.clock import SystemClock
from serving.core.ports import Clock
from serving.metering.events import UsageEvent, encode
from serving.metering.segments import WORKER_ID, Segment, close_left

logger = logging.getLogger(__name__)

_LINES_A_WRITE = 256


@dataclass(frozen=True, slots=True)
class SpoolSettings:
    """Sizes in bytes, times in seconds.

    Attributes:
        max_segment_bytes: a segment is closed at this size, about 20,000 events.
        max_segment_age_s: or at this age, so that little traffic is shipped too.
        max_backlog_bytes: what is kept in memory while the disk takes nothing.
        retry_s: pause between two tries then.
        adopt_s: how often a worker looks for segments that dead ones left.
    """

    max_segment_bytes: int = 16 * 2**20
    max_segment_age_s: float = 300.0
    max_backlog_bytes: int = 16 * 2**20
    retry_s: float = 1.0
    adopt_s: float = 60.0


@dataclass(frozen=True, slots=True)
class SpoolCounts:
    """How the spool is: for metrics. All but `num_backlog` count since the worker began."""

    num_backlog: int = 0
    num_lost: int = 0
    num_torn: int = 0


OnCounts = Callable[[SpoolCounts], None]


class UsageSpool:
    """Appends events to `<folder>/usage-<time>-<worker>.open`.

    Args:
        folder: shared by all workers of a machine; made when missing.
        worker_id: names the worker in file names and in the events' `source`.
        settings: sizes and times.
        clock: times of names and ages.
        on_counts: called when a figure of `counts` has changed.

    Raises:
        OSError: the folder cannot be written: a worker that cannot account for its work must not start.
    """

    def __init__(
        self,
        folder: Path,
        worker_id: str,
        *,
        settings: SpoolSettings | None = None,
        clock: Clock | None = None,
        on_counts: OnCounts | None = None,
    ) -> None:
        if WORKER_ID.fullmatch(worker_id) is None:
            raise ValueError(f"a worker's id is 1 to 64 of a-z A-Z 0-9 . _ -, not {worker_id!r}")
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        if not os.access(folder, os.W_OK | os.X_OK):
            raise PermissionError(f"cannot write usage events to {folder}")
        self.counts = SpoolCounts()
        self._folder = folder
        self._worker_id = worker_id
        self._source = f"/gateway/{worker_id}"
        self._settings = settings or SpoolSettings()
        self._clock = clock or SystemClock()
        self._on_counts = on_counts
        self._segment: Segment | None = None
        self._opened_at_s = 0.0
        self._backlog: deque[bytes] = deque()
        self._backlog_bytes = 0
        self._retry_at_s = self._adopt_at_s = self._clock.monotonic_s()
        self._adopt(self._adopt_at_s)

    def append(self, event: UsageEvent) -> None:
        """Writes the event. Neither waits nor raises: what the disk does not take waits in memory."""
        try:
            line = encode(event, self._source)
        except (TypeError, ValueError, OverflowError):  # a figure that no number of JSON holds
            logger.exception("the usage event of request %s cannot be written", event.id)
            self._count(num_lost=self.counts.num_lost + 1)
            return
        if self._backlog:
            self._keep(line)
            if self._clock.monotonic_s() >= self._retry_at_s:
                self._drain()
            return
        try:
            self._write(line)
        except OSError as error:
            self._failed(error)
            self._keep(line)

    def tick(self) -> None:
        """What has come due without an event: closing an old segment, another try to write, adopting left ones."""
        now_s = self._clock.monotonic_s()
        if self._backlog and now_s >= self._retry_at_s:
            self._drain()
        if self._segment is not None and now_s - self._opened_at_s >= self._settings.max_segment_age_s:
            self._close_segment()
        if now_s >= self._adopt_at_s:
            self._adopt(now_s)

    async def run(self) -> None:
        """Calls `tick` each second until cancelled."""
        while True:
            await asyncio.sleep(self._settings.retry_s)
            self.tick()

    def close(self) -> None:
        """Writes what waits, if it can be written, and closes the segment. Events still waiting then are lost."""
        if self._backlog:
            self._drain()
        if self._backlog:
            logger.error("%d usage events are lost: %s takes none", len(self._backlog), self._folder)
            num_lost = self.counts.num_lost + len(self._backlog)
            self._backlog.clear()
            self._backlog_bytes = 0
            self._count(num_backlog=0, num_lost=num_lost)
        self._close_segment()

    def __enter__(self) -> UsageSpool:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _write(self, lines: bytes) -> None:
        segment = self._segment
        if segment is not None and segment.size + len(lines) > self._settings.max_segment_bytes:
            self._close_segment()
            segment = None
        if segment is None:
            segment = self._segment = Segment.create(self._folder, self._worker_id, self._clock.now_s())
            self._opened_at_s = self._clock.monotonic_s()
        segment.append(lines)

    def _close_segment(self) -> None:
        segment, self._segment = self._segment, None
        if segment is not None:
            try:
                segment.close()
            except OSError as error:  # it keeps its open name, and the next look for left segments closes it
                logger.warning("usage segment %s could not be closed: %s", segment.path, error.strerror)

    def _keep(self, line: bytes) -> None:
        if self._backlog_bytes + len(line) > self._settings.max_backlog_bytes:
            self._count(num_lost=self.counts.num_lost + 1)
            return
        self._backlog.append(line)
        self._backlog_bytes += len(line)
        self._count(num_backlog=len(self._backlog))

    def _drain(self) -> None:
        try:
            while self._backlog:
                lines = list(islice(self._backlog, _LINES_A_WRITE))
                self._write(b"".join(lines))
                for line in lines:
                    self._backlog.popleft()
                    self._backlog_bytes -= len(line)
        except OSError as error:
            self._failed(error)
        else:
            logger.warning("usage events are written again to %s", self._folder)
        self._count(num_backlog=len(self._backlog))

    def _failed(self, error: OSError) -> None:
        if not self._backlog:
            logger.error("usage events wait in memory: cannot write to %s: %s", self._folder, error.strerror)
        self._retry_at_s = self._clock.monotonic_s() + self._settings.retry_s

    def _adopt(self, now_s: float) -> None:
        self._adopt_at_s = now_s + self._settings.adopt_s
        try:
            num_torn = close_left(self._folder)
        except OSError as error:
            logger.warning("usage segments of dead workers stay open: %s", error)
            return
        if num_torn:
            logger.warning("%d usage segments of dead workers ended in half an event, which is lost", num_torn)
            self._count(num_torn=self.counts.num_torn + num_torn)

    def _count(
        self, *, num_backlog: int | None = None, num_lost: int | None = None, num_torn: int | None = None
    ) -> None:
        old = self.counts
        self.counts = SpoolCounts(
            old.num_backlog if num_backlog is None else num_backlog,
            old.num_lost if num_lost is None else num_lost,
            old.num_torn if num_torn is None else num_torn,
        )
        if self._on_counts is not None and self.counts != old:
            self._on_counts(self.counts)
