"""What the gateway costs: its CPU time a request and a streamed token, beside vllm-router before the same engines.

Two fake engines, 5 ms between tokens, with usage. Front ends: ours with everything on (front.py) and `vllm-router`
from PyPI with its policy power_of_two. Each round gives both the same work in turn, in changing order; a figure is
the CPU time of the front end's whole process tree over the work, the median of rounds with a bootstrap interval. The
store's CPU is apart, and so is an engine's, which shows that the engines are not what is measured.

    unary request      a closed loop of 16, answers of one token; shown beside it at a fixed rate, where nobody is busy
    streamed token     long streams less short ones, over the tokens that are more
    1,000-token prompt, Idempotency-Key    the same with that
    added TTFT         p99 of 32 streams at once, less the p99 straight at the engines in the same round
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import median

import numpy as np
import orjson
from rich.console import Console

from benchmarks import load, peers
from benchmarks.cpu_time import cpu_s
from benchmarks.front import MODEL, fake_engine, gateway
from benchmarks.harness import Bar, Mode, at_most, run
from benchmarks.processes import free_port, program, until
from serving.core.errors import UpstreamError
from serving.engine.client import EngineClient
from workbench import stats

PEER, PEER_REQUIREMENT = "vllm-router", "vllm-router==0.1.17"
UNARY_RATIO, TOKEN_RATIO, ADDED_TTFT_MS = 1.0, 0.8, 5.0
CONCURRENCY, NUM_TTFT_STREAMS, PACED_RPS = 16, 32, 250.0
SHORT_TOKENS, LONG_TOKENS = 8, 136
ENGINE_OPTIONS = ("--ttft-ms", "0", "--itl-ms", "5", "--max-num-seqs", "1024", "--enable-prefix-caching", "false")
SAY = "hello there"
WORDS = ["the", "quick", "brown", "fox", "jumps", "over", "lazy", "dogs", "while", "clerks", "count", "letters"]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Work of a round."""

    num_rounds: int
    num_unary: int
    num_streams: int
    num_ttft: int


SIZES = {Mode.QUICK: Sizes(3, 1000, 48, 320), Mode.FULL: Sizes(9, 2000, 128, 960)}


@dataclass(slots=True)
class Target:
    """A front end, or the engines themselves; its figures by name, a value a round."""

    name: str
    urls: Sequence[str]
    pids: Mapping[str, Sequence[int]]
    headers: tuple[str, ...] = ()
    takes_keys: bool = False
    figures: dict[str, list[float]] = field(default_factory=dict)
    num_keys: int = 0

    def add(self, name: str, value: float) -> None:
        """A round's value."""
        self.figures.setdefault(name, []).append(value)

    def cpu_s(self) -> dict[str, float]:
        """CPU seconds that each part has used so far."""
        return {part: sum(map(cpu_s, pids)) for part, pids in self.pids.items()}

    def build(self, body: bytes, *, keyed: bool = False) -> load.Build:
        """Requests of this body; each with an Idempotency-Key of its own if `keyed`."""
        path = "/v1/chat/completions"
        if not keyed:
            request = load.encode(path, body, self.headers)
            return lambda _: request

        def with_key(_: int) -> bytes:
            self.num_keys += 1
            return load.encode(path, body, (*self.headers, f"idempotency-key: benchmark-{self.num_keys}"))

        return with_key


def measure(mode: Mode, console: Console) -> list[Bar]:
    """CPU time a request and a streamed token against vllm-router's, and what is added to the first token's time."""
    programs = peers.environment(PEER, [PEER_REQUIREMENT], console)
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), programs, SIZES[mode], console))


