"""Replicas as child processes, supervised: what dies is reported and started again, with growing pauses.

It never gives up and never hides: each change of state is told whole through `on_status`, with the number of
restarts and the last lines of the log.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from serving.core.errors import EngineError
from serving.core.ports import Clock
from serving.core.state import ReplicaState
from serving.engine.launchers import OnStatus, ReplicaStatus
from serving.engine.process import Command, ReplicaProcess, ReplicaSpec, vllm_command


@dataclass(frozen=True, slots=True)
class Backoff:
    """Pauses between restarts: exponential, jittered, forgotten after a good run.

    Attributes:
        first_s: the first pause.
        factor: growth with each failure in a row.
        longest_s: the bound, before jitter.
        jitter_frac: a pause is drawn from ± this fraction, so that replicas do not restart in step.
        reset_after_s: a run of this length counts the next failure as the first.
    """

    first_s: float = 1.0
    factor: float = 2.0
    longest_s: float = 60.0
    jitter_frac: float = 0.2
    reset_after_s: float = 60.0

    def delay_s(self, num_failures: int, rng: random.Random) -> float:
        """Seconds to wait after the `num_failures`-th failure in a row (1 is the first)."""
        # The exponent is bounded, or a replica that fails for days overflows a float.
        grown_s = self.first_s * self.factor ** min(num_failures - 1, 64)
        return min(grown_s, self.longest_s) * rng.uniform(1 - self.jitter_frac, 1 + self.jitter_frac)


@dataclass(slots=True)
class _Supervised:
    spec: ReplicaSpec
    status: ReplicaStatus
    num_failed_starts: int = 0  # in a row
    process: ReplicaProcess | None = None
    task: asyncio.Task[None] | None = field(default=None)


class LocalLauncher:
    """Starts, watches and restarts replicas on this machine.

    Args:
        clock: times of changes and of runs.
        rng: draws the jitter.
        on_status: told of every change, in order; must not block.
        backoff: pauses between restarts.
        command: builds the command line; another than vLLM's in tests.
        probe_interval_s: between health probes of a ready replica.
        probe_timeout_s: a busy engine on one core answers late; it is not dead.
        num_missed_probes: in a row, after which a replica that still runs is killed and started again.
    """

    def __init__(
        self,
        *,
        clock: Clock,
        rng: random.Random,
        on_status: OnStatus,
        backoff: Backoff | None = None,
        command: Command = vllm_command,
        probe_interval_s: float = 2.0,
        probe_timeout_s: float = 10.0,
        num_missed_probes: int = 3,
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._on_status = on_status
        self._backoff = backoff or Backoff()
        self._command = command
        self._probe_interval_s = probe_interval_s
        self._probe_timeout_s = probe_timeout_s
        self._num_missed_probes = num_missed_probes
        self._replicas: dict[str, _Supervised] = {}

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """All replicas, in the order in which they were added."""
        return tuple(replica.status for replica in self._replicas.values())

    def launch(self, spec: ReplicaSpec) -> None:
        """Takes a replica under supervision and starts it; returns at once.

        Raises:
            EngineError: a replica of this id is already supervised.
        """
        if spec.replica_id in self._replicas:
            raise EngineError(f"replica {spec.replica_id} is already running")
        status = ReplicaStatus(spec.replica_id, ReplicaState.STARTING, self._clock.now_s())
        replica = _Supervised(spec, status)
        self._replicas[spec.replica_id] = replica
        replica.task = asyncio.create_task(self._supervise(replica), name=f"supervise {spec.replica_id}")
        replica.task.add_done_callback(lambda task: self._on_task_done(replica, task))

    async def until_ready(self, replica_id: str, *, num_tries: int = 1) -> ReplicaStatus:
        """Waits for a replica to be ready.

        Raises:
            EngineError: it failed to start `num_tries` times in a row; supervision goes on all the same.
        """
        replica = self._replicas[replica_id]
        while replica.status.state is not ReplicaState.READY:
            if replica.num_failed_starts >= num_tries:
                raise EngineError(replica.status.error or f"replica {replica_id} is down")
            await asyncio.sleep(0.05)
        return replica.status

    async def remove(self, replica_id: str, *, settle_s: float = 0.0, drain_timeout_s: float | None = None) -> None:
        """Drains a replica, ends it and forgets it.

        Args:
            replica_id: which.
            settle_s: pause between reporting DRAINING and ending it, in which routers take that up (they do
                within 2 s); while it shuts down the engine refuses new requests with errors.
            drain_timeout_s: see `ReplicaProcess.stop`.
        """
        replica = self._replicas[replica_id]
        was_ready = replica.status.state is ReplicaState.READY
        if replica.task is not None:
            replica.task.cancel()
            await asyncio.wait({replica.task})
        if was_ready:
            self._tell(replica, state=ReplicaState.DRAINING)
            await asyncio.sleep(settle_s)
        if replica.process is not None:
            await replica.process.stop(drain_timeout_s)
        self._tell(replica, state=ReplicaState.DOWN, pid=None, phase=None)
        del self._replicas[replica_id]

    async def stop(self, *, settle_s: float = 0.0, drain_timeout_s: float | None = None) -> None:
        """Removes all replicas, side by side."""
        ids = list(self._replicas)
        await asyncio.gather(*(self.remove(i, settle_s=settle_s, drain_timeout_s=drain_timeout_s) for i in ids))

    async def _supervise(self, replica: _Supervised) -> None:
        num_failures = 0
        while True:
            process = replica.process = ReplicaProcess(replica.spec, self._clock, command=self._command)
            began_s = self._clock.monotonic_s()
            try:
                await process.start(self._on_phase(replica, process))
                replica.num_failed_starts = 0
                self._tell(
                    replica,
                    state=ReplicaState.READY,
                    phase=None,
                    phases_s=dict(process.phases_s),
                    error=None,
                )
                began_s = self._clock.monotonic_s()
                reason = f"replica {replica.spec.replica_id} ended: {await self._until_ended(process)}"
                if self._clock.monotonic_s() - began_s >= self._backoff.reset_after_s:
                    num_failures = 0
            except EngineError as error:
                replica.num_failed_starts += 1
                reason = error.message
            num_failures += 1
            self._tell(
                replica, state=ReplicaState.DOWN, pid=None, phase=None, phases_s=dict(process.phases_s), error=reason
            )
            await asyncio.sleep(self._backoff.delay_s(num_failures, self._rng))
            self._tell(replica, state=ReplicaState.STARTING, num_restarts=replica.status.num_restarts + 1)

    async def _until_ended(self, process: ReplicaProcess) -> str:
        ended = asyncio.create_task(process.wait())
        num_missed = 0
        try:
            while True:
                await asyncio.wait({ended}, timeout=self._probe_interval_s)
                if ended.done():
                    return ended.result()
                is_healthy = await process.is_healthy(self._probe_timeout_s)
                num_missed = 0 if is_healthy else num_missed + 1
                if num_missed >= self._num_missed_probes and not ended.done():
                    await process.kill()
                    return f"it ran but did not answer /health {num_missed} times in a row, so it was killed"
        finally:
            ended.cancel()

    def _on_task_done(self, replica: _Supervised, task: asyncio.Task[None]) -> None:
        if not task.cancelled() and (error := task.exception()) is not None:
            self._tell(replica, state=ReplicaState.DOWN, error=f"its supervision itself failed: {error!r}")

    def _on_phase(self, replica: _Supervised, process: ReplicaProcess) -> Callable[[str], None]:
        return lambda phase: self._tell(
            replica,
            state=ReplicaState.STARTING,
            phase=phase,
            pid=process.pid,
            url=process.url,
            phases_s=dict(process.phases_s),
        )

    def _tell(self, replica: _Supervised, **changes: Any) -> None:
        replica.status = replace(replica.status, changed_at_s=self._clock.now_s(), **changes)
        self._on_status(replica.status)
