"""Sweeps that end before their plan does: saturated, or over their budget."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.engine.fake import FakeEngine
from tests.measured import FAST, PLAN, make_replica, make_vocabulary
from workbench.loadgen import Slo
from workbench.sweeps.results import ResultsFolder
from workbench.sweeps.run import ProgressKind, SweepLimits, SweepProgress, run_sweep


async def test_a_saturated_engine_is_not_loaded_further_and_the_sweep_is_whole(tmp_path: Path) -> None:
    # Two places: with four users each waits for its turn, and more users only wait longer.
    settings = FAST.model_copy(update={"max_num_seqs": 2})
    plan = replace(
        PLAN, concurrencies=(2, 8, 16, 32), slo=Slo(0.015, 0.1), min_requests=64, prefill_requests=12, num_waves=5
    )
    said: list[SweepProgress] = []
    async with FakeEngine(settings) as engine:
        result = await run_sweep(
            plan,
            make_replica(engine.url),
            vocabulary=make_vocabulary(tmp_path / "weights"),
            results_dir=tmp_path,
            limits=SweepLimits(),
            on_progress=said.append,
        )
    assert [cell.spec.concurrency for cell in result.skipped] == [16, 32]
    assert all(cell.is_final and "saturated" in cell.reason for cell in result.skipped)
    assert sum(step.kind is ProgressKind.CELL_SKIPPED for step in said) == 2
    assert ResultsFolder(tmp_path, result.sweep_digest).is_complete()


async def test_a_sweep_over_its_budget_goes_on_in_the_next_run(tmp_path: Path) -> None:
    vocabulary = make_vocabulary(tmp_path / "weights")
    async with FakeEngine(FAST) as engine:
        replica = make_replica(engine.url)
        first = await run_sweep(
            PLAN, replica, vocabulary=vocabulary, results_dir=tmp_path, limits=SweepLimits(max_s=7.0)
        )
        assert 0 < len(first.cells) < 4
        assert all(not cell.is_final for cell in first.skipped)
        assert len(first.cells) + len(first.skipped) == 4
        assert not ResultsFolder(tmp_path, first.sweep_digest).is_complete()
        nothing = await run_sweep(
            PLAN, replica, vocabulary=vocabulary, results_dir=tmp_path, limits=SweepLimits(max_s=1.0)
        )
        assert nothing.cells == first.cells
        rest = await run_sweep(PLAN, replica, vocabulary=vocabulary, results_dir=tmp_path, limits=SweepLimits())
    assert len(rest.cells) == 4
    assert rest.cells[: len(first.cells)] == first.cells
    assert ResultsFolder(tmp_path, rest.sweep_digest).is_complete()


@pytest.mark.parametrize("limits", [None, SweepLimits()])
async def test_without_bounds_every_cell_is_measured(tmp_path: Path, limits: SweepLimits | None) -> None:
    plan = replace(PLAN, concurrencies=(1,), prefill_requests=12)
    async with FakeEngine(FAST) as engine:
        result = await run_sweep(
            plan,
            make_replica(engine.url),
            vocabulary=make_vocabulary(tmp_path / "weights"),
            results_dir=tmp_path,
            limits=limits,
        )
    assert (len(result.cells), result.skipped) == (3, ())
