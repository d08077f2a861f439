"""Load generators on the same engine: ours, `vllm bench serve`, GuideLLM and AIPerf, each as it is installed.

Each is a process on the last core, the engine on the first; they take turns, round by round. All send chats to 16 users
who wait for their answer, as many tokens each. The definitions compared are one: output tokens over the time from the
first send to the last token; median TTFT; median of (last token - first token) / (tokens - 1), which every tool
has under some name (docs/users/loads.md). On the fake engine they are judged; in the full form real vLLM is beside it.

A slower client makes another load: its users ask again later (`turnaround_ms`), so the engine does less. Each figure
is set against the fake engine's own log of that run, and what is judged is how far the tools' ratios to it lie apart.
Time to first token is judged of ours alone, against the log. In that of the others lies the client's own work, which no
option takes out and which grows with users who are in step: `client_ms` says how much.

What else the machine does is kept out where the system permits it: the fake engine runs at real-time priority and
makes no pauses of its own, the tools run before all ordinary processes. A log can't tell what lay unread while its
engine waited for a core, and a tool that waits for one reports that as the engine's time.

CPU time is taken while at least half of the users are served, so that no start and no reckoning after the run counts;
of ours all of it, calibration and parsing included.
"""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks import peers
from benchmarks.clients import MODEL, MODELS, OFFLINE, vllm_metadata
from benchmarks.cpu_time import cpu_s
from benchmarks.harness import REPOSITORY, Bar, Mode, at_most, equal_to, run
from benchmarks.loadgen_truth import IN_MEMORY, fake_engine
from benchmarks.processes import put_first
from benchmarks.real_engine import vllm_engine
from serving.clock import SystemClock
from serving.engine import weights
from serving.engine.catalogue import CATALOGUE
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape

NUM_STREAMS, NUM_WORDS, NUM_OUTPUT_TOKENS = 16, 64, 64
FAKE_OPTIONS = ("--model", MODEL, "--ttft-ms", "40", "--itl-ms", "20", "--prefill-ms-per-token", "0")
PEERS = {"guidellm": ["guidellm", "torch==2.13.0"], "aiperf": ["aiperf"]}
FIGURES = {"output_tokens_per_s": 2.0, "ttft_ms": 3.0, "tpot_ms": 3.0}  # each with its bar in percent
ENGINE_FIGURES = {name: f"engine_{name}" for name in FIGURES}
MAX_CPU_RATIO = 0.8
POLL_S = 0.1
TIMEOUT_S = 180.0
OURS, VLLM = "ours", "vllm bench serve"
LOAD_CLIENT = REPOSITORY / "benchmarks" / "client_programs" / "load_client.py"
REVISION = "0" * 40


@dataclass(frozen=True, slots=True)
class Tool:
    """A load generator: its command line for (folder, url, requests, seed), and how its result is read."""

    name: str
    command: Callable[[Path, str, int, int], list[str]]
    read: Callable[[Path], dict[str, float]]
    variables: Mapping[str, str]


def measure(mode: Mode, console: Console) -> list[Bar]:
    """What four load generators say of one engine, and what CPU time each takes a token."""
    tokenizer = weights.resolve(CATALOGUE[MODEL].source, MODELS, on_progress=lambda text: console.print(f"[dim]{text}"))
    bars: list[Bar] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        tools = [_ours(), _vllm(folder, tokenizer.path)]
        for peer, build in (("guidellm", _guidellm), ("aiperf", _aiperf)):
            try:
                tools.append(build(peers.environment(peer, PEERS[peer], console), folder, tokenizer.path))
            except peers.PeerFailed as error:
                console.print(f"[yellow]{peer} does not install: {error}")
                bars.append(Bar(f"{peer}: installs", "no", "shown", None))
        return bars + asyncio.run(_measure(mode, folder, tools, console))


