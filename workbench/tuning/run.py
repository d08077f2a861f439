"""Runs a tuning: for each configuration an own engine, started, measured at one load, and ended.

    next_step (tuning.py) says a configuration -> its pool's settings -> replicas prepared and started
        -> one mixed cell on one replica -> trial kept in tuning.json -> engine ended -> next_step again

The engine is not part of the running stack: no router knows it, so nobody else can use it. It needs cores and memory
of its own; on a machine whose cores are all taken, stop the pool that is in use first (`workbench pool stop`).
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Protocol

from pydantic import ValidationError

from serving.clock import SystemClock
from serving.core.errors import ServingError
from serving.core.state import ReplicaSnapshot, ReplicaState
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from workbench.config import ModelConfig, PoolConfig
from workbench.hardware import fingerprint
from workbench.loadgen import Slo, Vocabulary, run_load
from workbench.measurement.measure import CellMeter, ReplicaBusy, ReplicaLost
from workbench.stack.replicas import Engine, prepare
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, MeasuredReplica, Shape
from workbench.sweeps.run import client_on_other_cores
from workbench.tuning.halving import Flags, Trial, Try, Tuned, TuningPlan, flags_from_json, next_step
from workbench.wiring import Layout

TUNING_FILE = "tuning.json"
GOODPUT = "goodput_rps"


class Bench(Protocol):
    """Measures one configuration; a fake in tests."""

    async def __call__(self, wanted: Try) -> Trial:
        """The trial, with its failure when there is no figure."""
        ...


@dataclass(frozen=True, slots=True)
class TuningLoad:
    """The load by which configurations are judged."""

    shape: Shape
    concurrency: int
    slo: Slo
    max_cell_s: float = 600.0


async def tune(plan: TuningPlan, bench: Bench, folder: Path, on_trial: Callable[[Trial], None]) -> Tuned:
    """Measures until the tuning ends; trials in `folder` are not measured again.

    Raises:
        ValueError: what lies in `folder` is of another plan.
        OSError: a trial cannot be written.
    """
    trials = kept_trials(folder, plan)
    while isinstance(step := next_step(plan, trials), Try):
        trial = await bench(step)
        trials.append(trial)
        _write(folder / TUNING_FILE, plan, trials)
        on_trial(trial)
    return step


@dataclass(frozen=True, slots=True)
class EngineBench:
    """Starts an engine a configuration and measures one mixed cell on it.

    Attributes:
        pool: whose settings are varied: one replica, under an id of its own.
        model: its weights.
        where: folders.
        load: what is measured.
        on_change: told what engines do.
    """

    pool: PoolConfig
    model: ModelConfig
    where: Layout
    load: TuningLoad
    on_change: Callable[[str, str], None] = lambda part, what: None

    async def __call__(self, wanted: Try) -> Trial:
        """The trial; an engine that does not start or cannot be measured is a failure, not the end."""
        try:
            async with self.engine(wanted.flags) as (replica, vocabulary):
                cell = await self._cell(replica, vocabulary, wanted.num_requests)
        except (ServingError, ValidationError, ReplicaBusy, ReplicaLost, ValueError) as error:
            return Trial(wanted.flags, wanted.rung, None, failure=str(error))
        return trial_of(wanted, cell)

    @asynccontextmanager
    async def engine(self, flags: Flags) -> AsyncIterator[tuple[MeasuredReplica, Vocabulary]]:
        """An engine of the pool with these flags over its own, ended when the context closes.

        Raises:
            ServingError, ValidationError: it does not start, or there is no such flag.
            ValueError: its tokenizer or its address is not known.
        """
        settings = self.pool.model_dump(exclude={"id", "replicas", "cores", "engine"}) | {
            "id": f"tune-{self.pool.pool_id}",
            "replicas": 1,
            "cores": None if self.pool.cores is None else self.pool.cores[:1],
            "engine": {**self.pool.engine, **dict(flags)},
        }
        pool = PoolConfig.model_validate(settings)
        engine = await prepare(pool, self.model, self.where, self.on_change)
        if engine.weights_path is None:
            raise ValueError(f"no tokenizer of {self.model.source} lies here: prompts of exact length need one")
        try:
            await engine.replicas.start()
            yield self._described(pool, engine), Vocabulary.load(engine.weights_path)
        finally:
            await engine.replicas.stop(0.0)

    def _described(self, pool: PoolConfig, engine: Engine) -> MeasuredReplica:
        status = next(s for s in engine.replicas.statuses() if s.state is ReplicaState.READY)
        if status.url is None:
            raise ValueError(f"replica {status.replica_id} is ready and has no address")
        hardware = fingerprint(pool.hardware, pool.num_units)
        return MeasuredReplica(
            replica_id=status.replica_id,
            url=status.url,
            request_model=pool.model,
            model=pool.model,
            version="tuning",
            task=self.model.task,
            hardware_class=pool.hardware,
            num_units=pool.num_units,
            engine_fingerprint=engine.fingerprint,
            hardware_fingerprint=hardware.digest,
            engine_covers=engine.covers,
            hardware_covers=hardware.covers(),
            cores=None if pool.cores is None else pool.cores[0],
        )

    async def _cell(self, replica: MeasuredReplica, vocabulary: Vocabulary, num_requests: int) -> CellResult:
        load, clock = self.load, SystemClock()
        count = max(num_requests, 3 * load.concurrency)
        spec = CellSpec(CellKind.MIXED, load.shape, load.concurrency, count, load.max_cell_s)
        async with EngineClient(replica.url) as client:

            async def probe() -> ReplicaSnapshot:
                return await scrape(client, replica.replica_id, clock)

            meter = CellMeter("tuning", replica, load.slo, vocabulary, run_load, probe, clock)
            with client_on_other_cores(replica.cores):
                await meter.warm_up(load.concurrency, load.shape.num_prompt_tokens)
                cell, _ = await meter.measure(spec)
        return cell


def trial_of(wanted: Try, cell: CellResult) -> Trial:
    """The trial that a cell is."""
    goodput = cell.metrics.get(GOODPUT)
    if cell.invalid is not None or goodput is None:
        return Trial(wanted.flags, wanted.rung, None, failure=cell.invalid or "the cell has no goodput")
    low, high = cell.intervals.get(GOODPUT, (None, None))
    return Trial(wanted.flags, wanted.rung, goodput, low, high)


def kept_trials(folder: Path, plan: TuningPlan) -> list[Trial]:
    """The trials so far. Raises ValueError where they are of another plan."""
    path = folder / TUNING_FILE
    if not path.exists():
        return []
    data = json.loads(path.read_text("utf-8"))
    if data["plan"] != _plain(plan):
        raise ValueError(f"{path} is of another tuning: give another folder, or remove it to begin anew")
    return [Trial(**{**trial, "flags": flags_from_json(trial["flags"])}) for trial in data["trials"]]


def _write(path: Path, plan: TuningPlan, trials: Sequence[Trial]) -> None:
    data = {"plan": _plain(plan), "trials": [asdict(trial) | {"flags": dict(trial.flags)} for trial in trials]}
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(data, indent=1, allow_nan=False), "utf-8")
    partial.replace(path)


def _plain(plan: TuningPlan) -> dict[str, object]:
    return asdict(plan) | {"configurations": [dict(flags) for flags in plan.configurations]}
