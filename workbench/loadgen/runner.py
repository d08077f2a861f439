"""Runs a load against one target: bounded in requests and in time, and honest about its own delay.

    start ──── requests are sent ──── num_requests sent, or max_duration_s ── drain ── end
                                                                               │
                        those in flight may finish; after drain_timeout_s they are cut off and
                        count as failures of kind `cut_off`

Bodies are encoded before the start and answers parsed after the end: in between, this process only moves bytes.

What arrives is a session: most have one request, those of several send each turn when the one before has ended.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Coroutine, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice, takewhile

from serving.engine.client import EngineClient
from workbench.loadgen.answers import RawAnswer, read_answer
from workbench.loadgen.arrivals import Arrival, ClosedLoop, OpenLoop
from workbench.loadgen.client import Target, encode_headers, encode_request, fetch
from workbench.loadgen.client_error import ClientError, client_error, loop_lag
from workbench.loadgen.output_lengths import output_note, repeats_note
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.quiet import quiet_process
from workbench.loadgen.records import RequestRecord, TokenSource

OnProgress = Callable[[int, int], None]


@dataclass(frozen=True, slots=True)
class LoadResult:
    """What a run left. Record times count from `started_at_s` (seconds since the epoch).

    `started_perf_s` is the same moment on `time.perf_counter`, to compare with other logs of this machine.
    `notes` say what a reader of the figures must know: outputs of other lengths than asked for, prompts that came
    again. `num_repeated_prompts` are those that were sent in this run before.
    """

    records: list[RequestRecord]
    started_at_s: float
    started_perf_s: float
    ended_at_s: float
    client_error: ClientError
    notes: tuple[str, ...] = ()
    num_repeated_prompts: int = 0


@dataclass(frozen=True, slots=True)
class _Planned:
    """A request before it is sent."""

    index: int
    request_id: str
    prompt: Prompt
    path: str
    headers: list[tuple[bytes, bytes]]
    body: bytes


_Session = list[_Planned]


@dataclass(slots=True)
class _Run:
    """The state of a run in progress; times on `time.perf_counter`."""

    client: EngineClient
    planned: list[_Planned]
    timeout_s: float
    on_progress: OnProgress | None
    start_s: float
    stop_at_s: float
    answers: list[tuple[_Planned, float, RawAnswer]] = field(default_factory=list)
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
    num_unsent: int = 0

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Runs `work` as part of this run."""
        task = asyncio.create_task(work)
        self.tasks.add(task)
        return task

    async def send(self, request: _Planned, intended_at_s: float) -> None:
        """One request from send to end."""
        answer = await fetch(self.client, request.path, request.headers, request.body, timeout_s=self.timeout_s)
        self.answers.append((request, intended_at_s, answer))
        if self.on_progress is not None:
            self.on_progress(len(self.answers), len(self.planned))

    async def pause(self, think_s: float) -> float | None:
        """Waits until a session's next turn is due and says when that was; None when the run sends no more."""
        due_s = time.perf_counter() + think_s
        if due_s >= self.stop_at_s:
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


async def run_load(
    target: Target,
    prompts: Iterable[Prompt],
    arrival: Arrival,
    *,
    num_requests: int,
    max_duration_s: float,
    cache_salt: str | None = None,
    seed: int = 0,
    timeout_s: float = 120.0,
    drain_timeout_s: float | None = None,
    count_by: TokenSource = TokenSource.TOKEN_IDS,
    run_id: str = "load",
    on_progress: OnProgress | None = None,
    stop: asyncio.Event | None = None,
) -> LoadResult:
    """Sends up to `num_requests` prompts for up to `max_duration_s`, then waits for those in flight.

    Args:
        target: who answers.
        prompts: at least `num_requests` of them are taken if there are that many.
        arrival: closed or open loop.
        num_requests: requests to send at most.
        max_duration_s: no request is sent after this.
        cache_salt: of this run, for targets that take vLLM's extras.
        seed: of the arrivals.
        timeout_s: bound on one request.
        drain_timeout_s: how long those in flight may go on after the last send; `timeout_s` by default.
        count_by: what the server is asked to count tokens by.
        run_id: request ids are `<run_id>-<index>`.
        on_progress: called with (ended, planned) after each request.
        stop: ends the run when it is set: nothing more is sent, those in flight are cut off, what came is kept.

    Raises:
        ValueError: no prompts, or a `max_duration_s` that is not above 0.
    """
    if max_duration_s <= 0:
        raise ValueError(f"max_duration_s is {max_duration_s}; it must be above 0")
    planned = _plan(target, prompts, num_requests, cache_salt, count_by, run_id)
    drain_s = timeout_s if drain_timeout_s is None else drain_timeout_s
    async with EngineClient(target.base_url) as client, loop_lag() as loop_lags_s:
        with quiet_process() as is_real_time:
            started_at_s, start_s = time.time(), time.perf_counter()
            run = _Run(client, planned, timeout_s, on_progress, start_s, start_s + max_duration_s)
            try:
                await _unless_stopped(_send_and_drain(run, arrival, seed, drain_s), stop)
            finally:
                await run.cut_off()
            ended_at_s = started_at_s + time.perf_counter() - start_s
    records = await _parsed(run, target)
    error = client_error(records, arrival, loop_lags_s, is_real_time, run.num_unsent)
    num_repeated = len(planned) - len({(request.prompt.content, request.prompt.adapter) for request in planned})
    notes = (output_note(records, target, planned[0].prompt), repeats_note(num_repeated, len(planned)))
    return LoadResult(records, started_at_s, start_s, ended_at_s, error, tuple(filter(None, notes)), num_repeated)


