"""Runs a load against one target: bounded in requests and in time, and honest about its own delay.

    start ──── requests are sent ──── num_requests sent, or max_duration_s ── drain ── end
                                                                               │
                        those in flight may finish; after drain_timeout_s they are cut off and
                        count as failures of kind `cut_off`

One process sends, in this one's event loop; a load beyond what one drives is shared by several (processes.py).
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

from workbench.loadgen.arrivals import Arrival
from workbench.loadgen.client import Target
from workbench.loadgen.client_error import ClientError, worst
from workbench.loadgen.output_lengths import output_note, repeats_note
from workbench.loadgen.plan import Share, plan_requests, schedule
from workbench.loadgen.processes import num_processes, send_shares
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.records import RequestRecord, TokenSource
from workbench.loadgen.sending import OnProgress, SendOptions, Sent, Signals, send_share


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
    client_processes: int | None = None,
    calibrates: bool = True,
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
        client_processes: that share the load; one, or more where the load and the cores ask for it, when None.
        calibrates: whether the client's own error is measured first, which takes about 0.15 s.

    Raises:
        ValueError: no prompts, or a `max_duration_s` that is not above 0.
        ClientProcessFailed: of several processes none brought a result.
        NotCalibrated: the client's own error could not be measured.
    """
    if max_duration_s <= 0:
        raise ValueError(f"max_duration_s is {max_duration_s}; it must be above 0")
    taken = list(islice(prompts, num_requests))
    planned = plan_requests(target, taken, cache_salt=cache_salt, count_by=count_by, run_id=run_id)
    num_repeated = len(taken) - len({(prompt.content, prompt.adapter) for prompt in taken})
    load = schedule(planned, arrival, max_duration_s=max_duration_s, seed=seed)
    options = SendOptions(max_duration_s, timeout_s, timeout_s if drain_timeout_s is None else drain_timeout_s)
    options = replace(options, calibrates=calibrates)
    shares = load.cut(num_processes(load, client_processes))
    sent, deaths = await _send(target.base_url, shares, options, stop, on_progress)
    result = _merged(sent, deaths)
    is_whole = not deaths and not (stop is not None and stop.is_set())
    left = _left_note(shares, len(result.records)) if is_whole else None
    notes = (output_note(result.records, target, taken[0]), repeats_note(num_repeated, len(taken)), left)
    return replace(result, notes=tuple(filter(None, notes)), num_repeated_prompts=num_repeated)


def _merged(sent: list[Sent], deaths: list[str]) -> LoadResult:
    """One result of what the processes brought; of several errors the worst."""
    # In the order in which they were due: that of the plan, but for the turns of sessions that ran side by side.
    due = sorted((r for one in sent for r in one.records), key=lambda record: (record.intended_at_s, record.index))
    error = worst([one.client_error for one in sent])
    if deaths:
        error = replace(error, invalid=f"{'; '.join(deaths)}: from then on the load was less than asked")
    start_s = sent[0].start_s
    started_at_s = time.time() - (time.perf_counter() - start_s)
    return LoadResult(
        records=[replace(record, index=index) for index, record in enumerate(due)],
        started_at_s=started_at_s,
        started_perf_s=start_s,
        ended_at_s=started_at_s + max(one.ended_s for one in sent) - start_s,
        client_error=error,
    )


async def _send(
    base_url: str,
    shares: list[Share],
    options: SendOptions,
    stop: asyncio.Event | None,
    on_progress: OnProgress | None,
) -> tuple[list[Sent], list[str]]:
    if len(shares) > 1:
        return await send_shares(base_url, shares, options, stop=stop, on_progress=on_progress)
    signals = Signals() if stop is None else Signals(stop)
    sent = await send_share(base_url, shares[0], options, signals=signals, on_progress=on_progress)
    return [sent], []


def _left_note(shares: list[Share], num_sent: int) -> str | None:
    """That a closed loop over several processes ended with the first that ran out."""
    num_planned = sum(share.num_requests for share in shares)
    if len(shares) < 2 or shares[0].concurrency is None or num_sent == num_planned:
        return None
    return (
        f"{num_sent} of {num_planned} requests were sent: the first of {len(shares)} client processes had sent its part"
    )
