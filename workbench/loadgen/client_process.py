"""One of several client processes: `python -m workbench.loadgen.client_process JOB_FILE`; see processes.py."""

from __future__ import annotations

import asyncio
import pickle
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path

import uvloop

from workbench.loadgen.processes import Job
from workbench.loadgen.sending import Sent, Signals, send_share

TELL_EVERY_S = 0.2


@dataclass(slots=True)
class _Parent:
    """What the parent says, and what is told to it."""

    signals: Signals
    start_s: asyncio.Future[float]
    told_s: float = field(default_factory=time.monotonic)
    is_dry: bool = False

    async def listen(self, reader: asyncio.StreamReader) -> None:
        """Follows commands; a closed pipe is a parent that died."""
        async for line in reader:
            word, _, value = line.decode().strip().partition(" ")
            if word == "start" and not self.start_s.done():
                self.start_s.set_result(float(value))
            elif word == "enough":
                self.signals.enough.set()
            elif word == "stop":
                break
        self.signals.stop.set()
        if not self.start_s.done():
            self.start_s.set_result(time.perf_counter())

    async def begin(self) -> float:
        """Says that all is ready, and waits until it is time."""
        _say("ready")
        start_s = await self.start_s
        await asyncio.sleep(max(0.0, start_s - time.perf_counter()))
        return start_s

    def on_dry(self) -> None:
        """Says once that the share has run out."""
        if not self.is_dry:
            self.is_dry = True
            _say("dry")

    def on_progress(self, num_ended: int, _: int) -> None:
        """Says how many have ended, now and then."""
        if time.monotonic() - self.told_s >= TELL_EVERY_S:
            self.told_s = time.monotonic()
            _say(f"ended {num_ended}")


def _say(line: str) -> None:
    sys.stdout.write(f"{line}\n")
    sys.stdout.flush()


async def _send(job: Job) -> Sent:
    loop = asyncio.get_running_loop()
    reader = asyncio.StreamReader()
    await loop.connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
    signals = Signals()
    parent = _Parent(signals, loop.create_future())
    signals.on_dry = parent.on_dry
    listening = asyncio.create_task(parent.listen(reader))
    try:
        return await send_share(
            job.base_url, job.share, job.options, begin=parent.begin, signals=signals, on_progress=parent.on_progress
        )
    finally:
        listening.cancel()


def main(argv: list[str]) -> int:
    """Sends the share that the job file holds, and leaves its outcome where that says."""
    job: Job = pickle.loads(Path(argv[0]).read_bytes())
    sent = uvloop.run(_send(job))
    partial = job.result.with_suffix(".partial")
    partial.write_bytes(pickle.dumps(sent))
    partial.replace(job.result)
    _say(f"ended {len(sent.records)}")
    _say("done")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