async def _measure(mode: Mode, folder: Path, tools: list[Tool], console: Console) -> list[Bar]:
    num_rounds, num_requests = (3, 128) if mode is Mode.FULL else (2, 96)
    cores = sorted(os.sched_getaffinity(0))
    async with AsyncExitStack() as parts:
        memory = Path(parts.enter_context(tempfile.TemporaryDirectory(dir=IN_MEMORY)))
        url, log = parts.enter_context(fake_engine(memory, cores[0], FAKE_OPTIONS))
        found = await _rounds(folder, url, tools, num_rounds, num_requests, console, log)
        bars = _bars("fake", found) + _judged(found)
    if mode is Mode.FULL:
        async with AsyncExitStack() as parts:
            console.print("[dim]starting vLLM …")
            url = await parts.enter_async_context(vllm_engine(folder, MODEL))
            bars += _bars("vLLM", await _rounds(folder, url, tools, 1, 64, console))
    return bars


Rounds = dict[str, list[dict[str, float]]]


async def _rounds(
    folder: Path,
    url: str,
    tools: list[Tool],
    num_rounds: int,
    num_requests: int,
    console: Console,
    log: Path | None = None,
) -> Rounds:
    """Runs of each tool in turns; with the engine's own figures of the same run where it keeps a `log`."""
    found: Rounds = {tool.name: [] for tool in tools}
    for number in range(num_rounds):
        for tool in tools[number % len(tools) :] + tools[: number % len(tools)]:
            console.print(f"[dim]round {number + 1} of {num_rounds}: {tool.name} …")
            seed = int(time.time() * 1000) % 2**31
            num_logged = 0 if log is None else len(_lines(log))
            figures = await _run(folder, url, tool, num_requests, seed)
            if log is not None:
                figures |= truth([json.loads(line) for line in _lines(log)[num_logged:]])
                figures["client_ms"] = figures["ttft_ms"] - figures["engine_ttft_ms"]
            found[tool.name].append(figures)
    return found


def _lines(log: Path) -> list[str]:
    return log.read_text().splitlines() if log.exists() else []


def truth(rows: list[dict[str, Any]]) -> dict[str, float]:
    """What the engine itself logged of a run: the three figures by the common definitions, and the users' turnaround.

    Args:
        rows: of the engine's log; probes of a tool, which ask for another length, are left out.
    """
    served = [row for row in rows if row["num_output_tokens"] == NUM_OUTPUT_TOKENS]
    writes = [[write["at_s"] for write in row["writes"] if write["num_tokens"]] for row in served]
    arrived = sorted(row["received_at_s"] for row in served)
    ended = sorted(times[-1] for times in writes)
    turnarounds = [late - end for late, end in zip(arrived[NUM_STREAMS:], ended, strict=False)]
    first_waits = [times[0] - row["received_at_s"] for times, row in zip(writes, served, strict=True)]
    steps = [(times[-1] - times[0]) / (NUM_OUTPUT_TOKENS - 1) for times in writes]
    return {
        "engine_output_tokens_per_s": NUM_OUTPUT_TOKENS * len(served) / (ended[-1] - arrived[0]),
        "engine_ttft_ms": 1e3 * statistics.median(first_waits),
        "engine_tpot_ms": 1e3 * statistics.median(steps),
        "turnaround_ms": 1e3 * statistics.median(turnarounds),
    }


