"""What runs, on disk: `.workbench/run/stack.json`, so that another command can ask, follow or end the stack.

A process is ours only while its pid has the start that was written down, in the kernel's ticks of the same boot:
a pid alone may have gone to somebody else, and a start in seconds moves when the clock is set. Its command line is
kept for people to read; vLLM rewrites its own, so it proves nothing.
Every child leads a session of its own, so what it started is found by that session even after it died.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

_PROC = Path("/proc")


@dataclass(frozen=True, slots=True)
class ProcessRecord:
    """One process as written down when it started.

    `start_ticks` are the kernel's, since the boot whose id is `boot_id`.
    """

    name: str
    pid: int
    start_ticks: int
    command: str
    log_path: str | None = None
    boot_id: str = ""

    @classmethod
    def of(cls, name: str, pid: int, log_path: Path | None = None) -> ProcessRecord | None:
        """The record of a running process; None when it has just ended."""
        start_ticks = _start_ticks(pid)
        try:
            command = " ".join(psutil.Process(pid).cmdline())
        except psutil.Error:
            return None
        if start_ticks is None or start_ticks != _start_ticks(pid):
            return None
        return cls(name, pid, start_ticks, command, None if log_path is None else str(log_path), _boot_id())

    @property
    def is_running(self) -> bool:
        """Whether this very process runs, and not another that got its pid."""
        try:
            return self._is_same() and psutil.Process(self.pid).status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False

    def signal(self, number: signal.Signals) -> bool:
        """Sends a signal to this very process; False when it does not run."""
        try:
            process = psutil.Process(self.pid)  # knows what it looked at, and signals nobody else
            if not self._is_same():
                return False
            process.send_signal(number)
        except psutil.Error:
            return False
        return True

    def session(self) -> list[psutil.Process]:
        """It and what it started in its session, as far as they still run.

        The kernel gives a pid to nobody while it names a session, so members of a session whose leader is gone
        are still ours; a leader with another start is a stranger, and so is its session. After another boot all are.
        """
        if self.boot_id != _boot_id() or (psutil.pid_exists(self.pid) and not self._is_same()):
            return []
        members = []
        for process in psutil.process_iter():
            with contextlib.suppress(psutil.Error, ProcessLookupError, PermissionError):
                if process.pid == self.pid or os.getsid(process.pid) == self.pid:
                    members.append(process)
        return [member for member in members if member.status() != psutil.STATUS_ZOMBIE]

    def _is_same(self) -> bool:
        return self.boot_id == _boot_id() and self.start_ticks == _start_ticks(self.pid)


@dataclass(frozen=True, slots=True)
class PoolFacts:
    """What a measurement must know of a pool beyond what the store says of it.

    `weights_path` holds the model's tokenizer; `cores` are those of each replica by its id, empty when it is
    bound to none; the two `covers` say what the pool's fingerprints are digests of.
    """

    weights_path: str | None
    engine_covers: dict[str, Any]
    hardware_covers: dict[str, Any]
    cores: dict[str, list[int]]


@dataclass(frozen=True, slots=True)
class StackState:
    """A running stack: who supervises it, what it started, where to find it."""

    supervisor: ProcessRecord
    processes: tuple[ProcessRecord, ...] = ()
    urls: dict[str, str] = field(default_factory=dict)
    pools: dict[str, PoolFacts] = field(default_factory=dict)

    @property
    def is_running(self) -> bool:
        """Whether its supervisor still runs."""
        return self.supervisor.is_running

    @property
    def leftovers(self) -> list[ProcessRecord]:
        """Children that outlived a supervisor that died."""
        return [] if self.is_running else [record for record in self.processes if record.session()]


class StateFile:
    """The file, replaced in one step."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self) -> StackState | None:
        """What is written there; None without a file or when it cannot be read as ours."""
        try:
            data = json.loads(self.path.read_text("utf-8"))
            return StackState(
                supervisor=_checked(ProcessRecord(**data["supervisor"])),
                processes=tuple(_checked(ProcessRecord(**record)) for record in data["processes"]),
                urls=dict(data["urls"]),
                pools={pool_id: PoolFacts(**facts) for pool_id, facts in data["pools"].items()},
            )
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            # Half a file of a machine that lost power: nothing in it can be trusted to be ours.
            return None

    def holds(self, state: StackState) -> bool:
        """Whether exactly this is written there."""
        try:
            return self.path.read_text("utf-8") == _as_text(state)
        except (OSError, ValueError):
            return False

    def write(self, state: StackState) -> None:
        """Replaces the file.

        Raises:
            OSError: it cannot be written, as on a full disk; what was there before is there still.
        """
        self.path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self.path.with_suffix(f".{os.getpid()}.tmp")
        try:
            temporary.write_text(_as_text(state), "utf-8")
            temporary.replace(self.path)
        finally:
            with contextlib.suppress(OSError):
                temporary.unlink(missing_ok=True)

    def remove(self) -> None:
        """Forgets the stack."""
        self.path.unlink(missing_ok=True)


def _start_ticks(pid: int) -> int | None:
    """When the kernel says that `pid` began; None when nobody has it."""
    try:
        # The 22nd field; the second one, the command's name, may hold spaces.
        return int((_PROC / str(pid) / "stat").read_text("utf-8", "replace").rpartition(")")[2].split()[19])
    except (OSError, IndexError, ValueError):
        return None


@functools.cache
def _boot_id() -> str:
    """The kernel's name for the time since the machine was started."""
    return (_PROC / "sys/kernel/random/boot_id").read_text("ascii").strip()


def _as_text(state: StackState) -> str:
    return json.dumps(asdict(state), indent=2)


def _checked(record: ProcessRecord) -> ProcessRecord:
    """The record when its types are as written by us: a signal to pid -1 would reach everything.

    Raises:
        ValueError: they are not.
    """
    is_pid = type(record.pid) is int and record.pid > 0
    is_start = type(record.start_ticks) is int and isinstance(record.boot_id, str)
    if not (is_pid and is_start and isinstance(record.name, str)):
        raise ValueError(f"not a process that this program wrote down: {record}")
    return record


def end_sessions(records: list[ProcessRecord], *, timeout_s: float = 10.0) -> list[str]:
    """Ends what records still run: SIGTERM, and SIGKILL after `timeout_s`.

    Returns:
        The names of those that were running.
    """
    found = [(record.name, record.session()) for record in records]
    running = [process for _, members in found for process in members]
    _signal_all(running, signal.SIGTERM)
    deadline_s = time.monotonic() + timeout_s
    _, alive = psutil.wait_procs(running, timeout=max(0.0, deadline_s - time.monotonic()))
    _signal_all(alive, signal.SIGKILL)
    psutil.wait_procs(alive, timeout=2.0)
    return [name for name, members in found if members]


def _signal_all(processes: list[psutil.Process], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(psutil.Error):
            process.send_signal(number)