async def _measure(folder: Path, programs: Path, sizes: Sizes, console: Console) -> list[Bar]:
    async with AsyncExitStack() as parts:
        engines = [await parts.enter_async_context(fake_engine(folder, f"e{i}", *ENGINE_OPTIONS)) for i in range(2)]
        urls, engine_pids = [url for url, _ in engines], [pid for _, pid in engines]
        front = await parts.enter_async_context(gateway(folder, {MODEL: urls}))
        router = await parts.enter_async_context(_router(folder, programs, urls))
        pids = {"": [front.pid], ", its store": [front.store_pid]}
        ours = Target("gateway", [front.url], pids, (f"authorization: Bearer {front.api_key}",), takes_keys=True)
        direct = Target("engines", urls, {"": engine_pids})
        targets = [ours, router, direct]
        for target in targets:
            await load.closed_loop(target.urls, target.build(_body(1)), 300, CONCURRENCY)
            await load.closed_loop(target.urls, target.build(_body(8, stream=True)), 32, CONCURRENCY)
        for number in range(sizes.num_rounds):
            console.print(f"[dim]round {number + 1} of {sizes.num_rounds} …")
            order = targets if number % 2 == 0 else targets[::-1]
            for work in (_unary, _streams, _first_tokens, _one_at_a_time, _idle):
                for target in order:
                    await work(target, sizes)
    return _bars(ours, router, direct)


@asynccontextmanager
async def _router(folder: Path, programs: Path, urls: Sequence[str]) -> AsyncIterator[Target]:
    port, log = free_port(), folder / "vllm-router.log"
    command = [str(programs / "vllm-router"), "--host", "127.0.0.1", "--port", str(port), "--worker-urls", *urls]
    command += ["--policy", "power_of_two", "--log-level", "error", "--prometheus-port", str(free_port())]
    async with program(command, log) as pid:
        url = f"http://127.0.0.1:{port}"
        await until(lambda: _is_ready(url), "vllm-router to serve", log)
        yield Target(PEER, [url], {"": [pid]})


async def _is_ready(url: str) -> bool:
    try:
        async with EngineClient(url) as client:
            await client.post_json("/v1/chat/completions", orjson.loads(_body(1)), timeout_s=2.0)
    except UpstreamError:
        return False
    return True


def _body(num_tokens: int, *, stream: bool = False, text: str = SAY) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": num_tokens}
    return orjson.dumps(body | ({"stream": True, "stream_options": {"include_usage": True}} if stream else {}))


def long_text(num_words: int = 1000) -> str:
    """A prompt of that many words, which the fake engine counts as tokens."""
    rng = Random(1)
    return " ".join(rng.choice(WORDS) for _ in range(num_words))


