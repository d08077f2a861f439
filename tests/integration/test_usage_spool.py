"""Writers of usage events that are killed: every event whose `append` returned is read, and none twice."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

from serving.metering.segments import closed_segments, read_events, segments
from serving.metering.spool import UsageSpool

# Appends as fast as it can, in segments of about 20 events, and says after each one that it is written.
WRITER = """
import os, sys
from itertools import count
from pathlib import Path
from serving.metering.spool import SpoolSettings, UsageSpool
from tests.unit.usage_examples import an_event

spool = UsageSpool(Path(sys.argv[1]), sys.argv[2], settings=SpoolSettings(max_segment_bytes=16_384))
for number in count():
    spool.append(an_event(id=f"{os.getpid()}-{number}"))
    os.write(1, b"%d\\n" % number)
"""
NUM_EVENTS = 2_000


def start(folder: Path, worker_id: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", WRITER, str(folder), worker_id], stdout=subprocess.PIPE)


def kill_after(writer: subprocess.Popen[bytes], num_events: int) -> list[str]:
    """Kills the writer in the middle of its work; the ids of the events that it had written."""
    assert writer.stdout is not None
    told = [next(writer.stdout) for _ in range(num_events)]
    os.kill(writer.pid, signal.SIGKILL)
    told += [line for line in writer.stdout if line.endswith(b"\n")]
    writer.wait()
    writer.stdout.close()
    return [f"{writer.pid}-{int(line)}" for line in told]


def test_two_killed_writers_lose_nothing_and_count_nothing_twice(tmp_path: Path) -> None:
    told: list[str] = []
    for _ in range(2):
        writers = [start(tmp_path, "gateway-0"), start(tmp_path, "gateway-1")]
        for writer in writers:
            told += kill_after(writer, NUM_EVENTS)
    with UsageSpool(tmp_path, "gateway-0") as spool:
        assert spool.counts.num_torn == 0  # one write each: the kernel finishes what it has begun
        found = [event.id for event in read_events(tmp_path)]
        assert len(found) == len(set(found))
        assert set(told) <= set(found)
        assert len(found) - len(told) <= 4  # each was killed between an event and saying so
        assert segments(tmp_path) == closed_segments(tmp_path)
        assert len(segments(tmp_path)) > 4 * NUM_EVENTS / 30
