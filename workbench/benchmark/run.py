"""One load on a model of the running stack or on any endpoint that speaks the OpenAI API; nothing is held.

    request = BenchRequest("smollm2-135m", load="gamma:rate=4,cv=2", workload="sessions:turns=4")
    result = await abench(config, request)

counters before → load, energy meter beside it → counters after → summary, timeline, prices → BenchResult

Others may use the model meanwhile; the engines' counters then differ from the client's sums, and the run does not
count. A cancelled run ends at once and keeps what it has measured.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from serving.core.errors import UpstreamError
from serving.core.state import Task
from serving.engine.client import EngineClient
from workbench.absent import Absent
from workbench.benchmark.request import BenchRequest, planned_requests
from workbench.benchmark.result import BenchResult
from workbench.benchmark.target import BenchTarget, at_url, check_task, on_stack
from workbench.config import WorkbenchConfig
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    LoadResult,
    Prompt,
    RequestRecord,
    SpecError,
    TargetKind,
    Workload,
    WorkloadError,
    run_load,
    summarize,
)
from workbench.loadgen.records import FailureKind
from workbench.measurement.energy import Energy
from workbench.measurement.engine_window import CounterWindow, EngineCount
from workbench.measurement.findings import find, num_unsteady
from workbench.measurement.metered import ticking
from workbench.measurement.watched import LiveMeasurement, watched
from workbench.provenance import git_commit
from workbench.sweeps.run import client_on_other_cores
from workbench.wiring import NotRunning

__all__ = ["BenchRequest", "SpecError", "TargetKind", "WorkloadError", "abench"]

OnRequests = Callable[[int, int], None]


async def abench(
    config: WorkbenchConfig | None,
    request: BenchRequest,
    *,
    on_progress: OnRequests | None = None,
    keep: Callable[[BenchResult], object] | None = None,
    open_run: Callable[[], LiveMeasurement] | None = None,
    on_trouble: Callable[[str], None] = lambda trouble: None,
) -> BenchResult:
    """Runs the load and judges it.

    When it is cancelled, sending ends, those in flight are cut off, and `keep` is called with what was measured before
    the cancellation goes on up.

    Args:
        config: of the stack; None with a `url`.
        request: what to do.
        on_progress: told of (ended, planned) after each request.
        keep: takes the result, of a cancelled run too.
        open_run: makes a run in MLflow that follows this one.
        on_trouble: told why MLflow does not follow it.

    Raises:
        SpecError: a short form or the url cannot be read.
        NotRunning, NotFound, Unavailable, WorkloadError: as `bench_target.on_stack` and `at_url`.
    """
    arrival = request.arrival()
    place = await _place(config, request)
    workload = request.workload_for(place.target.task)
    check_task(place, workload.task)
    stop = asyncio.Event()
    async with watched(open_run, on_progress or (lambda ended, planned: None), on_trouble) as tell:
        running = asyncio.ensure_future(_measure(place, request, arrival, workload, stop, tell))
        try:
            result = await asyncio.shield(running)
        except asyncio.CancelledError:
            stop.set()
            result = await running
            if keep is not None:
                keep(result)
            raise
    if keep is not None:
        keep(result)
    return result


async def _place(config: WorkbenchConfig | None, request: BenchRequest) -> BenchTarget:
    if request.url is not None:
        task = request.workload_for(Task.GENERATE).task
        return await at_url(
            request.url,
            request.model,
            task,
            api_key=request.api_key,
            tokenizer=request.tokenizer,
            takes_extras=request.takes_extras,
            slo=request.slo,
            num_units=request.num_units,
            usd_per_hour=request.usd_per_hour,
        )
    if config is None:
        raise NotRunning("a load needs a configuration with a running stack, or the url of an endpoint")
    return await on_stack(config, request.model, request.target, slo=request.slo)


async def _measure(
    place: BenchTarget,
    request: BenchRequest,
    arrival: Arrival,
    workload: Workload,
    stop: asyncio.Event,
    on_progress: OnRequests | None,
) -> BenchResult:
    seed, run_id = secrets.randbits(32), f"bench-{secrets.token_hex(6)}"
    prompts = await _prompts(place, workload, seed)
    num_requests = request.num_requests or planned_requests(arrival, workload, request.max_duration_s, seed)
    window = await CounterWindow.open(place.counter_urls)
    with client_on_other_cores(place.cores):
        async with ticking(place.meter):
            load = await run_load(
                place.target,
                prompts,
                arrival,
                num_requests=num_requests,
                max_duration_s=request.max_duration_s,
                cache_salt=run_id,
                seed=seed,
                run_id=run_id,
                on_progress=on_progress,
                stop=stop,
                client_processes=request.client_processes,
            )
            used = place.meter.stop()
    counted = await window.close(load.records, place.target.task)
    result = judged(place, request, arrival, workload, load, counted=counted, used=used, is_stopped=stop.is_set())
    return replace(result, facts={**result.facts, "prompt_seed": str(seed)})


async def _prompts(place: BenchTarget, workload: Workload, seed: int) -> Iterator[Prompt]:
    if workload.needs_vocabulary and place.vocabulary is None:
        raise WorkloadError(
            f"{workload.spec!r} needs the model's tokenizer, for its lengths are exact: give its folder with "
            "--tokenizer FOLDER (or hf:ORG/NAME), or send prompts of your own with --workload file:PATH"
        )
    try:
        async with EngineClient(place.frame_url) as client:
            return await workload.prompts_for(client, place.frame_model, place.vocabulary, seed=seed)
    except UpstreamError as error:
        raise WorkloadError(
            f"{place.frame_url} does not tell what its chat template adds ({error.message}), so no chat has an exact "
            "length: take form=ids, or chats of your own with file:PATH"
        ) from error


def judged(
    place: BenchTarget,
    request: BenchRequest,
    arrival: Arrival,
    workload: Workload,
    load: LoadResult,
    *,
    counted: EngineCount | Absent,
    used: Energy | Absent,
    is_stopped: bool = False,
) -> BenchResult:
    """The result of a run: its warm-up cut, its figures with intervals, and whether it counts."""
    records = undisturbed(load.records) if is_stopped else load.records
    is_closed = isinstance(arrival, ClosedLoop)
    found = find(records, is_closed=is_closed)
    first_wave = arrival.concurrency if isinstance(arrival, ClosedLoop) else 0
    summary = summarize(
        records,
        slo=place.slo,
        num_units=place.num_units,
        num_warm_up=max(first_wave, num_unsteady(records, found)),
        client_error=load.client_error,
    )
    if summary.invalid is None and isinstance(counted, EngineCount) and counted.gap is not None:
        summary = replace(summary, invalid=f"somebody else used it, or something was lost: {counted.gap}")
    return BenchResult(
        model=place.model,
        url=place.target.base_url,
        load=request.load,
        workload=workload.spec,
        task=place.target.task,
        slo=place.slo,
        num_units=place.num_units,
        usd_per_hour=place.usd_per_hour,
        started_at_s=load.started_at_s,
        ended_at_s=load.ended_at_s,
        records=tuple(load.records),
        summary=summary,
        client_error=load.client_error,
        found=found,
        counted=counted,
        used=used,
        load_notes=load.notes + (_stopped_note(load.records, records) if is_stopped else ()),
        is_interrupted=is_stopped,
        facts=dict(place.facts) | {"commit": git_commit()},
    )


def undisturbed(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """The records of an interrupted run from before the interruption could choose among them.

    Those in flight were cut off, and long ones were likelier to be: of the requests sent since the first that was cut
    off only the short ones are whole. All that were sent before it have ended by themselves.
    """
    cut_off_s = [record.sent_at_s for record in records if record.failure is FailureKind.CUT_OFF]
    first_s = min(cut_off_s, default=float("inf"))
    return [record for record in records if record.sent_at_s < first_s]


def _stopped_note(records: Sequence[RequestRecord], kept: Sequence[RequestRecord]) -> tuple[str, ...]:
    num_cut_off = sum(record.failure is FailureKind.CUT_OFF for record in records)
    return (
        f"interrupted: {len(records)} requests were sent and {num_cut_off} of them cut off; the figures are of the "
        f"{len(kept)} that were sent before the first of those",
    )


@contextmanager
def keeping(kept: list[BenchResult]) -> Iterator[None]:
    """Ctrl-C inside the block is no error when `kept` holds what had been measured by then."""
    try:
        yield
    except KeyboardInterrupt:
        if not kept:
            raise
