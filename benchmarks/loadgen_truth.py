"""How far the load generator's figures lie from what an engine really did.

The truth is the fake engine's own log: it runs as a process on the first core and stamps each write right before
the socket, on the clock that all processes of a Linux machine share. The load generator runs here, on the last core.
Both at real-time priority where the system permits it: what else the machine does is not what is measured.

One case more, shown and not judged, runs before an engine as it is used: at ordinary priority, with its collector on.

An error is |client's figure - the log's|; counts must be equal. Times are judged after the warm-up, as in every
summary: when all users of a closed loop begin at once, the engine reads the last request long after it came, and
no log tells that time. For the same reason requests differ in the lengths of prompt and output, and with them in
their time to first token: users in step would send while the engine writes to all others.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import orjson
from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, equal_to, run
from serving.engine.client import EngineClient
from workbench import stats
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    FailureKind,
    LoadResult,
    Poisson,
    Prompt,
    RequestRecord,
    Slo,
    Target,
    TokenSource,
    run_load,
    summarize,
)
from workbench.loadgen.quiet import prefer

MODEL = "fake-model"
LIMIT_S = 0.001
NUM_STREAMS = 64
NUM_TRAP_STREAMS = 16
TTFT_MS, PREFILL_MS_PER_TOKEN, ITL_MS = 40.0, 0.5, 20.0
PROMPT_TOKENS = (16, 56)  # first tokens come anywhere in the time of a step
IN_MEMORY = "/dev/shm" if Path("/dev/shm").is_dir() else None  # a log on disk holds the engine up for 0.8 ms at times
# A garbage collection of the engine holds up what it reads, by 0.9 ms, and its log cannot tell.
FAKE_WITHOUT_PAUSES = "import gc, sys; from serving.engine.fake.__main__ import main; gc.disable(); sys.exit(main())"
START_TIMEOUT_S = 30.0
LATE_MS = 500.0


@dataclass(frozen=True, slots=True)
class Case:
    """One load, and what the engine does on it."""

    name: str
    arrival: Arrival
    num_requests: int
    num_output_tokens: int = 32
    length_step: int = 1
    chat: bool = False
    count_by: TokenSource = TokenSource.TOKEN_IDS
    faults: dict[str, Any] = field(default_factory=dict)
    expected_failure: FailureKind | None = None


@dataclass(frozen=True, slots=True)
class Timed:
    """A request as the client saw it beside its log."""

    record: RequestRecord
    log: dict[str, Any]

    @property
    def writes(self) -> list[dict[str, Any]]:
        """The log's writes that carried tokens."""
        return [write for write in self.log["writes"] if write["num_tokens"]]

    @property
    def true_gaps_s(self) -> list[float]:
        """The engine's own gap before each token after the first chunk, shared evenly inside a chunk."""
        return [
            (later["at_s"] - earlier["at_s"]) / later["num_tokens"]
            for earlier, later in pairwise(self.writes)
            for _ in range(later["num_tokens"])
        ]


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the client says and what the log says, request by request."""

    case: Case
    result: LoadResult
    pairs: list[tuple[RequestRecord, dict[str, Any]]]

    @property
    def num_warm_up(self) -> int:
        """Requests of the first wave."""
        return self.case.arrival.concurrency if isinstance(self.case.arrival, ClosedLoop) else 0

    @property
    def timed(self) -> list[Timed]:
        """The requests after the warm-up whose times can be compared."""
        return [Timed(record, log) for record, log in self.pairs[self.num_warm_up :] if record.chunk_at_s]


def cases(mode: Mode) -> list[Case]:
    """The loads of this form."""
    many = (12 if mode is Mode.FULL else 4) * NUM_STREAMS
    loop, few = ClosedLoop(NUM_TRAP_STREAMS), (24 if mode is Mode.FULL else 8) * NUM_TRAP_STREAMS
    wide = ClosedLoop(NUM_STREAMS)
    late = {"role_at_once": True, "usage_late_ms": LATE_MS, "done_late_ms": LATE_MS}
    broken: list[tuple[str, dict[str, Any], FailureKind]] = [
        ("error event under HTTP 200", {"error_after_tokens": 0}, FailureKind.ERROR_EVENT),
        ("error event amid tokens", {"error_after_tokens": 3}, FailureKind.ERROR_EVENT),
        ("HTTP 200 without a token", {"no_token": True}, FailureKind.NO_TOKEN),
        ("HTTP 503", {"status": 503}, FailureKind.HTTP_STATUS),
        ("stream dies", {"die_after_tokens": 3}, FailureKind.LOST),
        ("stream falls silent", {"hang_after_tokens": 3}, FailureKind.TIMEOUT),
    ]
    return [
        Case(f"{NUM_STREAMS} streams", ClosedLoop(NUM_STREAMS), many, 128),
        Case("4 tokens a chunk", wide, many, 128, length_step=4, faults={"tokens_per_chunk": 4, "itl_ms": 10.0}),
        Case("late usage and [DONE]", wide, many, chat=True, faults=late),
        Case("late role", wide, many, chat=True, faults={"role_late_ms": LATE_MS}),
        Case("reasoning", wide, many, chat=True, faults={"reasoning_tokens": 8}),
        Case("continuous usage", loop, few, count_by=TokenSource.CONTINUOUS_USAGE),
        Case("final usage", loop, few, count_by=TokenSource.FINAL_USAGE),
        Case("open loop", Poisson(50.0), 1000 if mode is Mode.FULL else 200, 16),
        *(
            Case(name, loop, 4 * NUM_TRAP_STREAMS, 8, faults=faults, expected_failure=kind)
            for name, faults, kind in broken
        ),
    ]


def measure(mode: Mode, console: Console) -> list[Bar]:
    """Load generator against the fake engine's own log."""
    cores = sorted(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {cores[-1]})
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder, fake_engine(Path(folder), cores[0]) as (url, log):
        for case in cases(mode):
            console.print(f"[dim]{case.name}: {case.num_requests} requests …")
            outcome = asyncio.run(observe(case, url, log))
            bars += judge(outcome)
    with (
        tempfile.TemporaryDirectory(dir=IN_MEMORY) as folder,
        fake_engine(Path(folder), cores[0], quiet=False) as (
            url,
            log,
        ),
    ):
        case = replace(cases(mode)[0], name=f"{NUM_STREAMS} streams, ordinary engine")
        console.print(f"[dim]{case.name}: {case.num_requests} requests …")
        bars += [replace(bar, ok=None) for bar in judge(asyncio.run(observe(case, url, log)))]
    # It needs much of this module, and belongs to it but for its length.
    from benchmarks.loadgen_scale import scale_bars

    return bars + scale_bars(mode, console, cores[0])


