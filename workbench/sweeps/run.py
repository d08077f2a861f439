"""Runs a sweep on one replica: cell after cell, each safe on disk before the next begins.

    for each cell of the plan that is not there yet:
        measure (workbench/measurement/measure.py) → write to the results folder → bring to MLflow

Run it again after anything went wrong: finished cells are taken from disk. MLflow may be down all the while; what
it lacks stays marked as pending and is logged by the next sweep or by `Tracker.log_pending`.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractAsyncContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from serving.clock import SystemClock
from serving.core.errors import ServingError
from serving.core.ports import Clock
from serving.core.state import ReplicaSnapshot
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from workbench.loadgen import Vocabulary, run_load
from workbench.measurement.measure import CellMeter, ReplicaBusy, ReplicaLost
from workbench.measurement.metered import meter_of
from workbench.measurement.watched import LiveMeasurement, watched
from workbench.provenance import git_commit
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, MeasuredReplica, Shape
from workbench.sweeps.limits import SkippedCell, SweepLimits, estimates, saturated
from workbench.sweeps.plan import SweepMode, SweepPlan, full_plan, short_plan, sweep_digest
from workbench.sweeps.results import ResultsFolder

__all__ = [
    "CellKind", "CellResult", "CellSpec", "MeasuredReplica", "ProgressKind", "ReplicaBusy", "ReplicaHold",
    "ReplicaLost", "Shape", "SkippedCell", "SweepLimits", "SweepMode", "SweepPlan", "SweepProgress", "SweepResult",
    "SweepTracker", "full_plan", "run_sweep", "short_plan", "sweep_digest",
]  # fmt: skip


class ProgressKind(StrEnum):
    """What a progress report is about."""

    NOTE = "note"
    CELL_STARTED = "cell_started"
    REQUESTS = "requests"
    CELL_DONE = "cell_done"
    CELL_KEPT = "cell_kept"
    CELL_SKIPPED = "cell_skipped"


@dataclass(frozen=True, slots=True)
class SweepProgress:
    """Where a sweep stands. `done` of `total` requests of the cell have ended; `message` is for people."""

    kind: ProgressKind
    message: str
    cell_id: str | None = None
    cell_number: int = 0
    num_cells: int = 0
    done: int = 0
    total: int = 0
    result: CellResult | None = None


OnProgress = Callable[[SweepProgress], None]


class LoggedSweep(Protocol):
    """What logging brought over."""

    @property
    def parent_run_ids(self) -> tuple[str, ...]:
        """The sweep's run in MLflow."""
        ...


class SweepTracker(Protocol):
    """Brings a results folder to MLflow: `workbench.tracking.Tracker`."""

    def log_sweep(self, folder: ResultsFolder) -> LoggedSweep:
        """Logs what is not there yet, exactly once. Raises ServingError when MLflow is down or refuses."""
        ...

    def log_files(self, run_id: str, paths: Sequence[Path], folder: str) -> None:
        """Adds artifacts to a run. Raises ServingError when MLflow is down or refuses."""
        ...

    def start_cell(self, folder: ResultsFolder, cell_id: str) -> LiveMeasurement:
        """A run that follows the cell. Raises ServingError when MLflow is down or refuses."""
        ...


class ReplicaHold(Protocol):
    """Keeps others off the replica: through the store's reservations, or not at all."""

    def exclusive(self) -> AbstractAsyncContextManager[object]:
        """Nobody but this sweep is routed to the replica."""
        ...

    def behind_gateway(self) -> AbstractAsyncContextManager[object]:
        """The gateway serves the model by this replica alone."""
        ...


class NoHold:
    """For a replica that nobody else knows; the counters still tell when somebody does."""

    def exclusive(self) -> AbstractAsyncContextManager[object]:
        """Does nothing."""
        return nullcontext()

    def behind_gateway(self) -> AbstractAsyncContextManager[object]:
        """Does nothing."""
        return nullcontext()


@dataclass(frozen=True, slots=True)
class SweepResult:
    """A finished sweep: the newest measurement of each cell, and where it is.

    Attributes:
        cells: in the order of the plan, invalid ones included.
        run_id: the sweep's run in MLflow; None while MLflow has nothing of it.
        run_ids: runs of the measurements by `measurement_id`; those that are missing are pending.
        mlflow_error: why something is still pending, or None.
        skipped: cells of the plan that were not measured, each with its reason.
        page: the HTML page of it, where one was made.
        page_error: why there is none, or not in MLflow.
    """

    sweep_digest: str
    folder: Path
    cells: tuple[CellResult, ...]
    run_id: str | None
    run_ids: dict[str, str] = field(default_factory=dict)
    mlflow_error: str | None = None
    skipped: tuple[SkippedCell, ...] = ()
    page: Path | None = None
    page_error: str | None = None

    @property
    def num_pending(self) -> int:
        """Measurements that wait for MLflow."""
        return sum(cell.measurement_id not in self.run_ids for cell in self.cells)


