"""A child process with a log file, a way to tell that it is ready, and a keeper that starts it again.

One that has a place on a port (slots.py) can be replaced while it serves:

    successor starts ─▶ says that it serves ─▶ the old one is told to end ─▶ it finishes what it has
           └── does not come up: it is ended, and the old one stays
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from workbench.stack.slots import HandOver, Slot
from workbench.stack.state import ProcessRecord, end_sessions

logger = logging.getLogger(__name__)

OnChange = Callable[[str, str], None]
"""Called with a part's name and what it does now."""


class ServiceFailed(Exception):
    """A part of the stack did not start; the message holds the end of its log."""


class Part(Protocol):
    """What the stack starts, watches and ends."""

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        ...

    @property
    def is_alive(self) -> bool:
        """Whether it runs."""
        ...

    async def start(self) -> None:
        """Returns when it serves; raises when it does not."""
        ...

    async def stop(self) -> None:
        """Returns when it has ended."""
        ...


@dataclass(slots=True)
class _Child:
    process: asyncio.subprocess.Process
    record: ProcessRecord | None
    handed: HandOver | None
    has_been_ready: bool = False

    @property
    def is_alive(self) -> bool:
        return self.process.returncode is None


class Service:
    """One child in a session of its own; two while it is replaced.

    Args:
        name: what people call it.
        command: the program and its arguments.
        log_path: where its output goes, appended.
        ready: asked until it answers True; None where the child itself says that it serves.
        slot: the place on a port that the child is given; on the pipe of it, it says when it serves.
        env: variables over those of this process.
        timeouts: seconds to become ready, and to end after SIGTERM before SIGKILL.
    """

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        log_path: Path,
        *,
        ready: Callable[[], Awaitable[bool]] | None = None,
        slot: Slot | None = None,
        env: Mapping[str, str] | None = None,
        start_timeout_s: float = 60.0,
        stop_timeout_s: float = 15.0,
    ) -> None:
        self.name = name
        self.log_path = log_path
        self._command = list(command)
        self._ready = ready
        self._slot = slot
        self._env = dict(env or {})
        self._start_timeout_s = start_timeout_s
        self._stop_timeout_s = stop_timeout_s
        self._child: _Child | None = None
        self._others: list[tuple[str, _Child]] = []
        self._changing = asyncio.Lock()

    @property
    def is_ready(self) -> bool:
        """Whether the child runs and has answered since it started."""
        return self._child is not None and self._child.has_been_ready and self.is_alive

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return self._child.process.pid if self._child is not None and self.is_alive else None

    @property
    def is_alive(self) -> bool:
        """Whether the child runs."""
        return self._child is not None and self._child.is_alive

    @property
    def others(self) -> list[tuple[str, int]]:
        """While it is replaced: the successor that is not ready yet, or the one that finishes; with names."""
        return [(f"{self.name}-{role}", child.process.pid) for role, child in self._others if child.is_alive]

    async def start(self) -> None:
        """Starts the child and waits until it is ready; what an earlier one left in its session ends first.

        Raises:
            ServiceFailed: it ended or did not become ready in time.
            OSError: its log cannot be opened, or the program not be started.
            PortTaken: somebody else has its port.
        """
        async with self._changing:
            if self.is_ready:  # it was replaced when its keeper had found it dead
                return
            if self._child is not None:
                await self._end_session(self._child)
            self._child = None
            try:
                self._child = await self._spawn()
                await self._until_ready(self._child)
            except BaseException:
                if self._slot is not None:
                    self._slot.close()
                raise

    async def replace(self, on_step: Callable[[str], None] = lambda what: None) -> None:
        """Starts a successor beside the child, and when it serves ends the child, which finishes what it has.

        Cancelled, it leaves both to `stop`.

        Args:
            on_step: told what happens, when it does.

        Raises:
            ServiceFailed: the child does not run, or the successor did not come up; the child goes on then.
            OSError: the successor could not be started.
        """
        async with self._changing:
            old = self._child
            if old is None or not old.is_alive:
                raise ServiceFailed(f"{self.name} does not run, and so cannot be replaced; {self.log_tail()}")
            successor = await self._spawn()
            self._others.append(("successor", successor))
            on_step("its successor starts")
            try:
                await self._until_ready(successor)
            except (ServiceFailed, OSError):
                self._others.clear()
                raise
            self._child, self._others = successor, [("old", old)]
            on_step("its successor serves; the old one finishes what it has")
            await self._end(old)
            self._others.clear()

    async def stop(self) -> None:
        """Ends the child and whatever it left in its session; its port is given up at once."""
        if self._slot is not None:
            self._slot.close()
        children = [child for _, child in self._others]
        if self._child is not None:
            children.append(self._child)
        await asyncio.gather(*(self._end(child) for child in children))
        self._others.clear()

    # ----

    async def _spawn(self) -> _Child:
        self.log_path.parent.mkdir(parents=True, exist_ok=True)
        handed = None if self._slot is None else self._slot.hand_over()
        try:
            with self.log_path.open("ab") as log:
                process = await asyncio.create_subprocess_exec(
                    *self._command,
                    *(() if handed is None else handed.arguments),
                    stdin=asyncio.subprocess.DEVNULL,
                    stdout=log,
                    stderr=log,
                    env={**os.environ, **self._env},
                    start_new_session=True,
                    pass_fds=() if handed is None else handed.fds,
                )
        except BaseException:
            if handed is not None:
                handed.close()
            raise
        if handed is not None:
            handed.given()
        return _Child(process, ProcessRecord.of(self.name, process.pid), handed)

    async def _until_ready(self, child: _Child) -> None:
        """Returns when it is; one that is not in time has been ended."""
        deadline_s = time.monotonic() + self._start_timeout_s
        try:
            while not await self._is_ready(child):
                if not child.is_alive:
                    code = child.process.returncode
                    raise ServiceFailed(f"{self.name} ended at its start (exit code {code}); {self.log_tail()}")
                if time.monotonic() > deadline_s:
                    await self._end(child)
                    raise ServiceFailed(
                        f"{self.name} was not ready within {self._start_timeout_s:g} s; {self.log_tail()}"
                    )
                await asyncio.sleep(0.1)
        finally:
            if child.handed is not None:
                child.handed.close()
        child.has_been_ready = True

    async def _is_ready(self, child: _Child) -> bool:
        if child.handed is not None and not child.handed.is_ready():
            return False
        return self._ready is None or await self._ready()

    async def _end(self, child: _Child) -> None:
        if child.is_alive:
            with contextlib.suppress(ProcessLookupError):
                child.process.terminate()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(child.process.wait(), self._stop_timeout_s)
        await self._end_session(child)
        await child.process.wait()

    async def _end_session(self, child: _Child) -> None:
        """Kills what runs in the child's session: a server's worker outlives its leader and keeps the port.

        The record, not the pid alone, says that they are ours: by now the pid may be a stranger's.
        """
        if child.record is not None:
            await asyncio.to_thread(end_sessions, [child.record], timeout_s=0.0)

    def log_tail(self, num_lines: int = 12) -> str:
        """The end of its log, for a message."""
        return tail(self.log_path, num_lines)


