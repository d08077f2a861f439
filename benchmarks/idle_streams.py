"""Streams that are open and wait: 9,500 on one gateway worker, their memory, and whether all go on and end properly.

Fake engines send the first tokens of each stream and then pause; the worker holds two sockets a stream, one to the
client (this process) and one to the engine. Memory is what the worker's private pages (USS) and all its pages (RSS)
grow by over what it had warmed up; PSS would also move with whoever shares its libraries. With all of them open, new
requests are still answered. Then the engine resumes them at once.
"""

from __future__ import annotations

import asyncio
import resource
import sys
import tempfile
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import orjson
from rich.console import Console

from benchmarks import load
from benchmarks.cpu_time import cpu_s
from benchmarks.front import MODEL, Front, fake_engine, gateway
from benchmarks.harness import Bar, Mode, at_most, equal_to, run
from serving.engine.client import EngineClient
from workbench import stats

NUM_STREAMS = {Mode.QUICK: 2000, Mode.FULL: 9500}
IDLE_S = {Mode.QUICK: 3.0, Mode.FULL: 30.0}
MAX_KB_PER_STREAM = 40.0
NUM_ENGINES = 4  # a worker opens at most 4,096 connections to one
NUM_FILES = 20_000  # the worker holds two sockets a stream
PAUSE_AFTER, NUM_TOKENS = 4, 12
OPENING, NUM_WARM_UP = 64, 200  # opened at a time; streams that run through before the first look at the memory
OPEN_WITHIN_S, END_WITHIN_S = 240.0, 120.0
ENGINE_OPTIONS = ("--ttft-ms", "0", "--itl-ms", "5", "--max-num-seqs", "20000", "--num-gpu-blocks", "65536")


@dataclass(frozen=True, slots=True)
class Memory:
    """A process's memory in KB: pages that are its alone (USS), and all that it has in memory (RSS)."""

    uss_kb: int
    rss_kb: int

    @classmethod
    def of(cls, pid: int) -> Memory:
        """As the kernel counts it now."""
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
        found = {line.split(":")[0]: int(line.split()[1]) for line in lines[1:] if line.endswith("kB")}
        return cls(found["Private_Clean"] + found["Private_Dirty"], found["Rss"])


def measure(mode: Mode, console: Console) -> list[Bar]:
    """Memory of thousands of idle streams on one worker, and that each of them goes on and ends."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard not in (resource.RLIM_INFINITY,) and hard < 2 * NUM_STREAMS[mode] + 500:
        raise RuntimeError(f"this machine allows {hard} open files a process: {2 * NUM_STREAMS[mode] + 500} are needed")
    wanted = NUM_FILES if hard == resource.RLIM_INFINITY else min(hard, NUM_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))  # the children inherit it
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_measure(Path(folder), mode, console))


async def _measure(folder: Path, mode: Mode, console: Console) -> list[Bar]:
    num_streams = NUM_STREAMS[mode]
    async with AsyncExitStack() as parts:
        started = [fake_engine(folder, f"engine-{i}", *ENGINE_OPTIONS) for i in range(NUM_ENGINES)]
        urls = [(await parts.enter_async_context(engine))[0] for engine in started]
        engines = [await parts.enter_async_context(EngineClient(url)) for url in urls]
        front = await parts.enter_async_context(gateway(folder, {MODEL: urls}))
        request = _request(front)
        await load.closed_loop([front.url], lambda _: request, NUM_WARM_UP, 32)
        before = Memory.of(front.pid)
        for engine in engines:
            await engine.post_json("/fake/faults", {"pause_after_tokens": PAUSE_AFTER})
        console.print(f"[dim]opening {num_streams} streams …")
        streams = await _open(front.url, request, num_streams)
        for engine in engines:
            await (await engine.request("DELETE", "/fake/faults", timeout_s=30.0)).read()
        began_s, idle_s = cpu_s(front.pid), IDLE_S[mode]
        await asyncio.sleep(idle_s)
        idle_frac = (cpu_s(front.pid) - began_s) / idle_s
        held, num_open = Memory.of(front.pid), sum(not stream.answered.done() for stream in streams)
        console.print("[dim]asking beside them, then resuming them …")
        beside = await load.closed_loop([front.url], lambda _: request, 200, 8)
        resumed = [await engine.post_json("/fake/resume", {}, timeout_s=60.0) for engine in engines]
        await asyncio.wait([stream.answered for stream in streams], timeout=END_WITHIN_S)
        num_whole = sum(_is_whole(stream) for stream in streams)
        for stream in streams:
            stream.connection.close()
        kb = {name: (getattr(held, name) - getattr(before, name)) / num_streams for name in ("uss_kb", "rss_kb")}
    return [
        equal_to("streams open and idle at once", num_open, num_streams),
        at_most("USS a stream, KB", kb["uss_kb"], MAX_KB_PER_STREAM),
        at_most("RSS a stream, KB", kb["rss_kb"], MAX_KB_PER_STREAM),
        equal_to("streams that the engines resumed", sum(one["num_resumed"] for one in resumed), num_streams),
        equal_to("streams that ended whole", num_whole, num_streams),
        Bar("the worker's USS before, MB", before.uss_kb / 1024, "shown", None),
        Bar("the worker's USS with all open, MB", held.uss_kb / 1024, "shown", None),
        Bar("the worker's CPU while all are idle, of a core", idle_frac, "shown", None),
        Bar(
            "TTFT p99 of new streams beside them, ms", 1e3 * stats.quantile([a.ttft_s for a in beside], 0.99), "", None
        ),
    ]


@dataclass(frozen=True, slots=True)
class Stream:
    """One stream: its connection, and its answer once it is whole."""

    connection: load.Connection
    answered: asyncio.Future[load.Answer]


def _request(front: Front) -> bytes:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "hello there"}], "max_tokens": NUM_TOKENS}
    data = orjson.dumps(body | {"stream": True, "stream_options": {"include_usage": True}})
    return load.encode("/v1/chat/completions", data, [f"authorization: Bearer {front.api_key}"])


async def _open(url: str, request: bytes, num_streams: int) -> Sequence[Stream]:
    """Opens them a few at a time; returns when each has the tokens that come before the pause."""
    streams: list[Stream] = []
    async with asyncio.timeout(OPEN_WITHIN_S):
        while len(streams) < num_streams:
            size = min(OPENING, num_streams - len(streams))
            connections = await asyncio.gather(*(load.connect(url) for _ in range(size)))
            batch = [Stream(connection, connection.ask(request)) for connection in connections]
            await asyncio.gather(*(_until_paused(stream) for stream in batch))
            streams += batch
    return streams


async def _until_paused(stream: Stream) -> None:
    content = b""
    while content.count(b"data: {") <= PAUSE_AFTER:  # the role's event is one more
        await asyncio.wait([stream.answered], timeout=0.01)
        content = stream.connection.received
        if stream.answered.done():
            raise load.BrokenAnswer(f"a stream ended instead of pausing: {stream.answered.result().content[-400:]!r}")


def _is_whole(stream: Stream) -> bool:
    """It has its role, all tokens, usage, and the end, and nothing twice."""
    if not stream.answered.done() or stream.answered.exception() is not None:
        return False
    content = stream.answered.result().content
    return content.count(b"data: {") == NUM_TOKENS + 2 and content.count(b"data: [DONE]") == 1


if __name__ == "__main__":
    sys.exit(run("idle_streams", measure))