async def run_sweep(
    plan: SweepPlan,
    replica: MeasuredReplica,
    *,
    vocabulary: Vocabulary,
    results_dir: Path,
    tracker: SweepTracker | None = None,
    hold: ReplicaHold | None = None,
    max_age_s: float | None = None,
    limits: SweepLimits | None = None,
    client_processes: int | None = None,
    on_progress: OnProgress = lambda progress: None,
    clock: Clock | None = None,
) -> SweepResult:
    """Measures every cell of the plan that is not measured yet.

    Args:
        plan: what to measure.
        replica: on what; with a `gateway_url`, one cell goes through the gateway.
        vocabulary: of the model, for prompts of exact length.
        results_dir: holds a folder a sweep.
        tracker: MLflow; None leaves everything pending.
        hold: keeps others off the replica.
        max_age_s: a finished cell older than this is measured again; 0 measures all again, None none.
        limits: time, money and saturation, after which cells are skipped; None measures all.
        client_processes: that share each cell's load; what it takes when None.
        on_progress: told of every step.
        clock: time; the system's when None.

    Raises:
        ReplicaBusy: somebody else uses the replica.
        ReplicaLost: it does not answer any more.
        ResultsNotWritten: the disk is full.
        ResultsBroken: a kept file cannot be read.
        StoreUnavailable, ReplicaReserved: from `hold`.
    """
    clock = clock or SystemClock()
    digest = sweep_digest(plan, replica)
    folder = ResultsFolder(results_dir, digest)
    specs = plan.cells(with_gateway=replica.gateway_url is not None)
    folder.open(_header(plan, replica, specs))
    sweep = _Sweep(folder, specs, tracker, on_progress, limits)
    sweep.take_kept(max_age_s, clock.now_s())
    await sweep.bring_to_mlflow()
    async with EngineClient(replica.url) as client:

        async def probe() -> ReplicaSnapshot:
            return await scrape(client, replica.replica_id, clock)

        load = partial(run_load, client_processes=client_processes)
        energy = meter_of(replica.url, replica.hardware_class, replica.num_units)
        meter = CellMeter(digest, replica, plan.slo, vocabulary, load, probe, clock, energy=energy)
        with client_on_other_cores(replica.cores):
            await sweep.run(meter, hold or NoHold())
    return sweep.result()