async def _unary(target: Target, sizes: Sizes) -> None:
    await _cpu(target, "unary", target.build(_body(1)), sizes.num_unary)
    await _cpu(target, f"unary at {PACED_RPS:g} requests/s", target.build(_body(1)), sizes.num_unary // 2, paced=True)
    await _cpu(target, "unary, 1,000-token prompt", target.build(_body(1, text=long_text())), sizes.num_unary // 2)
    if target.takes_keys:
        await _cpu(target, "unary, Idempotency-Key", target.build(_body(1), keyed=True), sizes.num_unary // 2)


async def _streams(target: Target, sizes: Sizes) -> None:
    for suffix in ("", ", Idempotency-Key") if target.takes_keys else ("",):
        costs = []
        for num_tokens in (SHORT_TOKENS, LONG_TOKENS):
            build = target.build(_body(num_tokens, stream=True), keyed=bool(suffix))
            costs.append(await _cpu(target, None, build, sizes.num_streams, num_events=num_tokens))
        for part in target.pids:
            token_s = (costs[1][part] - costs[0][part]) / (LONG_TOKENS - SHORT_TOKENS)
            target.add(f"streamed token{suffix}{part}, us", 1e6 * token_s)
            target.add(f"stream of {SHORT_TOKENS} tokens{suffix}{part}, us", 1e6 * costs[0][part])


async def _cpu(
    target: Target,
    name: str | None,
    build: load.Build,
    num_requests: int,
    *,
    num_events: int = 0,
    paced: bool = False,
) -> dict[str, float]:
    """CPU seconds a request of each part of the target; kept under `name` if it has one."""
    before_s = target.cpu_s()
    if paced:
        answers = await load.paced(target.urls, build, num_requests, PACED_RPS)
    else:
        answers = await load.closed_loop(target.urls, build, num_requests, CONCURRENCY)
    costs = {part: (after_s - before_s[part]) / num_requests for part, after_s in target.cpu_s().items()}
    if num_events:
        _check_streams(target.name, answers, num_events)
    if name is not None:
        for part, cost_s in costs.items():
            target.add(f"{name}{part}, us", 1e6 * cost_s)
    return costs


def _check_streams(name: str, answers: Sequence[load.Answer], num_tokens: int) -> None:
    """A front end that drops events would be cheap: every stream has a role, its tokens, usage and an end."""
    for answer in answers:
        content = answer.content
        num_events = content.count(b"data: {")
        if num_events != num_tokens + 2 or b"data: [DONE]" not in content[-64:]:
            raise load.BrokenAnswer(f"{name}: a stream of {num_tokens} tokens came as {num_events} events")


async def _first_tokens(target: Target, sizes: Sizes) -> None:
    build = target.build(_body(32, stream=True))
    answers = await load.closed_loop(target.urls, build, sizes.num_ttft, NUM_TTFT_STREAMS)
    ttft_ms = [1e3 * answer.ttft_s for answer in answers[NUM_TTFT_STREAMS:]]  # the first wave begins at once
    target.add("TTFT p50 at 32 streams, ms", stats.quantile(ttft_ms, 0.5))
    target.add("TTFT p99 at 32 streams, ms", stats.quantile(ttft_ms, 0.99))


async def _one_at_a_time(target: Target, sizes: Sizes) -> None:
    answers = await load.closed_loop(target.urls, target.build(_body(1)), 200, 1)
    target.add("unary alone, p50 ms", 1e3 * median(answer.e2e_s for answer in answers))


async def _idle(target: Target, sizes: Sizes) -> None:
    """What a front end does with nothing to do is inside every figure above."""
    before_s = target.cpu_s()
    await asyncio.sleep(1.0)
    for part, after_s in target.cpu_s().items():
        target.add(f"idle{part}, us a second", 1e6 * (after_s - before_s[part]))


def _bars(ours: Target, router: Target, direct: Target) -> list[Bar]:
    bars = [
        _ratio("unary request, ratio to vllm-router", ours, router, "unary, us", UNARY_RATIO),
        _ratio("streamed token, ratio to vllm-router", ours, router, "streamed token, us", TOKEN_RATIO),
    ]
    name = "TTFT p99 at 32 streams, ms"
    for target, judged in ((ours, True), (router, False)):
        added_ms = [a - b for a, b in zip(target.figures[name], direct.figures[name], strict=True)]
        bars.append(
            at_most(f"{target.name}: added TTFT p99 at 32 streams, ms", median(added_ms), ADDED_TTFT_MS, judged=judged)
        )
    for target in (ours, router, direct):
        bars += [_shown(target, figure) for figure in target.figures]
    return bars


def _ratio(name: str, ours: Target, router: Target, figure: str, limit: float) -> Bar:
    """The medians' ratio is judged; the interval is of the rounds' own ratios."""
    a, b = ours.figures[figure], router.figures[figure]
    low, high = _interval([x / y for x, y in zip(a, b, strict=True)])
    return at_most(f"{name} [{low:.2f}, {high:.2f}]", median(a) / median(b), limit)


def _shown(target: Target, figure: str) -> Bar:
    low, high = _interval(target.figures[figure])
    return Bar(f"{target.name}: {figure}", median(target.figures[figure]), f"[{low:.4g}, {high:.4g}]", None)


def _interval(values: Sequence[float]) -> tuple[float, float]:
    """95 % bootstrap interval of the median of rounds."""
    return stats.bootstrap_interval(values, lambda sample: float(np.median(sample)), stats.named_rng(1, "gateway_cost"))


if __name__ == "__main__":
    sys.exit(run("gateway_cost", measure))
