"""The part of loadgen_truth that takes many streams and many sends; see there.

512 and 2,000 streams at 8,000 tokens a second, 10,000 sends at 500 a second (once with completions that come all at
once), the cap on requests in flight, and an engine that stops answering. What the client itself took stands beside:
its CPU time over the run, and how late its loop was. On two cores the engine has one of its own, but its lateness in
reading what has come is in every error of a time to first token.
"""

from __future__ import annotations

import asyncio
import math
import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, equal_to
from benchmarks.loadgen_truth import (
    IN_MEMORY,
    Case,
    Outcome,
    Timed,
    fake_engine,
    itl_errors_s,
    num_miscounted,
    observe,
    ttft_error_s,
)
from serving.core.errors import UpstreamError
from serving.engine.client import EngineClient
from workbench import stats
from workbench.loadgen import ClosedLoop, Constant, FailureKind, Poisson, Slo, summarize

ROOMY = ("--max-num-seqs", "8192", "--num-gpu-blocks", "200000")
RATE_RPS, CAP = 500.0, 32
RESUME_EVERY_S = 0.25
BURST_S, MAX_BURST = 0.02, 15  # ten are due in 20 ms
LIMIT_S, LIMIT_FRAC = 0.001, 0.01


def scale_bars(mode: Mode, console: Console, core: int) -> list[Bar]:
    """The bars of many streams and sends; the quick form has 512 streams and 2,000 sends."""
    is_full = mode is Mode.FULL
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, fake_engine(Path(folder), core, ROOMY) as (url, log):

        def seen(case: Case, *, resumes: bool = False) -> Outcome:
            console.print(f"[dim]{case.name}: {case.num_requests} requests …")
            return asyncio.run(_observe(case, url, log, resumes=resumes))

        for streams, itl_ms, num_waves in [(512, 64.0, 3), *([(2000, 250.0, 2)] if is_full else [])]:
            name, faults = f"{streams} streams at 8,000 tokens/s", {"itl_ms": itl_ms}
            bars += _stream_bars(seen(Case(name, ClosedLoop(streams), num_waves * streams, 32, faults=faults)))
        num_sends = 10_000 if is_full else 2_000
        sends = Case(f"{num_sends} sends", Constant(RATE_RPS), num_sends, 2)
        bars += _send_bars(seen(sends), judged=is_full)
        together = Case("completions all at once", Constant(RATE_RPS), 2_000, 4, faults={"pause_after_tokens": 1})
        bars += _burst_bars(seen(together, resumes=True))
        bars += _cap_bars(seen(Case("cap", Poisson(RATE_RPS, max_in_flight=CAP), 400, 4)))
        hang = Case("no answer", ClosedLoop(16), 32, 4, faults={"hang": True}, expected_failure=FailureKind.TIMEOUT)
        bars += _hang_bars(seen(hang))
    return bars


async def _observe(case: Case, url: str, log: Path, *, resumes: bool) -> Outcome:
    if not resumes:
        return await observe(case, url, log)
    resuming = asyncio.create_task(_resume(url))
    try:
        return await observe(case, url, log)
    finally:
        resuming.cancel()
        await asyncio.gather(resuming, return_exceptions=True)


async def _resume(url: str) -> None:
    """Lets all that wait go on at once, again and again."""
    async with EngineClient(url) as client:
        while True:
            await asyncio.sleep(RESUME_EVERY_S)
            try:
                await client.post_json("/fake/resume", {})
            except UpstreamError:
                continue  # it is not paused now