async def _run(folder: Path, url: str, tool: Tool, num_requests: int, seed: int) -> dict[str, float]:
    """One run of a tool on the last core: its figures, and the CPU time that it took while users were served.

    Raises:
        RuntimeError: it failed; the message ends with what it said.
    """
    scratch = folder / f"{tool.name.split()[0]}-{seed}"
    scratch.mkdir()
    core = max(os.sched_getaffinity(0))
    # A tool that may not keep its bytecode compiles itself anew in each run.
    own = {name: value for name, value in os.environ.items() if not name.startswith(("WORKBENCH_", "PYTHONDONTWRITE"))}
    process = await asyncio.create_subprocess_exec(
        *("taskset", "-c", str(core), *tool.command(scratch, url, num_requests, seed)),
        cwd=REPOSITORY, env={**own, **OFFLINE, **tool.variables}, stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    put_first(process.pid)
    watching = asyncio.create_task(_watch(url, process.pid))
    try:
        output, _ = await asyncio.wait_for(process.communicate(), TIMEOUT_S)
    finally:
        watching.cancel()
        if process.returncode is None:
            os.killpg(process.pid, signal.SIGKILL)
            await process.wait()
    try:
        return await _cpu(watching) | tool.read(scratch)
    except (OSError, KeyError, ValueError) as error:
        text = output.decode(errors="replace")[-1500:]
        raise RuntimeError(f"{tool.name} ended with {process.returncode} and {error!r}: {text}") from error


Sample = tuple[float, float, int]
_samples: list[Sample] = []


async def _watch(url: str, pid: int) -> None:
    """Samples of time, CPU seconds of the tool, tokens of the engine, while half of the users or more are served."""
    _samples.clear()
    async with EngineClient(url) as client:
        while True:
            seen = await scrape(client, "engine", SystemClock())
            if seen.num_running >= NUM_STREAMS // 2:
                _samples.append((time.perf_counter(), cpu_s(pid), seen.num_output_tokens_total))
            await asyncio.sleep(POLL_S)


async def _cpu(watching: asyncio.Task[None]) -> dict[str, float]:
    await asyncio.gather(watching, return_exceptions=True)
    if len(_samples) < 2:
        raise ValueError("the engine was never seen at work")
    (start_s, start_cpu_s, start_tokens), (end_s, end_cpu_s, end_tokens) = _samples[0], _samples[-1]
    used_s = end_cpu_s - start_cpu_s
    return {"cpu_us_per_token": 1e6 * used_s / (end_tokens - start_tokens), "cpu_frac": used_s / (end_s - start_s)}


def _bars(engine: str, found: Rounds) -> list[Bar]:
    """Each tool's figures, and how far they lie from ours, round by round; shown."""
    bars = []
    for name, rounds in found.items():
        for figure in rounds[0]:
            value = statistics.median(one[figure] for one in rounds)
            bars.append(Bar(f"{engine}, {name}: {figure}", value, "shown", None))
    for name, rounds in found.items():
        for figure in FIGURES if name != OURS else ():
            ratios = [theirs[figure] / own[figure] for theirs, own in zip(rounds, found[OURS], strict=True)]
            bars.append(Bar(f"{engine}, {name}: {figure} off ours, %", _off(ratios), "shown", None))
    return bars


def _judged(found: Rounds) -> list[Bar]:
    """How far each tool's ratio to the engine's own log lies from ours, and our CPU against vLLM's client's."""
    bars = []
    for name, rounds in found.items():
        for figure, limit in FIGURES.items() if name != OURS else ():
            truly = ENGINE_FIGURES[figure]
            ratios = [
                (theirs[figure] / theirs[truly]) / (own[figure] / own[truly])
                for theirs, own in zip(rounds, found[OURS], strict=True)
            ]
            title = f"fake, {name}: {figure} over the engine's own, off ours, %"
            bars.append(at_most(title, _off(ratios), limit, judged=figure != "ttft_ms"))
    for figure, limit in FIGURES.items():
        ratios = [own[figure] / own[ENGINE_FIGURES[figure]] for own in found[OURS]]
        bars.append(at_most(f"fake, ours: {figure} off the engine's own, %", _off(ratios), limit))
    pairs = zip(found[OURS], found[VLLM], strict=True)
    ratio = statistics.median(own["cpu_us_per_token"] / theirs["cpu_us_per_token"] for own, theirs in pairs)
    bars.append(at_most("fake, ours: CPU a token over vllm bench serve's", ratio, MAX_CPU_RATIO))
    return [*bars, equal_to("load generators compared", len(found), 2 + len(PEERS))]


def _off(ratios: list[float]) -> float:
    return 100 * abs(statistics.median(ratios) - 1)


def _json(path: Path) -> Any:
    return json.loads(path.read_text())


def _ours() -> Tool:
    def command(folder: Path, url: str, num_requests: int, seed: int) -> list[str]:
        numbers = (NUM_STREAMS, num_requests, NUM_WORDS, NUM_OUTPUT_TOKENS, seed)
        return [sys.executable, str(LOAD_CLIENT), url, MODEL, *map(str, numbers), str(folder / "result.json")]

    return Tool(OURS, command, lambda folder: _json(folder / "result.json"), {"PYTHONPATH": str(REPOSITORY)})


def _vllm(scratch: Path, tokenizer: Path) -> Tool:
    def command(folder: Path, url: str, num_requests: int, seed: int) -> list[str]:
        return [
            *(sys.executable, "-m", "vllm.entrypoints.cli.main", "bench", "serve", "--backend", "openai-chat"),
            *("--base-url", url, "--endpoint", "/v1/chat/completions", "--model", MODEL, "--tokenizer", str(tokenizer)),
            *("--dataset-name", "random", "--random-input-len", str(NUM_WORDS), "--ignore-eos", "--seed", str(seed)),
            *("--random-output-len", str(NUM_OUTPUT_TOKENS), "--num-prompts", str(num_requests)),
            *("--max-concurrency", str(NUM_STREAMS), "--save-result", "--result-filename", str(folder / "result.json")),
        ]

    def read(folder: Path) -> dict[str, float]:
        found = _json(folder / "result.json")
        return {
            "output_tokens_per_s": found["output_throughput"],
            "ttft_ms": found["median_ttft_ms"],
            "tpot_ms": found["median_tpot_ms"],
        }

    return Tool(VLLM, command, read, {"PYTHONPATH": str(vllm_metadata(scratch))})


def _guidellm(programs: Path, scratch: Path, tokenizer: Path) -> Tool:
    def command(folder: Path, url: str, num_requests: int, seed: int) -> list[str]:
        data = f"kind=synthetic_text,prompt_tokens={NUM_WORDS},output_tokens={NUM_OUTPUT_TOKENS}"
        return [
            *(str(programs / "guidellm"), "run", "--disable-console-interactive"),
            *("--backend", f"kind=openai_http,target={url},model={MODEL}"),
            *("--profile", f"kind=concurrent,streams={NUM_STREAMS}"),
            *("--constraint", f"kind=max_requests,count={num_requests}", "--data", data),
            *("--tokenizer", f"kind=hf_auto,model={tokenizer}"),
            *("--output", f"kind=json,path={folder / 'result.json'}"),
        ]

    def read(folder: Path) -> dict[str, float]:
        # Its own rate is a mean over requests as they overlap; from its requests the common one is made.
        requests = _json(folder / "result.json")["benchmarks"][0]["requests"]["successful"]
        length_s = max(r["request_end_time"] for r in requests) - min(r["request_start_time"] for r in requests)
        return {
            "output_tokens_per_s": sum(r["output_tokens"] for r in requests) / length_s,
            "ttft_ms": statistics.median(r["time_to_first_token_ms"] for r in requests),
            "tpot_ms": statistics.median(r["inter_token_latency_ms"] for r in requests),
        }

    return Tool("GuideLLM", command, read, {"HF_HOME": str(scratch / "hf")})


def _aiperf(programs: Path, scratch: Path, tokenizer: Path) -> Tool:
    hub = scratch / "hf" / "hub" / "models--local--tokenizer"
    snapshot = hub / "snapshots" / REVISION
    snapshot.mkdir(parents=True)
    (hub / "refs").mkdir()
    (hub / "refs" / "main").write_text(REVISION)
    for file in tokenizer.glob("*.json"):  # it takes no folder: only what looks like a hub's copy
        shutil.copy(file, snapshot / file.name)

    def command(folder: Path, url: str, num_requests: int, seed: int) -> list[str]:
        return [
            *(str(programs / "aiperf"), "profile", "--model", MODEL, "--url", url, "--endpoint-type", "chat"),
            *("--streaming", "--concurrency", str(NUM_STREAMS), "--request-count", str(num_requests)),
            *("--synthetic-input-tokens-mean", str(NUM_WORDS), "--synthetic-input-tokens-stddev", "0"),
            *("--output-tokens-mean", str(NUM_OUTPUT_TOKENS), "--output-tokens-stddev", "0"),
            *("--tokenizer", "local/tokenizer", "--use-server-token-count", "--ui", "none"),
            *("--extra-inputs", "ignore_eos:true", "--random-seed", str(seed), "--artifact-dir", str(folder)),
        ]

    def read(folder: Path) -> dict[str, float]:
        found = _json(folder / "profile_export_aiperf.json")
        return {
            "output_tokens_per_s": found["output_token_throughput"]["avg"],
            "ttft_ms": found["time_to_first_token"]["p50"],
            "tpot_ms": found["inter_token_latency"]["p50"],
        }

    return Tool("AIPerf", command, read, {"HF_HOME": str(scratch / "hf")})


if __name__ == "__main__":
    sys.exit(run("cross_tool", measure))