def unfailing(on_change: OnChange) -> OnChange:
    """The same, but what goes wrong in telling ends nobody's work: a terminal may be gone, a disk full."""

    def tell(name: str, what: str) -> None:
        try:
            on_change(name, what)
        except Exception:  # whatever the listener is, the stack goes on without it
            logger.exception("could not tell that %s: %s", name, what)

    return tell


def first_of(failures: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first failure itself, however deep in groups of groups."""
    first = failures.exceptions[0]
    return first_of(first) if isinstance(first, BaseExceptionGroup) else first


def tail(path: Path, num_lines: int) -> str:
    """The last lines of a log and where it is."""
    if not path.exists():
        return f"no log at {path}"
    lines = path.read_text("utf-8", errors="replace").splitlines()[-num_lines:]
    return f"the end of {path}:\n" + "\n".join(f"    {line}" for line in lines)


async def keep_alive(
    name: str, part: Part, on_change: OnChange, *, poll_s: float = 0.5, backoff_s: float = 0.5, cap_s: float = 30.0
) -> None:
    """Starts the part again whenever it has ended, until cancelled; waits longer after each failure, up to `cap_s`.

    A part that stayed up for a minute begins with the short wait again.
    """
    on_change = unfailing(on_change)
    wait_s, up_since_s = backoff_s, time.monotonic()
    while True:
        await asyncio.sleep(poll_s)
        if part.is_alive:
            continue
        if time.monotonic() - up_since_s > 60.0:
            wait_s = backoff_s
        on_change(name, f"ended; starts again in {wait_s:g} s")
        await asyncio.sleep(wait_s)
        wait_s = min(wait_s * 2, cap_s)
        try:
            await part.start()
        except Exception as error:  # noqa: BLE001 - any failure to start is reported and tried again
            on_change(name, f"failed to start: {error}")
        else:
            up_since_s = time.monotonic()
            on_change(name, "running again")
