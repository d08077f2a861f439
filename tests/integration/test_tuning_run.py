"""A tuning of fake engines: each configuration starts an engine of its own, and a stopped tuning goes on."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from tests.measured import make_vocabulary
from workbench.config import Launcher, ModelConfig, PoolConfig
from workbench.loadgen import Slo
from workbench.sweeps.cells import Shape
from workbench.tuning.halving import Trial, TuningPlan, grid
from workbench.tuning.run import EngineBench, TuningLoad, tune
from workbench.wiring import Layout


async def test_the_best_engine_is_found_and_trials_are_kept(tmp_path: Path) -> None:
    make_vocabulary(tmp_path / "weights")
    pool = PoolConfig(
        model="fake-model", hardware="cpu", id="p", launcher=Launcher.FAKE, engine={"ttft_ms": 2, "itl_ms": 2}
    )
    load = TuningLoad(Shape(24, 8), 4, Slo(1.0, 0.1))
    bench = EngineBench(pool, ModelConfig(source=str(tmp_path / "weights")), Layout(tmp_path / "data"), load)
    # One at a time is slower; a block of no tokens does not start.
    configurations = grid({"max_num_seqs": [1, 8], "block_size": [16, 0]}, {"max_num_seqs": 1, "block_size": 16})
    plan = TuningPlan(configurations, min_requests=40, eta=2, num_rungs=2)
    trials: list[Trial] = []

    def stop_after_two(trial: Trial) -> None:
        trials.append(trial)
        if len(trials) == 2:
            raise asyncio.CancelledError

    folder = tmp_path / "tuning"
    with pytest.raises(asyncio.CancelledError):
        await tune(plan, bench, folder, stop_after_two)
    found = await tune(plan, bench, folder, trials.append)
    assert found.best is not None and dict(found.best.flags) == {"max_num_seqs": 8, "block_size": 16}
    assert len(trials) == 6
    assert sum("block_size" in str(trial.failure) for trial in trials) == 2
    with pytest.raises(ValueError, match="another tuning"):
        await tune(TuningPlan(configurations, min_requests=50), bench, folder, trials.append)