def _plan(
    target: Target,
    prompts: Iterable[Prompt],
    num_requests: int,
    cache_salt: str | None,
    count_by: TokenSource,
    run_id: str,
) -> list[_Planned]:
    planned = []
    for index, prompt in enumerate(islice(prompts, num_requests)):
        request_id = f"{run_id}-{index}"
        path, body = encode_request(target, prompt, cache_salt=cache_salt, count_by=count_by)
        session_id = None if prompt.session_id is None else f"{run_id}-{prompt.session_id}"
        headers = encode_headers(target, request_id, session_id)
        planned.append(_Planned(index, request_id, prompt, path, headers, body))
    if not planned:
        raise ValueError("no prompts: a load run needs at least one request")
    return planned


async def _unless_stopped(work: Coroutine[None, None, None], stop: asyncio.Event | None) -> None:
    """Does the work, or as much of it as there is time for until `stop` is set."""
    if stop is None:
        await work
        return
    working, stopping = asyncio.create_task(work), asyncio.create_task(stop.wait())
    try:
        await asyncio.wait((working, stopping), return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            working.result()
    finally:
        for task in (working, stopping):
            task.cancel()
        await asyncio.gather(working, stopping, return_exceptions=True)


async def _send_and_drain(run: _Run, arrival: Arrival, seed: int, drain_s: float) -> None:
    await _send_all(run, arrival, seed)
    if run.tasks:
        await asyncio.wait(run.tasks, timeout=run.stop_at_s + drain_s - time.perf_counter())


async def _send_all(run: _Run, arrival: Arrival, seed: int) -> None:
    """Starts all tasks that send; returns when the last one is started."""
    sessions = _sessions(run.planned)
    if isinstance(arrival, ClosedLoop):
        queue = iter(sessions)
        for _ in range(min(arrival.concurrency, len(sessions))):
            run.start(_user(run, queue))
    else:
        await _follow_schedule(run, sessions, arrival, random.Random(f"{seed}/arrivals"))


def _sessions(planned: list[_Planned]) -> list[_Session]:
    """The requests by session, in the order of their first; one without a session is one of its own."""
    sessions: dict[object, _Session] = {}
    for request in planned:
        sessions.setdefault(request.prompt.session_id or request.index, []).append(request)
    return list(sessions.values())


async def _user(run: _Run, queue: Iterator[_Session]) -> None:
    """One user of a closed loop: takes the next session from the common queue when its last one has ended."""
    for session in queue:
        for request in session:
            due_s = await run.pause(request.prompt.think_s)
            if due_s is None:
                return
            await run.send(request, due_s)


async def _follow_schedule(run: _Run, sessions: list[_Session], arrival: OpenLoop, rng: random.Random) -> None:
    """Begins sessions at the times of the schedule, whatever the answers do."""
    slots = asyncio.Semaphore(arrival.max_in_flight)
    times_s = (run.start_s + offset_s for offset_s in arrival.send_times_s(rng))
    due = zip(sessions, takewhile(lambda at_s: at_s < run.stop_at_s, times_s), strict=False)
    for session, intended_at_s in due:
        await asyncio.sleep(max(0.0, intended_at_s - time.perf_counter()))
        if not await _has_slot(run, slots):
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


async def _session(run: _Run, session: _Session, intended_at_s: float, slots: asyncio.Semaphore) -> None:
    """A session's turns one after the other; the first has its slot already."""
    for request in session:
        if request is not session[0]:
            due_s = await run.pause(request.prompt.think_s)
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


async def _parsed(run: _Run, target: Target) -> list[RequestRecord]:
    records = []
    # In the order in which they were due: that of the plan, but for the turns of sessions that ran side by side.
    ordered = sorted(run.answers, key=lambda item: (item[1], item[0].index))
    for index, (request, intended_at_s, answer) in enumerate(ordered):
        asked = RequestRecord(
            request_id=request.request_id,
            index=index,
            task=target.task,
            num_prompt_tokens=request.prompt.num_prompt_tokens,
            num_output_tokens_asked=request.prompt.num_output_tokens,
            intended_at_s=intended_at_s - run.start_s,
            sent_at_s=answer.sent_at_s - run.start_s,
            adapter=request.prompt.adapter,
            tier=request.prompt.tier,
            session_id=request.prompt.session_id,
            turn=request.prompt.turn,
            is_prompt_estimated=request.prompt.is_estimated,
        )
        is_exact = target.has_extras and not request.prompt.may_stop
        records.append(read_answer(answer, asked, start_s=run.start_s, is_exact=is_exact))
        await asyncio.sleep(0)  # a notebook's loop has other things to do
    return records
