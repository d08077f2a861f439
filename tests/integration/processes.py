"""Real processes on loopback for integration tests: fake engines, gateway workers and the store."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from serving.core.errors import UpstreamError
from serving.engine.client import EngineClient

START_TIMEOUT_S = 30.0


@dataclass
class Process:
    """A child with its log."""

    child: asyncio.subprocess.Process
    log: Path

    @property
    def pid(self) -> int:
        return self.child.pid

    async def ended(self, timeout_s: float = 15.0) -> int:
        return await asyncio.wait_for(self.child.wait(), timeout_s)


@asynccontextmanager
async def process(
    arguments: Sequence[str],
    log: Path,
    env: dict[str, str] | None = None,
    *,
    python: str = sys.executable,
    folder: Path | None = None,
) -> AsyncIterator[Process]:
    """`python ARGUMENTS` in `folder` until the block ends; killed then if it still runs."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("WORKBENCH_")}
    with log.open("ab") as output:
        child = await asyncio.create_subprocess_exec(
            python, *arguments, cwd=folder, env={**inherited, **(env or {})}, stdout=output, stderr=output
        )
    try:
        yield Process(child, log)
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@asynccontextmanager
async def fake_engine(folder: Path, *arguments: str) -> AsyncIterator[str]:
    """A fake engine; yields its URL."""
    port_file = _next_file(folder)
    everything = ["-m", "serving.engine.fake", "--port", "0", "--port-file", str(port_file), *arguments]
    async with process(everything, port_file.with_suffix(".log")) as engine:

        async def listens() -> bool:
            if engine.child.returncode is not None:
                raise AssertionError(f"the fake engine ended: {text(engine.log)}")
            return exists(port_file)

        await until(listens, "the fake engine to listen")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"


@asynccontextmanager
async def gateway_worker(port: int, log: Path, env: dict[str, str]) -> AsyncIterator[Process]:
    """A gateway worker; yields when it says that it is up."""
    async with process(["-m", "serving.gateway", "--port", str(port)], log, env) as worker:

        async def is_up() -> bool:
            if worker.child.returncode is not None:
                raise AssertionError(f"the worker ended: {text(log)}")
            return "Application startup complete" in text(log)

        await until(is_up, "the gateway worker to start")
        yield worker


async def until(condition: Callable[[], Awaitable[bool]], what: str, timeout_s: float = START_TIMEOUT_S) -> float:
    """Polls until `condition` holds; returns the seconds it took."""
    loop = asyncio.get_running_loop()
    begun_s = loop.time()
    while not await condition():
        if loop.time() - begun_s > timeout_s:
            raise AssertionError(f"waited {timeout_s:g} s for {what}")
        await asyncio.sleep(0.02)
    return loop.time() - begun_s


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def fetch(
    url: str, method: str, path: str, body: bytes = b"", **headers: str
) -> tuple[int, dict[bytes, bytes], bytes]:
    """One request on a connection of its own, so that any worker of a port may get it."""
    own = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    async with EngineClient(url) as client:
        response = await client.request(method, path, headers=own, body=body, timeout_s=30.0)
        return response.status, response.headers, await response.read()


async def metric(url: str, name: str, **labels: str) -> float | None:
    """A metric summed over labels that are not given; None when there is none."""
    try:
        _, _, page = await fetch(url, "GET", "/metrics")
    except UpstreamError:
        return None
    values = [
        sample.value
        for family in text_string_to_metric_families(page.decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    ]
    return sum(values) if values else None


async def engine_log(url: str) -> list[dict[str, Any]]:
    async with EngineClient(url) as client:
        log: list[dict[str, Any]] = await client.get_json("/fake/log")
        return log


def exists(path: Path) -> bool:
    return path.exists()


def text(path: Path) -> str:
    return path.read_text(errors="replace")


def _next_file(folder: Path) -> Path:
    return folder / f"fake-{len(list(folder.glob('fake-*.port')))}.port"
