"""Child processes of benchmarks: started, waited for and ended by the benchmark that needs them."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from serving.core.errors import UpstreamError

START_TIMEOUT_S = 30.0
STOP_TIMEOUT_S = 10.0
FIRST = -20  # the nice value of what goes before all other ordinary processes


@asynccontextmanager
async def child(
    arguments: Sequence[str], log: Path, prefix: str = "", settings: Mapping[str, str] | None = None
) -> AsyncIterator[int]:
    """`python -m ARGUMENTS` until the block ends; yields its pid.

    `settings` become `WORKBENCH_<prefix>_*` in its environment; other `WORKBENCH_*` variables do not reach it.
    """
    variables = {f"WORKBENCH_{prefix}_{name}": value for name, value in (settings or {}).items()}
    async with program([sys.executable, "-m", *arguments], log, variables) as pid:
        yield pid


@asynccontextmanager
async def program(command: Sequence[str], log: Path, variables: Mapping[str, str] | None = None) -> AsyncIterator[int]:
    """Any program until the block ends, with `variables` over this environment less ours; yields its pid."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("WORKBENCH_")}
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            *command, env={**env, **(variables or {})}, stdout=output, stderr=output
        )
    try:
        yield process.pid
    finally:
        if process.returncode is None:
            process.terminate()
            try:
                await asyncio.wait_for(process.wait(), STOP_TIMEOUT_S)
            except TimeoutError:
                process.kill()
                await process.wait()


async def until(condition: Callable[[], Awaitable[bool]], what: str, log: Path) -> None:
    """Polls until `condition` holds; a peer that does not answer yet counts as no.

    Raises:
        TimeoutError: it did not hold within 30 s; the message has the end of `log`.
    """
    deadline_s = asyncio.get_running_loop().time() + START_TIMEOUT_S
    while asyncio.get_running_loop().time() < deadline_s:
        try:
            if await condition():
                return
        except UpstreamError:
            pass  # not listening yet
        await asyncio.sleep(0.05)
    tail = await asyncio.to_thread(_tail, log)
    raise TimeoutError(f"waited {START_TIMEOUT_S:g} s for {what}; the log ends with:\n{tail}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text().splitlines()[-5:]) if log.exists() else ""


def put_first(pid: int) -> None:
    """Runs the leader of a session, and what it starts from now on, before all ordinary processes.

    Where the system does not permit it, nothing changes: what else the machine does is then in what is measured.
    """
    with suppress(PermissionError):
        os.setpriority(os.PRIO_PROCESS, pid, FIRST)
    with suppress(PermissionError, FileNotFoundError):  # Linux weighs sessions first, where they are groups
        Path(f"/proc/{pid}/autogroup").write_text(str(FIRST))


def free_port() -> int:
    """A port that nothing on loopback listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