@dataclass(slots=True)
class _Sweep:
    """A sweep in progress."""

    folder: ResultsFolder
    specs: tuple[CellSpec, ...]
    tracker: SweepTracker | None
    on_progress: OnProgress
    limits: SweepLimits | None = None
    cells: dict[str, CellResult] = field(default_factory=dict)
    skipped: dict[str, SkippedCell] = field(default_factory=dict)
    spent_s: float = 0.0
    mlflow_error: str | None = "no MLflow server was given"

    def take_kept(self, max_age_s: float | None, now_s: float) -> None:
        """Takes the finished cells from disk."""
        wanted = {spec.cell_id for spec in self.specs}
        for cell in self.folder.cells():
            is_young = max_age_s is None or now_s - cell.ended_at_s < max_age_s
            if cell.spec.cell_id in wanted and cell.invalid is None and is_young:
                self.cells[cell.spec.cell_id] = cell
        for cell_id, cell in self.cells.items():
            self._tell(ProgressKind.CELL_KEPT, f"{cell_id}: kept from before", cell_id, result=cell)

    async def run(self, meter: CellMeter, hold: ReplicaHold) -> None:
        """Measures what is missing: first alone with the replica, then behind the gateway."""
        missing = [spec for spec in self.specs if spec.cell_id not in self.cells]
        alone = [spec for spec in missing if spec.kind is not CellKind.GATEWAY]
        behind_gateway = [spec for spec in missing if spec.kind is CellKind.GATEWAY]
        alone, behind_gateway = self._worth_holding(alone), self._worth_holding(behind_gateway)
        if alone or behind_gateway:
            self._tell(ProgressKind.NOTE, f"waiting until replica {meter.replica.replica_id} serves nobody else")
        if alone:
            async with hold.exclusive():
                await self._warm_up(meter)
                await self._measure_all(meter, alone)
        if behind_gateway:
            async with hold.behind_gateway():
                if not alone:
                    await self._warm_up(meter)
                await self._measure_all(meter, behind_gateway)

    def _worth_holding(self, specs: list[CellSpec]) -> list[CellSpec]:
        """The cells, or none when each is skipped already: then the replica need not be taken."""
        if any(self._reason_to_skip(spec) is None for spec in specs):
            return specs
        for spec in specs:
            self._skips(spec)
        return []

    async def _warm_up(self, meter: CellMeter) -> None:
        largest = max(spec.concurrency for spec in self.specs)
        self._tell(ProgressKind.NOTE, f"warming up with {largest} requests")
        await meter.warm_up(largest, self.specs[0].shape.num_prompt_tokens)

    async def _measure_all(self, meter: CellMeter, specs: list[CellSpec]) -> None:
        for spec in specs:
            if self._skips(spec):
                continue
            began_s = meter.clock.monotonic_s()
            self._tell(ProgressKind.CELL_STARTED, f"{spec.cell_id}: {spec.num_requests} requests", spec.cell_id)

            def on_requests(done: int, total: int, cell_id: str = spec.cell_id) -> None:
                self._tell(ProgressKind.REQUESTS, "", cell_id, done=done, total=total)

            async with watched(self._opener(spec), on_requests, self._mlflow_fails) as tell:
                cell, load = await meter.measure(spec, tell)
            self.folder.write_cell(cell, load.records)
            self.cells[spec.cell_id] = cell
            self.spent_s += meter.clock.monotonic_s() - began_s
            self._tell(ProgressKind.CELL_DONE, _describe(cell), spec.cell_id, result=cell)
            await self.bring_to_mlflow()

    def _skips(self, spec: CellSpec) -> bool:
        """Whether the cell is left out; says so."""
        skipped = self._reason_to_skip(spec)
        if skipped is None:
            return False
        self.skipped[spec.cell_id] = skipped
        self.folder.write_skipped({id_: cell.reason for id_, cell in self.skipped.items() if cell.is_final})
        self._tell(ProgressKind.CELL_SKIPPED, f"{spec.cell_id}: skipped, {skipped.reason}", spec.cell_id)
        return True

    def _reason_to_skip(self, spec: CellSpec) -> SkippedCell | None:
        """For good where the load is saturated, or to a later run where the budget ends."""
        if self.limits is None:
            return None
        if self.limits.stops_at_saturation:
            reason = saturated(spec, self.cells, self.limits.served_within_frac)
            if reason is not None:
                return SkippedCell(spec, reason, is_final=True)
        reason = self.limits.over_budget(self.spent_s, estimates([spec], self.folder.cells())[0])
        return None if reason is None else SkippedCell(spec, reason, is_final=False)

    async def bring_to_mlflow(self) -> None:
        """Logs what MLflow lacks. Not beside a measurement, where a few numbers alone go there (watched.py)."""
        if self.tracker is None:
            return
        try:
            await asyncio.to_thread(self.tracker.log_sweep, self.folder)
        except ServingError as error:
            self._mlflow_fails(error.message)
        else:
            self.mlflow_error = None

    def _opener(self, spec: CellSpec) -> Callable[[], LiveMeasurement] | None:
        return None if self.tracker is None else partial(self.tracker.start_cell, self.folder, spec.cell_id)

    def _mlflow_fails(self, message: str) -> None:
        if self.mlflow_error != message:
            self._tell(ProgressKind.NOTE, f"results stay in {self.folder.path} for now: {message}")
        self.mlflow_error = message

    def result(self) -> SweepResult:
        """What came out."""
        logged = self.folder.logged()
        cells = tuple(self.cells[spec.cell_id] for spec in self.specs if spec.cell_id in self.cells)
        run_id, run_ids = (logged.parent_run_id, dict(logged.runs)) if logged else (None, {})
        skipped = tuple(self.skipped.values())
        return SweepResult(
            self.folder.sweep_digest, self.folder.path, cells, run_id, run_ids, self.mlflow_error, skipped
        )

    def _tell(
        self,
        kind: ProgressKind,
        message: str,
        cell_id: str | None = None,
        *,
        done: int = 0,
        total: int = 0,
        result: CellResult | None = None,
    ) -> None:
        ids = [spec.cell_id for spec in self.specs]
        number = ids.index(cell_id) + 1 if cell_id in ids else 0
        self.on_progress(SweepProgress(kind, message, cell_id, number, len(ids), done, total, result))


@contextmanager
def client_on_other_cores(replica_cores: tuple[int, ...] | None) -> Iterator[None]:
    """Keeps this thread off the replica's cores while the context is open, if there are others."""
    if replica_cores is None or not hasattr(os, "sched_setaffinity"):
        yield
        return
    before = os.sched_getaffinity(0)
    others = before - set(replica_cores)
    if not others:
        yield
        return
    os.sched_setaffinity(0, others)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def _header(plan: SweepPlan, replica: MeasuredReplica, specs: tuple[CellSpec, ...]) -> dict[str, Any]:
    return {
        "plan": plan.to_json(),
        "replica": asdict(replica),
        "cells": [spec.cell_id for spec in specs],
        "commit": git_commit(),
    }


def _describe(cell: CellResult) -> str:
    if cell.invalid is not None:
        return f"{cell.spec.cell_id}: does not count: {cell.invalid}"
    rate = (
        cell.output_tokens_per_s if cell.spec.kind in (CellKind.MIXED, CellKind.GATEWAY) else cell.prompt_tokens_per_s
    )
    unit = "output" if cell.spec.kind in (CellKind.MIXED, CellKind.GATEWAY) else "prompt"
    ttft_s = cell.metrics.get("ttft_s/p50")
    wait = "" if ttft_s is None else f", TTFT p50 {ttft_s * 1000:.0f} ms"
    return f"{cell.spec.cell_id}: {rate:.0f} {unit} tokens/s{wait}"
