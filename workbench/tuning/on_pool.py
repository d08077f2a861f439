"""Tuning the engine of a pool of workbench.yaml: what is in use now, what is tried, and whether there is room for it.

An engine under test shares neither cores nor device with one that serves: a pool of the running stack that is in its
way has to be stopped before.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serving.engine.fake import FakeSettings
from workbench.config import Launcher, PoolConfig, WorkbenchConfig
from workbench.loadgen import Slo
from workbench.stack.replicas import engine_flags
from workbench.stack.state import StackState
from workbench.sweeps.cells import Shape
from workbench.tuning.halving import Trial, Tuned, TuningPlan, Value, grid
from workbench.tuning.run import EngineBench, TuningLoad, tune
from workbench.wiring import layout, running_stack

USUAL_SHAPE = Shape(64, 32)


class CannotTune(Exception):
    """There is no such pool, it is not ours to start, or its cores are taken; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Tuning:
    """What is tried on which pool's engine, and the folder that its trials are kept in."""

    pool: PoolConfig
    plan: TuningPlan
    load: TuningLoad
    folder: Path


def tuning_of(
    config: WorkbenchConfig,
    model: str,
    vary: Mapping[str, Sequence[Value]],
    *,
    pool_id: str | None = None,
    shape: Shape = USUAL_SHAPE,
    concurrency: int = 8,
    num_requests: int = 100,
    eta: int = 3,
    num_rungs: int = 3,
) -> Tuning:
    """Every combination of `vary`, the one in use first.

    Args:
        config: models, pools and SLOs.
        model: a model of the configuration.
        vary: values by the engine's field.
        pool_id: the pool to start from; the model's first when None.
        shape: of each request.
        concurrency: requests in flight.
        num_requests: of a cell of the first rung.
        eta: each rung keeps one in so many, with so many times the requests.
        num_rungs: at most.

    Raises:
        CannotTune: no such pool, or it is attached.
        ValueError: what cannot be varied, or fewer than two configurations.
    """
    pool = pool_of(config, model, pool_id)
    plan = TuningPlan(grid(vary, flags_in_use(config, pool)), num_requests, eta, num_rungs)
    slo = config.slo.of(pool.hardware)
    load = TuningLoad(shape, concurrency, Slo(slo.ttft_p99_s, slo.tpot_p99_s))
    return Tuning(pool, plan, load, layout(config).results_dir / f"tune-{_digest(pool, plan, load)}")


async def run_tuning(
    config: WorkbenchConfig,
    tuning: Tuning,
    *,
    on_change: Callable[[str, str], None] = lambda part, what: None,
    on_trial: Callable[[Trial], None] = lambda trial: None,
) -> Tuned:
    """Tries them, each on an engine of its own; trials that are on disk are not measured again.

    Raises:
        CannotTune: a pool of the running stack is in its way.
        ValueError, OSError: as `workbench.tuning.run.tune`.
    """
    if (trouble := company(tuning.pool, running_stack(config))) is not None:
        raise CannotTune(trouble)
    model = config.models[tuning.pool.model]
    bench = EngineBench(tuning.pool, model, layout(config), tuning.load, on_change)
    return await tune(tuning.plan, bench, tuning.folder, on_trial)


def pool_of(config: WorkbenchConfig, model: str, pool_id: str | None) -> PoolConfig:
    """The pool to start from. Raises CannotTune."""
    pools = [pool for pool in config.pools if pool.model == model and pool_id in (None, pool.pool_id)]
    if not pools:
        raise CannotTune(f"no pool {pool_id or ''} of model {model!r} in workbench.yaml")
    if pools[0].launcher is Launcher.ATTACH:
        raise CannotTune(f"pool {pools[0].pool_id} is attached: its engine is not ours to start")
    return pools[0]


def company(pool: PoolConfig, state: StackState | None) -> str | None:
    """Which pool of the running stack would share cores or device with engines of `pool`, and what to do."""
    wanted = set(pool.cores[0]) if pool.cores else set()
    for pool_id, facts in ({} if state is None else state.pools).items():
        taken = {core for cores in facts.cores.values() for core in cores}
        if pool_id == pool.pool_id or wanted & taken:
            return (
                f"pool {pool_id} runs where the engines of {pool.pool_id} would be tried: end it first with "
                f"`workbench pool stop {pool_id}`"
            )
    return None


def flags_in_use(config: WorkbenchConfig, pool: PoolConfig) -> dict[str, Any]:
    """The flags that the pool runs with."""
    if pool.launcher is Launcher.FAKE:
        return dict(FakeSettings(model=pool.model, **pool.engine).model_dump(mode="json"))
    return dict(engine_flags(pool, config.models[pool.model]).model_dump(mode="json"))


def _digest(pool: PoolConfig, plan: TuningPlan, load: TuningLoad) -> str:
    return hashlib.sha256(f"{pool.model_dump_json()}{plan}{load}".encode()).hexdigest()[:16]
