"""A loop over store calls ends when it is cancelled, at whatever moment of a call that happens."""

from __future__ import annotations

import asyncio
import random
import tempfile
from pathlib import Path

from serving.store.connection import connect
from serving.store.replicas import ReplicaReports
from serving.store.server import StoreServer


async def test_no_cancellation_is_lost_in_a_call():
    rng = random.Random(1)
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as folder:
        server = StoreServer(Path(folder))
        await server.start()
        client = connect(server.url)
        try:
            for _ in range(300):
                task = asyncio.create_task(_for_ever(ReplicaReports(client)))
                for _ in range(rng.randrange(1, 40)):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait({task}, timeout=5)
                assert done, "the loop goes on after it was cancelled"
        finally:
            await client.aclose()
            await server.stop()


async def _for_ever(reports: ReplicaReports) -> None:
    while True:
        await reports.all()
