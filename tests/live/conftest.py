"""One stack for all live tests that need one."""

from __future__ import annotations

import asyncio
import sys
import tempfile
from collections.abc import AsyncIterator
from pathlib import Path

import psutil
import pytest_asyncio

from tests.integration.processes import until
from tests.live.live_stack import (
    MEMORY_FOR_THREE_BYTES,
    MINILM,
    ROOT,
    START_TIMEOUT_S,
    LiveStack,
    end,
    serves,
    write_config,
)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack() -> AsyncIterator[LiveStack]:
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-live-") as name:
        folder = Path(name)
        write_config(folder)
        command = ["-m", "workbench", "up", "--no-lab", "--json", "--config", str(folder / "workbench.yaml")]
        if psutil.virtual_memory().available > MEMORY_FOR_THREE_BYTES:
            command += ["--pool", f"{MINILM}-cpu"]
        with (folder / "up.out").open("wb") as out, (folder / "up.err").open("wb") as err:
            child = await asyncio.create_subprocess_exec(sys.executable, *command, cwd=ROOT, stdout=out, stderr=err)
        running = LiveStack(folder, child)
        try:
            seconds = await until(lambda: serves(running), "the stack to serve", START_TIMEOUT_S)
            print(f"the stack served after {seconds:.1f} s")
            yield running
        finally:
            await end(running)
