"""Measures one cell, and refuses what it can't stand for.

    wait until idle → counters before → load → counters after → summary → CellResult, valid or with a reason

What makes a cell invalid: `workbench/measurement/cell_checks.py`.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from serving.core.errors import UpstreamError
from serving.core.ports import Clock
from serving.core.state import ReplicaSnapshot, Task
from workbench.absent import Absent
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    LoadResult,
    Prompt,
    RequestRecord,
    Slo,
    Target,
    Vocabulary,
    embedding_prompts,
    summarize,
    synthetic_prompts,
)
from workbench.loadgen import TargetKind as LoadTargetKind
from workbench.measurement.cell_checks import Counters, client_error_frac, decode_tokens_per_s, invalid_because
from workbench.measurement.energy import Energy, EnergyMeter
from workbench.measurement.findings import find
from workbench.measurement.metered import energy_metrics, ticking
from workbench.provenance import git_commit
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, MeasuredReplica, TargetKind, file_stem

NUM_CACHED_PROMPTS = 4
PROMPT_KINDS = (CellKind.PREFILL, CellKind.CACHED, CellKind.EMBED)
IDLE_TIMEOUT_S = 30.0
SETTLE_TIMEOUT_S = 3.0
POLL_S = 0.1
WARM_UP_OUTPUT_TOKENS = 8

Probe = Callable[[], Awaitable[ReplicaSnapshot]]
OnRequests = Callable[[int, int], None]


class ReplicaBusy(Exception):
    """Somebody else uses the replica; nothing was measured."""


class ReplicaLost(Exception):
    """The replica does not answer; what was measured before is kept."""


class LoadRunner(Protocol):
    """`loadgen.run_load`, or its fake in tests."""

    async def __call__(
        self,
        target: Target,
        prompts: Iterator[Prompt],
        arrival: Arrival,
        *,
        num_requests: int,
        max_duration_s: float,
        cache_salt: str | None,
        run_id: str,
        on_progress: OnRequests | None,
    ) -> LoadResult:
        """Runs the load."""
        ...


@dataclass(frozen=True, slots=True)
class CellMeter:
    """What measuring needs: the replica, its vocabulary, and the shell's hands."""

    sweep_digest: str
    replica: MeasuredReplica
    slo: Slo
    vocabulary: Vocabulary
    load: LoadRunner
    probe: Probe
    clock: Clock
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep
    energy: EnergyMeter = field(default_factory=lambda: EnergyMeter(Absent("no energy meter was given")))

    async def warm_up(self, concurrency: int, num_prompt_tokens: int) -> None:
        """Sends a first few requests that nobody measures: an engine's first steps are its slowest.

        Raises:
            ReplicaBusy, ReplicaLost: as `measure`.
        """
        await self._wait_until_idle()
        num_output_tokens = 0 if self.replica.task is Task.EMBED else WARM_UP_OUTPUT_TOKENS
        prompts = self._prompts(num_prompt_tokens, num_output_tokens, secrets.randbits(32))
        await self._run(self._target(TargetKind.ENGINE), prompts, concurrency, concurrency, 60.0, _salt(), None)

    async def measure(self, spec: CellSpec, on_requests: OnRequests | None = None) -> tuple[CellResult, LoadResult]:
        """Measures the cell; the result says when it does not count.

        Raises:
            ReplicaBusy: the replica did not become idle.
            ReplicaLost: it does not answer.
        """
        seed, salt, target = secrets.randbits(32), _salt(), self._target(spec.target)
        await self._wait_until_idle()
        prompts = self._prompts(spec.shape.num_prompt_tokens, spec.shape.num_output_tokens, seed)
        if spec.kind is CellKind.CACHED:
            repeated = list(itertools.islice(prompts, NUM_CACHED_PROMPTS))
            await self._run(target, iter(repeated), spec.concurrency, len(repeated), spec.max_duration_s, salt, None)
            await self._wait_until_idle()
            prompts = itertools.cycle(repeated)
        before = await self._snapshot()
        async with ticking(self.energy):
            load = await self._run(
                target, prompts, spec.concurrency, spec.num_requests, spec.max_duration_s, salt, on_requests
            )
            used = self.energy.stop()
        counters = await self._settled(before, load.records)
        return self._result(spec, seed, load, counters, used), load

    def _result(
        self, spec: CellSpec, seed: int, load: LoadResult, counters: Counters, used: Energy | Absent
    ) -> CellResult:
        replica = self.replica
        summary = summarize(
            load.records,
            slo=self.slo,
            num_units=replica.num_units,
            num_warm_up=spec.concurrency,
            client_error=load.client_error,
        )
        found = find(load.records, is_closed=True)
        window = summary.window
        cached = window.num_cached_tokens if window else 0.0
        if window is not None and not cached and counters.num_hit_tokens:
            # The engine does not tell cached tokens request by request: its counter does for the cell.
            cached = window.num_prompt_tokens * counters.hit_frac
        return CellResult(
            sweep_digest=self.sweep_digest,
            spec=spec,
            model=replica.model,
            version=replica.version,
            task=replica.task,
            hardware_class=replica.hardware_class,
            num_units=replica.num_units,
            engine_fingerprint=replica.engine_fingerprint,
            hardware_fingerprint=replica.hardware_fingerprint,
            engine_covers=replica.engine_covers,
            hardware_covers=replica.hardware_covers,
            replica_id=replica.replica_id,
            started_at_s=load.started_at_s,
            ended_at_s=load.ended_at_s,
            window_s=window.length_s if window else 0.0,
            num_requests=summary.num_requests,
            num_failed=summary.num_failed,
            failures={kind.value: count for kind, count in summary.failures.items()},
            num_prompt_tokens=window.num_prompt_tokens if window else 0.0,
            num_cached_tokens=cached,
            num_output_tokens=window.num_output_tokens if window else 0.0,
            engine_num_prompt_tokens=counters.num_prompt_tokens,
            engine_num_output_tokens=counters.num_output_tokens,
            prefix_cache_hit_frac=counters.hit_frac,
            decode_tokens_per_s=decode_tokens_per_s(load.records[spec.concurrency :], spec.concurrency),
            metrics=summary.metrics
            | found.metrics
            | energy_metrics(used, load.records, counts_prompts=spec.kind in PROMPT_KINDS),
            intervals=summary.intervals | found.intervals,
            client_error_frac=client_error_frac(load, summary),
            prompt_seed=seed,
            commit=git_commit(),
            records_file=f"{file_stem(spec.cell_id, load.started_at_s)}.parquet",
            weak=tuple(sorted(summary.weak)),
            invalid=invalid_because(spec, self.replica.task, summary, counters, load.records),
            notes=load.notes + found.notes,
            num_unsent=load.client_error.num_unsent,
            energy=used.reason if isinstance(used, Absent) else used.source,
        )

    def _target(self, kind: TargetKind) -> Target:
        replica = self.replica
        if kind is TargetKind.ENGINE:
            return Target(replica.url, replica.request_model, replica.task, LoadTargetKind.ENGINE, replica.replica_id)
        if replica.gateway_url is None:
            raise ValueError(f"no gateway address for {replica.replica_id}: a gateway cell needs one")
        return Target(replica.gateway_url, f"{replica.model}@{replica.version}", replica.task, LoadTargetKind.GATEWAY)

    def _prompts(self, num_prompt_tokens: int, num_output_tokens: int, seed: int) -> Iterator[Prompt]:
        if self.replica.task is Task.EMBED:
            return embedding_prompts(self.vocabulary, num_prompt_tokens=num_prompt_tokens, seed=seed)
        return synthetic_prompts(
            self.vocabulary, num_prompt_tokens=num_prompt_tokens, num_output_tokens=num_output_tokens, seed=seed
        )

    async def _run(
        self,
        target: Target,
        prompts: Iterator[Prompt],
        concurrency: int,
        num_requests: int,
        max_duration_s: float,
        salt: str,
        on_requests: OnRequests | None,
    ) -> LoadResult:
        return await self.load(
            target,
            prompts,
            ClosedLoop(concurrency),
            num_requests=num_requests,
            max_duration_s=max_duration_s,
            cache_salt=salt,
            run_id=salt,
            on_progress=on_requests,
        )

    async def _snapshot(self) -> ReplicaSnapshot:
        try:
            return await self.probe()
        except UpstreamError as error:
            replica = self.replica
            raise ReplicaLost(
                f"replica {replica.replica_id} at {replica.url} does not answer: {error.message}; see its log, "
                f"then run the sweep again: finished cells are kept"
            ) from error

    async def _wait_until_idle(self) -> None:
        deadline_s = self.clock.monotonic_s() + IDLE_TIMEOUT_S
        while True:
            seen = await self._snapshot()
            if seen.num_running + seen.num_waiting == 0:
                return
            if self.clock.monotonic_s() >= deadline_s:
                raise ReplicaBusy(
                    f"replica {self.replica.replica_id} still has {seen.num_running} running and {seen.num_waiting} "
                    f"waiting requests after {IDLE_TIMEOUT_S:g} s: it must serve nobody else while it is measured"
                )
            await self.sleep(POLL_S)

    async def _settled(self, before: ReplicaSnapshot, records: Sequence[RequestRecord]) -> Counters:
        """The counters once they agree with the client, or as they stand after a few seconds: engines count late."""
        deadline_s = self.clock.monotonic_s() + SETTLE_TIMEOUT_S
        while True:
            counters = Counters.between(before, await self._snapshot())
            if counters.gap(records, self.replica.task) is None or self.clock.monotonic_s() >= deadline_s:
                return counters
            await self.sleep(POLL_S)


def _salt() -> str:
    return f"cell-{secrets.token_hex(8)}"
