"""Replicas that somebody else runs: known by URL, watched by health probes, never started or stopped."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import replace

from serving.core.ports import Clock
from serving.core.state import ReplicaState
from serving.engine.client import EngineClient
from serving.engine.launchers import OnStatus, ReplicaStatus
from serving.engine.process import probe


class AttachLauncher:
    """Probes `GET /health` of every URL and reports what changes.

    Args:
        urls: base URL by replica id.
        clock: times of changes.
        on_status: told of every change, in order; must not block.
        probe_interval_s: between probes of a replica.
        probe_timeout_s: a slower answer counts as missed.
        num_missed_probes: in a row, until a ready replica counts as down.
    """

    def __init__(
        self,
        urls: Mapping[str, str],
        *,
        clock: Clock,
        on_status: OnStatus,
        probe_interval_s: float = 1.0,
        probe_timeout_s: float = 5.0,
        num_missed_probes: int = 2,
    ) -> None:
        self._clock = clock
        self._on_status = on_status
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._num_missed_probes = num_missed_probes
        self._tasks: list[asyncio.Task[None]] = []
        self._statuses = {
            replica_id: ReplicaStatus(replica_id, ReplicaState.STARTING, clock.now_s(), url=url)
            for replica_id, url in urls.items()
        }

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """All replicas, in the order in which they were given."""
        return tuple(self._statuses.values())

    def start(self) -> None:
        """Begins to watch; returns at once."""
        self._tasks = [asyncio.create_task(self._watch(i), name=f"probe {i}") for i in self._statuses]

    async def stop(self) -> None:
        """Ends the watching; the replicas run on."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        self._tasks = []

    async def _watch(self, replica_id: str) -> None:
        num_missed = 0
        async with EngineClient(self._statuses[replica_id].url or "") as client:
            while True:
                is_healthy = await probe(client, self._probe_timeout_s)
                num_missed = 0 if is_healthy else num_missed + 1
                if is_healthy:
                    self._tell(replica_id, ReplicaState.READY, None)
                elif num_missed >= self._num_missed_probes:
                    self._tell(replica_id, ReplicaState.DOWN, f"{client.base_url}/health did not answer 200")
                await asyncio.sleep(self._probe_interval_s)

    def _tell(self, replica_id: str, state: ReplicaState, error: str | None) -> None:
        status = self._statuses[replica_id]
        if status.state is state:
            return
        num_restarts = status.num_restarts + (status.state is ReplicaState.DOWN and state is ReplicaState.READY)
        status = replace(status, state=state, error=error, num_restarts=num_restarts, changed_at_s=self._clock.now_s())
        self._statuses[replica_id] = status
        self._on_status(status)
