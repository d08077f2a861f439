"""Sweeps of a fake engine: no MLflow here, so that everything stays on disk."""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.state import Task
from serving.engine.client import EngineClient
from serving.engine.fake import FakeEngine
from tests.measured import FAST, PLAN, make_replica, make_vocabulary
from workbench.costs.table import MeasuredCell, build
from workbench.loadgen import Vocabulary, read_parquet
from workbench.sweeps.cells import CellKind, MeasuredReplica, Shape
from workbench.sweeps.results import ResultsFolder
from workbench.sweeps.run import (
    ProgressKind,
    ReplicaBusy,
    ReplicaLost,
    SweepPlan,
    SweepProgress,
    client_on_other_cores,
    run_sweep,
)


class Price:
    usd_per_hour = 0.04
    source = "test"
    date = "2026-11-01"


@pytest.fixture
def vocabulary(tmp_path: Path) -> Vocabulary:
    return make_vocabulary(tmp_path / "weights")


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FAST) as running:
        yield running


async def test_a_sweep_measures_every_cell_and_prices_the_mixed_ones(
    engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    seen: list[SweepProgress] = []
    result = await run_sweep(
        PLAN, make_replica(engine.url), vocabulary=vocabulary, results_dir=tmp_path, on_progress=seen.append
    )
    assert [cell.invalid for cell in result.cells] == [None] * 4
    assert [cell.spec.kind for cell in result.cells] == ["prefill", "cached", "mixed", "mixed"]
    prefill, cached, one, four = result.cells
    assert cached.prefix_cache_hit_frac > 0.9
    assert cached.num_cached_tokens > 0.9 * cached.num_prompt_tokens
    assert max(cell.prefix_cache_hit_frac for cell in (prefill, one, four)) == 0.0
    # 4 streams at 2 ms a step decode 2,000 tokens a second; the fake engine's steps don't slow down.
    assert four.decode_tokens_per_s == pytest.approx(2000, rel=0.15)
    assert one.decode_tokens_per_s == pytest.approx(500, rel=0.15)
    assert len(read_parquet(result.folder / str(four.records_file))) == four.num_requests == 20
    table = build([MeasuredCell(cell, "run") for cell in result.cells], {"cpu": Price()})
    assert [row.concurrency for row in table.rows] == [1, 4]
    assert table.rows[1].usd_per_million_output_tokens < table.rows[0].usd_per_million_output_tokens
    assert [step.cell_number for step in seen if step.kind is ProgressKind.CELL_DONE] == [1, 2, 3, 4]


async def test_finished_cells_are_not_measured_again(
    engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    first = await run_sweep(PLAN, make_replica(engine.url), vocabulary=vocabulary, results_dir=tmp_path)
    num_asked = len(engine.log.ended)
    again = await run_sweep(PLAN, make_replica(engine.url), vocabulary=vocabulary, results_dir=tmp_path)
    assert again.cells == first.cells
    assert len(engine.log.ended) == num_asked
    fresh = await run_sweep(PLAN, make_replica(engine.url), vocabulary=vocabulary, results_dir=tmp_path, max_age_s=0)
    assert {cell.measurement_id for cell in fresh.cells}.isdisjoint(cell.measurement_id for cell in first.cells)
    assert len(ResultsFolder(tmp_path, first.sweep_digest).cells()) == 8


async def test_a_sweep_that_lost_its_replica_goes_on_where_it_stopped(vocabulary: Vocabulary, tmp_path: Path) -> None:
    async with FakeEngine(FAST) as dying:
        replica = make_replica(dying.url)

        def kill_after_two(progress: SweepProgress) -> None:
            if progress.kind is ProgressKind.CELL_STARTED and progress.cell_number == 3:
                killers.append(asyncio.ensure_future(dying.stop()))

        killers: list[asyncio.Future[None]] = []
        with pytest.raises(ReplicaLost, match="finished cells are kept"):
            await run_sweep(PLAN, replica, vocabulary=vocabulary, results_dir=tmp_path, on_progress=kill_after_two)
        await asyncio.gather(*killers)
    async with FakeEngine(FAST) as engine:
        kept: list[SweepProgress] = []
        result = await run_sweep(
            PLAN,
            replace(replica, url=engine.url),
            vocabulary=vocabulary,
            results_dir=tmp_path,
            on_progress=lambda step: kept.append(step) if step.kind is ProgressKind.CELL_KEPT else None,
        )
    assert [step.cell_number for step in kept] == [1, 2]
    assert [cell.invalid for cell in result.cells] == [None] * 4


async def test_company_makes_a_cell_invalid_and_it_is_measured_again(
    engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    plan = replace(PLAN, concurrencies=(4,))
    replica = make_replica(engine.url)
    strays: list[asyncio.Task[object]] = []

    async def stray() -> object:
        async with EngineClient(engine.url) as client:
            body = {"model": "fake-model", "prompt": list(range(64)), "max_tokens": 8}
            return await client.post_json("/v1/completions", body)

    def disturb(progress: SweepProgress) -> None:
        is_mixed = progress.cell_id is not None and progress.cell_id.startswith("mixed")
        if is_mixed and progress.kind is ProgressKind.REQUESTS and not strays:
            strays.append(asyncio.create_task(stray()))

    result = await run_sweep(plan, replica, vocabulary=vocabulary, results_dir=tmp_path, on_progress=disturb)
    await asyncio.gather(*strays)
    assert "somebody else used the replica" in str(result.cells[-1].invalid)
    again = await run_sweep(plan, replica, vocabulary=vocabulary, results_dir=tmp_path)
    assert again.cells[-1].invalid is None
    assert again.cells[:-1] == result.cells[:-1]


async def test_a_busy_replica_is_not_measured(
    engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("workbench.measurement.measure.IDLE_TIMEOUT_S", 0.3)
    async with long_request(engine):
        with pytest.raises(ReplicaBusy, match="still has 1 running"):
            await run_sweep(PLAN, make_replica(engine.url), vocabulary=vocabulary, results_dir=tmp_path)


@asynccontextmanager
async def long_request(engine: FakeEngine) -> AsyncIterator[None]:
    async with EngineClient(engine.url) as client:
        body = b'{"model": "fake-model", "prompt": [1, 2, 3], "max_tokens": 4000, "stream": true}'
        response = await client.request("POST", "/v1/completions", body=body)
        yield
        response.abort()


async def test_a_gateway_cell_is_compared_with_the_same_replica(
    engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path
) -> None:
    # The engine stands for its own gateway under the name and version that a gateway knows.
    plan = replace(PLAN, concurrencies=(4,))
    async with FakeEngine(FAST.model_copy(update={"model": "fake-model@1"})) as elsewhere:
        replica = make_replica(engine.url, gateway_url=elsewhere.url)
        result = await run_sweep(plan, replica, vocabulary=vocabulary, results_dir=tmp_path)
    assert result.cells[-1].spec.kind is CellKind.GATEWAY
    assert "another replica served too" in str(result.cells[-1].invalid)


async def test_embeddings_are_swept(engine: FakeEngine, vocabulary: Vocabulary, tmp_path: Path) -> None:
    plan = SweepPlan(PLAN.mode, Task.EMBED, (Shape(32, 0),), (1, 4), PLAN.slo, num_waves=5, min_requests=20)
    replica: MeasuredReplica = replace(make_replica(engine.url), task=Task.EMBED)
    result = await run_sweep(plan, replica, vocabulary=vocabulary, results_dir=tmp_path)
    assert [cell.invalid for cell in result.cells] == [None, None]
    table = build([MeasuredCell(cell, "run") for cell in result.cells], {"cpu": Price()})
    assert [row.usd_per_million_output_tokens for row in table.rows] == [0.0, 0.0]


def test_the_client_leaves_the_replicas_core() -> None:
    before = os.sched_getaffinity(0)
    if len(before) < 2:
        pytest.skip("needs two cores")
    core = min(before)
    with client_on_other_cores((core,)):
        assert os.sched_getaffinity(0) == before - {core}
    assert os.sched_getaffinity(0) == before
    with client_on_other_cores(tuple(before)):
        assert os.sched_getaffinity(0) == before
