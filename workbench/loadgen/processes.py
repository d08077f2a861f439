"""Several processes that share one load: the parent's side.

    cut the schedule → start a child a share → all are ready → one start for all → merge what they bring

    child → parent   ready · ended N · dry (its part of a closed loop has run out) · done
    parent → child   start T (on time.perf_counter, one clock for all processes of a machine) · enough · stop

A child ends its share when its pipe from the parent closes, so that none is left when the parent is killed. One that
dies ends the run for all: the load is no longer the one that was asked for. What the others had measured is kept.
"""

from __future__ import annotations

import asyncio
import os
import pickle
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from serving.core.errors import Unavailable
from workbench.loadgen.plan import Share
from workbench.loadgen.sending import OnProgress, SendOptions, Sent

MAX_STREAMS_A_PROCESS = 2_000
MAX_SENDS_A_PROCESS_RPS = 1_000
MAX_PROCESSES = 64
START_AHEAD_S = 0.05
READY_TIMEOUT_S = 60.0
STOP_TIMEOUT_S = 10.0
TAIL_CHARS = 400


class ClientProcessFailed(Unavailable):
    """No client process lived to bring a result."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a child is given, in a file that only we can read."""

    base_url: str
    share: Share
    options: SendOptions
    result: Path


def num_processes(load: Share, wanted: int | None) -> int:
    """How many processes a load takes: as many as wanted, or as the cores that this process may use allow.

    One drives up to 2,000 streams or 1,000 sends in a second.
    """
    if wanted is not None:
        return wanted
    by_streams = -(-(load.concurrency or 0) // MAX_STREAMS_A_PROCESS)
    by_sends = -(-load.peak_rps // MAX_SENDS_A_PROCESS_RPS)
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(num_cores, MAX_PROCESSES, max(by_streams, by_sends)))


@dataclass(slots=True)
class _Child:
    """A child and what it has said."""

    number: int
    process: asyncio.subprocess.Process
    result: Path
    stderr: Path
    is_ready: asyncio.Event = field(default_factory=asyncio.Event)
    num_ended: int = 0
    is_done: bool = False

    def tell(self, line: str) -> None:
        """Sends a command; one that has died hears nothing."""
        if self.process.stdin is not None and not self.process.stdin.is_closing():
            with suppress(ConnectionError):
                self.process.stdin.write(f"{line}\n".encode())

    def death(self) -> str | None:
        """How it died; None when it has brought its result."""
        if self.is_done:
            return None
        words = self.stderr.read_text("utf-8", "replace").strip()[-TAIL_CHARS:] if self.stderr.exists() else ""
        code = self.process.returncode
        return f"client process {self.number + 1} died (exit code {code})" + (f": {words}" if words else "")


@dataclass(slots=True)
class _Family:
    """All children of a run."""

    children: list[_Child]
    on_progress: OnProgress | None
    num_requests: int
    is_closed: bool

    def tell_all(self, line: str) -> None:
        """Sends a command to each."""
        for child in self.children:
            child.tell(line)

    async def listen(self, child: _Child) -> None:
        """Takes what the child says until it has ended."""
        if child.process.stdout is None:
            raise RuntimeError("the child has no pipe")
        async for line in child.process.stdout:
            word, _, value = line.decode().strip().partition(" ")
            if word == "ready":
                child.is_ready.set()
            elif word == "ended":
                child.num_ended = int(value)
                if self.on_progress is not None:
                    self.on_progress(sum(one.num_ended for one in self.children), self.num_requests)
            elif word == "dry" and self.is_closed:
                self.tell_all("enough")
            elif word == "done":
                child.is_done = True
        await child.process.wait()
        child.is_ready.set()
        if not child.is_done:
            self.tell_all("stop")

    async def begin(self) -> None:
        """Starts all at one moment, once each is ready."""
        await asyncio.gather(*(child.is_ready.wait() for child in self.children))
        if all(child.process.returncode is None for child in self.children):
            self.tell_all(f"start {time.perf_counter() + START_AHEAD_S!r}")
        else:
            self.tell_all("stop")


async def send_shares(
    base_url: str,
    shares: Sequence[Share],
    options: SendOptions,
    *,
    stop: asyncio.Event | None = None,
    on_progress: OnProgress | None = None,
) -> tuple[list[Sent], list[str]]:
    """Sends each share in a process of its own.

    Returns:
        What those brought that lived, and how the others died.

    Raises:
        ClientProcessFailed: none lived.
    """
    with tempfile.TemporaryDirectory(prefix="workbench-load-") as name:
        folder = Path(name)
        children: list[_Child] = []
        try:
            for number, share in enumerate(shares):
                children.append(await _start(number, Job(base_url, share, options, folder / f"{number}.sent"), folder))
            num_requests = sum(share.num_requests for share in shares)
            family = _Family(children, on_progress, num_requests, shares[0].concurrency is not None)
            await _run(family, stop)
        finally:
            await _end(children)
        sent = [pickle.loads(child.result.read_bytes()) for child in children if child.is_done]
        deaths = [death for death in (child.death() for child in children) if death is not None]
    if not sent:
        raise ClientProcessFailed("; ".join(deaths))
    return sent, deaths


async def _start(number: int, job: Job, folder: Path) -> _Child:
    job_file, stderr = folder / f"{number}.job", folder / f"{number}.err"
    job_file.write_bytes(pickle.dumps(job))
    with stderr.open("wb") as errors:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "workbench.loadgen.client_process", str(job_file)),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=errors,
            start_new_session=True,  # Ctrl-C is the parent's: it tells the children to end and keeps what they bring
        )
    return _Child(number, process, job.result, stderr)


async def _run(family: _Family, stop: asyncio.Event | None) -> None:
    listening = [asyncio.create_task(family.listen(child)) for child in family.children]
    stopping = asyncio.create_task(_told(family, stop))
    try:
        async with asyncio.timeout(READY_TIMEOUT_S):
            await family.begin()
        await asyncio.gather(*listening)
    except TimeoutError:
        raise ClientProcessFailed(f"the client's processes were not ready within {READY_TIMEOUT_S:g} s") from None
    finally:
        for task in (stopping, *listening):
            task.cancel()
        await asyncio.gather(stopping, *listening, return_exceptions=True)


async def _told(family: _Family, stop: asyncio.Event | None) -> None:
    if stop is not None:
        await stop.wait()
        family.tell_all("stop")


async def _end(children: Sequence[_Child]) -> None:
    """Ends what still runs: a closed pipe tells a child to, and who does not listen is killed."""
    for child in children:
        if child.process.stdin is not None:
            child.process.stdin.close()
    waiting = [asyncio.create_task(child.process.wait()) for child in children]
    try:
        if waiting:
            await asyncio.wait(waiting, timeout=STOP_TIMEOUT_S)
    finally:
        for child in children:
            if child.process.returncode is None:
                child.process.kill()
        for task in waiting:
            await task