@contextmanager
def fake_engine(
    folder: Path, core: int, options: Sequence[str] = (), *, quiet: bool = True
) -> Iterator[tuple[str, Path]]:
    """The fake engine as a process on `core`; yields its URL and its log. `quiet`: without pauses of its own."""
    port_file, log = folder / "port", folder / "log.jsonl"
    start = ["-c", FAKE_WITHOUT_PAUSES] if quiet else ["-m", "serving.engine.fake"]
    command = [sys.executable, *start, "--port-file", str(port_file), "--log", str(log)]
    command += ["--model", MODEL, "--ttft-ms", str(TTFT_MS), "--itl-ms", str(ITL_MS)]
    command += ["--prefill-ms-per-token", str(PREFILL_MS_PER_TOKEN)]
    command += ["--log-limit", "1", *options]  # the file is enough
    process = subprocess.Popen(command, stderr=subprocess.DEVNULL)
    try:
        os.sched_setaffinity(process.pid, {core})
        if quiet:
            prefer(process.pid)
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not port_file.exists():
            if process.poll() is not None or time.monotonic() > deadline_s:
                raise RuntimeError(f"the fake engine did not start (exit code {process.poll()})")
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port_file.read_text()}", log
    finally:
        process.send_signal(signal.SIGTERM)
        try:
            process.wait(10.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


async def observe(case: Case, url: str, log: Path) -> Outcome:
    """Runs the case and reads the engine's log of it."""
    run_id = f"truth-{random.SystemRandom().randrange(2**32):08x}"
    async with EngineClient(url) as client:
        await client.post_json("/fake/faults", case.faults)
    result = await run_load(
        Target(url, MODEL),
        prompts(case, run_id),
        case.arrival,
        num_requests=case.num_requests,
        max_duration_s=120.0,
        cache_salt=run_id,
        timeout_s=2.0 if case.expected_failure is FailureKind.TIMEOUT else 60.0,
        count_by=case.count_by,
        run_id=run_id,
    )
    logs = await _logs(log, run_id, len(result.records))
    return Outcome(case, result, [(record, logs[record.request_id]) for record in result.records])


async def _logs(log: Path, run_id: str, num_requests: int) -> dict[str, dict[str, Any]]:
    """The engine's requests of this run; it may write the last ones a little after the client has seen their end."""
    for _ in range(100):
        data = await asyncio.to_thread(log.read_bytes)
        rows = [orjson.loads(line) for line in data.splitlines()]
        found = {row["id"]: row for row in rows if row["id"].startswith(run_id)}
        if len(found) == num_requests:
            return found
        await asyncio.sleep(0.05)
    raise RuntimeError(f"the engine logged {len(found)} of {num_requests} requests")


def prompts(case: Case, seed: str) -> Iterator[Prompt]:
    """Distinct prompts; lengths of output between half and three halves of the case's."""
    rng = random.Random(seed)
    while True:
        ids = tuple(rng.randrange(5000) for _ in range(rng.randrange(*PROMPT_TOKENS)))
        num_output_tokens = rng.randrange(
            case.num_output_tokens // 2, case.num_output_tokens * 3 // 2, case.length_step
        )
        if case.chat:
            message = {"role": "user", "content": " ".join(f"w{token_id}" for token_id in ids)}
            yield Prompt(len(ids), num_output_tokens, messages=(message,))
        else:
            yield Prompt(len(ids), num_output_tokens, token_ids=ids)


def judge(outcome: Outcome) -> list[Bar]:
    """The bars of one case."""
    name, records, timed = outcome.case.name, outcome.result.records, outcome.timed
    if outcome.case.expected_failure is not None:
        caught = sum(record.failure is outcome.case.expected_failure for record in records)
        summary = summarize(records, slo=Slo(60.0, 60.0), num_units=1, num_warm_up=0)
        return [
            equal_to(f"{name}: counted as {outcome.case.expected_failure.value}", caught, outcome.case.num_requests),
            equal_to(f"{name}: cell", "valid" if summary.invalid is None else "invalid", "invalid"),
        ]
    return [
        equal_to(f"{name}: requests served", sum(record.ok for record in records), outcome.case.num_requests),
        equal_to(f"{name}: requests with other token counts", num_miscounted(outcome), 0),
        _error_bar(f"{name}: TTFT from the actual send", [ttft_error_s(request) for request in timed]),
        # What a summary reports. In an open loop it begins when the request was due, which no engine knows.
        _error_bar(
            f"{name}: ttft_s",
            [ttft_error_s(request, request.record.ttft_s or 0.0) for request in timed],
            judged=isinstance(outcome.case.arrival, ClosedLoop),
        ),
        _error_bar(f"{name}: ITL", [error_s for request in timed for error_s in itl_errors_s(request)]),
        _error_bar(f"{name}: TPOT", [_tpot_error_s(request) for request in timed]),
        _error_bar(f"{name}: E2E", [_e2e_error_s(request) for request in timed]),
        *_special_bars(outcome),
    ]


def _error_bar(name: str, errors_s: list[float], *, judged: bool = True) -> Bar:
    return at_most(f"{name} error p99, ms", 1e3 * stats.quantile(errors_s, 0.99), 1e3 * LIMIT_S, judged=judged)


def _special_bars(outcome: Outcome) -> list[Bar]:
    name, start_s = outcome.case.name, outcome.result.started_perf_s
    if outcome.case.name == "4 tokens a chunk":
        tpot_s = stats.quantile([request.record.tpot_s or 0.0 for request in outcome.timed], 0.5)
        return [at_most(f"{name}: TPOT p50 off 10 ms, ms", 1e3 * abs(tpot_s - 0.010), 0.1)]
    if outcome.case.name == "reasoning":
        first = outcome.case.faults["reasoning_tokens"]
        contents = [(r.record.first_content_at_s or 0.0, r.writes[first]["at_s"]) for r in outcome.timed]
        return [_error_bar(f"{name}: first content", [abs(seen + start_s - true) for seen, true in contents])]
    if isinstance(outcome.case.arrival, Poisson):
        return [at_most(f"{name}: send lag p99, ms", 1e3 * outcome.result.client_error.send_lag_p99_s, 5.0)]
    if outcome.case.name == f"{NUM_STREAMS} streams":
        return [*_rate_bars(outcome), _stamp_bar(outcome)]
    return []


def _rate_bars(outcome: Outcome) -> list[Bar]:
    """Tokens a second of the client's steady window against the writes in that window."""
    name, start_s = outcome.case.name, outcome.result.started_perf_s
    summary = summarize(
        outcome.result.records, slo=Slo(60.0, 60.0), num_units=1, num_warm_up=outcome.num_warm_up,
        client_error=outcome.result.client_error,
    )  # fmt: skip
    if summary.window is None:
        return [equal_to(f"{name}: cell", f"invalid: {summary.invalid}", "valid")]
    edges_s = (summary.window.start_s + start_s, summary.window.end_s + start_s)
    writes = [write for _, log in outcome.pairs for write in log["writes"]]
    num_tokens = sum(write["num_tokens"] for write in writes if edges_s[0] < write["at_s"] <= edges_s[1])
    truth = num_tokens / summary.window.length_s
    rate = summary.metrics["output_tokens_per_s_per_gpu"]
    return [at_most(f"{name}: tokens/s off the log's {truth:.0f}, %", 100 * abs(rate / truth - 1), 1.0)]


def _stamp_bar(outcome: Outcome) -> Bar:
    """How long after the engine's stamp before its write comes ours after its arrival; both are in every error."""
    start_s = outcome.result.started_perf_s
    stamps = [zip(r.record.chunk_at_s, r.writes, strict=True) for r in outcome.timed]
    delays_s = [stamp_s + start_s - write["at_s"] for pairs in stamps for stamp_s, write in pairs]
    return _error_bar(f"{outcome.case.name}: stamp", delays_s, judged=False)


def num_miscounted(outcome: Outcome) -> int:
    """Requests in which the number of tokens, in all or in any chunk, is not the log's."""
    is_spread = outcome.case.count_by is TokenSource.FINAL_USAGE
    return sum(
        record.num_output_tokens != log["num_output_tokens"]
        or record.usage_prompt_tokens != log["num_prompt_tokens"]
        or (not is_spread and list(record.chunk_tokens) != [w["num_tokens"] for w in Timed(record, log).writes])
        for record, log in outcome.pairs
    )


def ttft_error_s(request: Timed, ttft_s: float | None = None) -> float:
    """How far the client's time to first token, from the actual send, lies from the log's."""
    seen_s = (request.record.service_ttft_s or 0.0) if ttft_s is None else ttft_s
    return abs(seen_s - (request.writes[0]["at_s"] - request.log["received_at_s"]))


def itl_errors_s(request: Timed) -> list[float]:
    """The same of each gap."""
    gaps = zip(request.record.itl_s(), request.true_gaps_s, strict=True)
    return [abs(gap_s - true_s) for gap_s, true_s in gaps]


def _tpot_error_s(request: Timed) -> float:
    gaps_s = request.true_gaps_s
    return abs((request.record.tpot_s or 0.0) - sum(gaps_s) / len(gaps_s))


def _e2e_error_s(request: Timed) -> float:
    """From send (the log: from its arrival) to the last token; what comes after it counts for nothing."""
    seen_s = (request.record.end_at_s or 0.0) - request.record.sent_at_s
    return abs(seen_s - (request.writes[-1]["at_s"] - request.log["received_at_s"]))


if __name__ == "__main__":
    sys.exit(run("loadgen_truth", measure))
