from __future__ import annotations

import json
import math

import pytest

from tests.cells import make_cell
from workbench.sweeps.cells import CellKind, CellResult, TargetKind


@pytest.mark.parametrize("kind", list(CellKind))
def test_a_cell_round_trips_json(kind: CellKind) -> None:
    cell = make_cell(kind, weak=("ttft_s/p99",), invalid="why")
    assert CellResult.from_json(json.loads(json.dumps(cell.to_json()))) == cell


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_figure_that_is_no_number_is_never_stored(bad: float) -> None:
    with pytest.raises(ValueError, match="ttft_s/p50"):
        make_cell(metrics={"ttft_s/p50": bad}).to_json()


def test_another_schema_or_a_missing_field_is_refused() -> None:
    data = make_cell().to_json()
    with pytest.raises(ValueError, match="schema 99"):
        CellResult.from_json(data | {"schema": 99})
    with pytest.raises(ValueError, match="window_s"):
        CellResult.from_json({name: value for name, value in data.items() if name != "window_s"})


def test_only_a_gateway_cell_goes_through_the_gateway() -> None:
    through = [kind for kind in CellKind if make_cell(kind).spec.target is TargetKind.GATEWAY]
    assert through == [CellKind.GATEWAY]


def test_measuring_again_gives_another_id() -> None:
    assert make_cell().measurement_id != make_cell(started_at_s=1.0).measurement_id
