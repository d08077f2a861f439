"""Sends one process's share of a load, and stamps how late this process was.

What arrives is a session: most have one request, those of several send each turn when the one before has ended.
Bodies are encoded before and answers parsed after: in between, this process only moves bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from dataclasses import dataclass, field, replace

from serving.engine.client import EngineClient
from workbench.loadgen.answers import RawAnswer, read_answer
from workbench.loadgen.calibration import stamp_error_s
from workbench.loadgen.client import fetch
from workbench.loadgen.client_error import ClientError, client_error, loop_lag
from workbench.loadgen.plan import Planned, Session, Share
from workbench.loadgen.quiet import quiet_process
from workbench.loadgen.records import RequestRecord

OnProgress = Callable[[int, int], None]
Begin = Callable[[], Awaitable[float]]


@dataclass(frozen=True, slots=True)
class SendOptions:
    """Bounds of a run.

    Attributes:
        max_duration_s: no request is sent after this.
        timeout_s: bound on one request.
        drain_s: how long those in flight may go on after the last send.
        calibrates: whether the client's own error is measured before.
    """

    max_duration_s: float
    timeout_s: float
    drain_s: float
    calibrates: bool = True


@dataclass(slots=True)
class Signals:
    """What ends a run early: `stop` cuts off what is in flight, `enough` lets it come to its end."""

    stop: asyncio.Event = field(default_factory=asyncio.Event)
    enough: asyncio.Event = field(default_factory=asyncio.Event)
    on_dry: Callable[[], None] = lambda: None


@dataclass(frozen=True, slots=True)
class Sent:
    """What came of a share; record times count from `start_s`, and both times are of `time.perf_counter`."""

    records: list[RequestRecord]
    start_s: float
    ended_s: float
    client_error: ClientError


@dataclass(slots=True)
class _Run:
    """The state of a run in progress; times on `time.perf_counter`."""

    client: EngineClient
    share: Share
    timeout_s: float
    on_progress: OnProgress | None
    start_s: float
    stop_at_s: float
    signals: Signals
    num_requests: int
    answers: list[tuple[Planned, float, RawAnswer]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    num_unsent: int = 0

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` as part of this run."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def send(self, request: Planned, intended_at_s: float) -> None:
        """One request from send to end."""
        answer = await fetch(self.client, request.path, request.headers, request.body, timeout_s=self.timeout_s)
        self.answers.append((request, intended_at_s, answer))
        if self.on_progress is not None:
            self.on_progress(len(self.answers), self.num_requests)

    async def pause(self, think_s: float) -> float | None:
        """Waits until a session's next turn is due and says when that was; None when the run sends no more."""
        due_s = time.perf_counter() + think_s
        if due_s >= self.stop_at_s or self.signals.enough.is_set():
            return None
        if think_s > 0:
            await asyncio.sleep(think_s)
        return due_s

    async def cut_off(self) -> None:
        """Ends what still runs; its records say so. An error in a task is raised here."""
        self.stop_at_s = min(self.stop_at_s, time.perf_counter())  # or a user cut off would send the next one
        for task in self.tasks:
            task.cancel()
        for outcome in await asyncio.gather(*self.tasks, return_exceptions=True):
            if isinstance(outcome, Exception):
                raise outcome