def _stream_bars(outcome: Outcome) -> list[Bar]:
    name, timed, error = outcome.case.name, outcome.timed, outcome.result.client_error
    ttft = [_over_limit(ttft_error_s(one), one.record.service_ttft_s or 0.0) for one in timed]
    itl = [
        _over_limit(error_s, true_s)
        for one in timed
        for error_s, true_s in zip(itl_errors_s(one), one.true_gaps_s, strict=True)
    ]
    e2e = [_over_limit(abs(_e2e_s(one) - _true_e2e_s(one)), _true_e2e_s(one)) for one in timed]
    lags_s = [stamp_s + outcome.result.started_perf_s - w["at_s"] for one in timed for stamp_s, w in _pairs(one)]
    reads_s = [one.log["received_at_s"] - one.record.sent_at_s - outcome.result.started_perf_s for one in timed]
    return [
        equal_to(f"{name}: requests served", sum(r.ok for r in outcome.result.records), outcome.case.num_requests),
        equal_to(f"{name}: requests with other token counts", num_miscounted(outcome), 0),
        *(
            at_most(f"{name}: {metric} error p99, of 1 % or 1 ms", stats.quantile(errors, 0.99), 1.0)
            for metric, errors in (("TTFT", ttft), ("ITL", itl), ("E2E", e2e))
        ),
        Bar(f"{name}: stamp after the engine's write p99, ms", 1e3 * stats.quantile(lags_s, 0.99), "shown", None),
        # In every error of a time to first token, and not the client's doing: the request lay in the engine's socket.
        Bar(
            f"{name}: engine reads a request after its send p99, ms", 1e3 * stats.quantile(reads_s, 0.99), "shown", None
        ),
        Bar(f"{name}: client's loop lag p99, ms", 1e3 * error.loop_lag_p99_s, "shown", None),
        Bar(f"{name}: client's CPU, share of a core", error.cpu_frac, "shown", None),
        equal_to(f"{name}: figures that are not finite", _num_not_finite(outcome), 0),
    ]


def _over_limit(error_s: float, true_s: float) -> float:
    return error_s / max(LIMIT_S, LIMIT_FRAC * true_s)


def _e2e_s(one: Timed) -> float:
    return one.record.service_e2e_s or 0.0


def _true_e2e_s(one: Timed) -> float:
    return float(one.writes[-1]["at_s"] - one.log["received_at_s"])


def _pairs(one: Timed) -> list[tuple[float, dict[str, float]]]:
    return list(zip(one.record.chunk_at_s, one.writes, strict=True))


def _send_bars(outcome: Outcome, *, judged: bool) -> list[Bar]:
    name, error = outcome.case.name, outcome.result.client_error
    sent_s = sorted(record.sent_at_s for record in outcome.result.records)
    rate_rps = (len(sent_s) - 1) / (sent_s[-1] - sent_s[0])
    return [
        at_most(f"{name}: send lag p99, ms", 1e3 * error.send_lag_p99_s, 5.0, judged=judged),
        at_most(f"{name}: rate off {RATE_RPS:g}, %", 100 * abs(rate_rps / RATE_RPS - 1), 0.5),
        Bar(f"{name}: client's CPU, share of a core", error.cpu_frac, "shown", None),
    ]


def _burst_bars(outcome: Outcome) -> list[Bar]:
    sent_s = sorted(record.sent_at_s for record in outcome.result.records)
    most = max(sum(start <= other < start + BURST_S for other in sent_s[i : i + 200]) for i, start in enumerate(sent_s))
    return [at_most(f"{outcome.case.name}: most sends in 20 ms (10 are due)", float(most), float(MAX_BURST))]


def _cap_bars(outcome: Outcome) -> list[Bar]:
    moments = [(log["received_at_s"], 1) for _, log in outcome.pairs]
    moments += [(log["writes"][-1]["at_s"], -1) for _, log in outcome.pairs]
    most = max(accumulate(change for _, change in sorted(moments)))
    return [at_most("cap: most requests in flight, by the engine's log", float(most), float(CAP))]


def _hang_bars(outcome: Outcome) -> list[Bar]:
    result, name = outcome.result, outcome.case.name
    num_timeouts = sum(record.failure is FailureKind.TIMEOUT for record in result.records)
    return [
        equal_to(f"{name}: counted as timeout", num_timeouts, outcome.case.num_requests),
        at_most(f"{name}: two waves of 2 s end after, s", result.ended_at_s - result.started_at_s, 5.0),
        equal_to(f"{name}: figures that are not finite", _num_not_finite(outcome), 0),
    ]


def _num_not_finite(outcome: Outcome) -> int:
    summary = summarize(
        outcome.result.records,
        slo=Slo(60.0, 60.0),
        num_units=1,
        num_warm_up=outcome.num_warm_up,
        client_error=outcome.result.client_error,
    )
    values: Sequence[float] = [
        *summary.metrics.values(),
        *(edge for pair in summary.intervals.values() for edge in pair),
    ]
    return sum(not math.isfinite(value) for value in values)
