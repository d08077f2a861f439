from __future__ import annotations

import json
from dataclasses import replace

import pytest

from serving.core.state import Task
from workbench.loadgen import Slo
from workbench.sweeps.cells import CellKind, MeasuredReplica, Shape
from workbench.sweeps.plan import SweepMode, SweepPlan, cached_length, full_plan, short_plan, sweep_digest

SLO = Slo(5.0, 0.15)
REPLICA = MeasuredReplica("r-0", "http://127.0.0.1:1", "m", "m", "1", Task.GENERATE, "cpu", 1, "engine", "hardware")


@pytest.mark.parametrize("plan", [short_plan(Task.GENERATE, SLO), full_plan(Task.GENERATE, SLO)])
def test_every_shape_has_what_prices_it(plan: SweepPlan) -> None:
    cells = plan.cells(with_gateway=True)
    lengths = {shape.num_prompt_tokens for shape in plan.shapes}
    assert {cell.shape.num_prompt_tokens for cell in cells if cell.kind is CellKind.PREFILL} == lengths
    assert {cell.shape.num_prompt_tokens for cell in cells if cell.kind is CellKind.CACHED} == {
        cached_length(length) for length in lengths
    }
    mixed = [(cell.shape, cell.concurrency) for cell in cells if cell.kind is CellKind.MIXED]
    assert mixed == [(shape, concurrency) for shape in plan.shapes for concurrency in plan.concurrencies]
    assert [cell.kind for cell in cells].index(CellKind.GATEWAY) == len(cells) - 1
    assert len({cell.cell_id for cell in cells}) == len(cells)
    json.dumps(plan.to_json())


def test_every_cell_has_a_wave_to_warm_up_and_one_to_drain() -> None:
    for plan in (short_plan(Task.GENERATE, SLO), short_plan(Task.EMBED, SLO), full_plan(Task.EMBED, SLO)):
        assert all(cell.num_requests >= 3 * cell.concurrency for cell in plan.cells(with_gateway=True))


def test_without_a_gateway_there_is_no_gateway_cell() -> None:
    kinds = [cell.kind for cell in short_plan(Task.GENERATE, SLO).cells(with_gateway=False)]
    assert CellKind.GATEWAY not in kinds


def test_embeddings_have_cells_of_their_own() -> None:
    cells = short_plan(Task.EMBED, SLO).cells(with_gateway=True)
    assert {cell.kind for cell in cells} == {CellKind.EMBED}
    assert {cell.shape.num_output_tokens for cell in cells} == {0}


@pytest.mark.parametrize(("length", "cached"), [(1, 33), (32, 33), (64, 65), (65, 97), (512, 513)])
def test_a_cached_prompt_is_whole_blocks_and_a_token(length: int, cached: int) -> None:
    assert cached_length(length) == cached


def test_a_plan_that_measures_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one"):
        SweepPlan(SweepMode.SHORT, Task.GENERATE, (), (1,), SLO)
    with pytest.raises(ValueError, match="num_waves"):
        SweepPlan(SweepMode.SHORT, Task.GENERATE, (Shape(1, 1),), (1,), SLO, num_waves=2)


def test_the_digest_names_what_is_measured_and_not_where() -> None:
    plan = short_plan(Task.GENERATE, SLO)
    digest = sweep_digest(plan, REPLICA)
    assert digest == sweep_digest(plan, replace(REPLICA, replica_id="r-1", url="http://127.0.0.1:2"))
    assert digest != sweep_digest(replace(plan, concurrencies=(1, 2)), REPLICA)
    assert digest != sweep_digest(plan, replace(REPLICA, engine_fingerprint="other"))
    assert digest != sweep_digest(plan, replace(REPLICA, version="2"))