async def send_share(
    base_url: str,
    share: Share,
    options: SendOptions,
    *,
    begin: Begin | None = None,
    signals: Signals | None = None,
    on_progress: OnProgress | None = None,
) -> Sent:
    """Sends the share and waits for those in flight.

    Args:
        base_url: who answers.
        share: what to send.
        options: bounds.
        begin: called when all is ready; returns the run's start on `time.perf_counter`, when that is. At once if None.
        signals: end it early.
        on_progress: called with (ended, planned) after each request.
    """
    signals = signals or Signals()
    error_s = await stamp_error_s() if options.calibrates else 0.0
    async with EngineClient(base_url) as client:
        # The lag is watched from inside: the collection before a run holds the loop up and is no part of it.
        with quiet_process() as is_real_time:
            async with loop_lag() as loop_lags_s:
                start_s = time.perf_counter() if begin is None else await begin()
                loop_lags_s.clear()
                cpu_s, num_requests = time.process_time(), share.num_requests
                stop_at_s = start_s + options.max_duration_s
                run = _Run(client, share, options.timeout_s, on_progress, start_s, stop_at_s, signals, num_requests)
                try:
                    await _unless_stopped(_send_and_drain(run, options.drain_s), signals.stop)
                finally:
                    await run.cut_off()
                ended_s = time.perf_counter()
                cpu_s = time.process_time() - cpu_s
    records = await _parsed(run)
    cpu_frac = cpu_s / max(ended_s - start_s, 1e-9)
    lags = (loop_lags_s, is_real_time, run.num_unsent, error_s, cpu_frac)
    return Sent(records, start_s, ended_s, client_error(records, share.concurrency, *lags))


async def _unless_stopped(work: Coroutine[None, None, None], stop: asyncio.Event) -> None:
    """Does the work, or as much of it as there is time for until `stop` is set."""
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _send_and_drain(run: _Run, drain_s: float) -> None:
    await _send_all(run)
    if run.tasks:
        await asyncio.wait(run.tasks, timeout=run.stop_at_s + drain_s - time.perf_counter())


async def _send_all(run: _Run) -> None:
    """Starts all tasks that send; returns when the last one is started."""
    sessions, concurrency = run.share.sessions, run.share.concurrency
    if concurrency is None:
        await _follow_schedule(run)
        return
    queue = iter(sessions)
    for _ in range(min(concurrency, len(sessions))):
        run.start(_user(run, queue))


async def _user(run: _Run, queue: Iterator[Session]) -> None:
    """One user of a closed loop: takes the next session from the common queue when its last one has ended."""
    for session in queue:
        for request in session:
            due_s = await run.pause(request.think_s)
            if due_s is None:
                return
            await run.send(request, due_s)
    run.signals.on_dry()


async def _follow_schedule(run: _Run) -> None:
    """Begins sessions at the times of the schedule, whatever the answers do."""
    slots = asyncio.Semaphore(run.share.max_in_flight)
    due = zip(run.share.sessions, run.share.times_s, strict=False)
    for session, offset_s in due:
        intended_at_s = run.start_s + offset_s
        wait_s = intended_at_s - time.perf_counter()
        if wait_s > 0:
            await asyncio.sleep(wait_s)
        has_slot = await _has_slot(run, slots) if slots.locked() else await slots.acquire()
        if not has_slot:
            run.num_unsent += 1 + sum(1 for _ in due)
            return
        run.start(_session(run, session, intended_at_s, slots))


async def _has_slot(run: _Run, slots: asyncio.Semaphore) -> bool:
    """Waits for a slot; False when none came free while the run was sending."""
    try:
        async with asyncio.timeout(max(0.0, run.stop_at_s - time.perf_counter())):
            await slots.acquire()
    except TimeoutError:
        return False
    return True


async def _session(run: _Run, session: Session, intended_at_s: float, slots: asyncio.Semaphore) -> None:
    """A session's turns one after the other; the first has its slot already."""
    for request in session:
        if request is not session[0]:
            due_s = await run.pause(request.think_s)
            if due_s is None:
                return
            if not await _has_slot(run, slots):
                run.num_unsent += 1
                return
            intended_at_s = due_s
        try:
            await run.send(request, intended_at_s)
        finally:
            slots.release()


async def _parsed(run: _Run) -> list[RequestRecord]:
    records = []
    ordered = sorted(run.answers, key=lambda item: (item[1], item[0].index))
    for request, intended_at_s, answer in ordered:
        asked = replace(request.asked, intended_at_s=intended_at_s - run.start_s)
        records.append(read_answer(answer, asked, start_s=run.start_s, is_exact=request.is_exact))
        await asyncio.sleep(0)  # a notebook's loop has other things to do
    return records
