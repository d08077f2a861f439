"""The client's own error, measured right before a run: how late it stamps what a known server has sent.

A process of its own (stamping_server.py) sends chunks that hold the time at which they were sent, on the clock that
all processes of a machine share; this process receives them as in a run, by the same client at the same priority. The
difference is loopback, waking up, and whatever else this machine does. It takes about 0.15 s.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from serving.core.errors import Unavailable
from serving.engine.client import EngineClient
from workbench.loadgen.answers import RawAnswer
from workbench.loadgen.client import fetch
from workbench.loadgen.quiet import quiet_process
from workbench.stats import quantile

SERVER = Path(__file__).with_name("stamping_server.py")
NUM_STREAMS, NUM_CHUNKS, GAP_S = 8, 15, 0.0008
TIMEOUT_S = 10.0


class NotCalibrated(Unavailable):
    """The client's own error could not be measured."""


async def stamp_error_s() -> float:
    """How late this process stamps what comes, at P99, in seconds.

    Raises:
        NotCalibrated: the server did not start, or did not answer.
    """
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-I", "-S", str(SERVER), str(NUM_STREAMS), str(NUM_CHUNKS), str(GAP_S)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
    )
    try:
        async with asyncio.timeout(TIMEOUT_S):
            port = b"" if process.stdout is None else await process.stdout.readline()
            if not port:
                raise NotCalibrated(f"the client's own error is not known: {SERVER.name} did not start")
            return quantile(_errors_s(await _answers(int(port))), 0.99)
    except TimeoutError:
        raise NotCalibrated(f"the client's own error is not known: {SERVER.name} took over {TIMEOUT_S:g} s") from None
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _answers(port: int) -> list[RawAnswer]:
    async with EngineClient(f"http://127.0.0.1:{port}") as client:
        with quiet_process(collects=False):
            asked = (fetch(client, "/", [], b"", timeout_s=TIMEOUT_S) for _ in range(NUM_STREAMS))
            return await asyncio.gather(*asked)


def _errors_s(answers: list[RawAnswer]) -> list[float]:
    """Arrival by our stamp less the server's, of each chunk."""
    errors_s = [
        at_s - float(data.removeprefix(b"data: ")) for answer in answers for at_s, data in answer.chunks if data.strip()
    ]
    if len(errors_s) != NUM_STREAMS * NUM_CHUNKS:
        why = next((answer.detail for answer in answers if answer.detail), "chunks are missing")
        raise NotCalibrated(f"the client's own error is not known: {why}")
    return errors_s
