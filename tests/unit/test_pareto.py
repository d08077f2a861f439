from __future__ import annotations

import pytest

from tests.cells import make_cell
from workbench.costs.table import MeasuredCell, build
from workbench.sweeps.cells import CellKind
from workbench.sweeps.pareto import Figure, Goal, Placed, Point, Standing, cost_points, pareto_front, speed_points
from workbench.sweeps.phase_curves import line, phase_curves


def point(name: str, x: float, y: float, half: float | None = 0.1) -> Point:
    ends = (lambda v: (None, None)) if half is None else (lambda v: (v - half, v + half))
    return Point(name, Figure(x, *ends(x)), Figure(y, *ends(y)))


def standings(placed: tuple[Placed, ...]) -> dict[str, Standing]:
    return {one.point.name: one.standing for one in placed}


def test_a_point_is_dominated_only_where_the_intervals_say_so() -> None:
    points = [point("best", 10, 10), point("fast", 12, 8), point("worse", 9, 9), point("close", 9.9, 9.9)]
    placed = pareto_front(points, Goal.MORE, Goal.MORE)
    assert standings(placed) == {
        "best": Standing.FRONT, "fast": Standing.FRONT, "worse": Standing.DOMINATED, "close": Standing.MAYBE,
    }  # fmt: skip
    assert placed[2].by == ("best", "close") or placed[2].by == ("best",)
    assert placed[3].by == ("best",)


def test_ties_stay_and_a_tie_in_one_figure_is_decided_by_the_other() -> None:
    tied = pareto_front([point("a", 1, 1), point("b", 1, 1)], Goal.LESS, Goal.LESS)
    assert set(standings(tied).values()) == {Standing.FRONT}
    half = pareto_front([point("a", 1, 1), point("b", 1, 2)], Goal.LESS, Goal.LESS)
    assert standings(half) == {"a": Standing.FRONT, "b": Standing.DOMINATED}


def test_without_intervals_nothing_is_sure() -> None:
    placed = pareto_front([point("a", 1, 1, None), point("b", 5, 5, None)], Goal.LESS, Goal.LESS)
    assert standings(placed)["b"] is Standing.MAYBE
    with pytest.raises(ValueError, match="between the ends"):
        Figure(1.0, 2.0, 3.0)
    with pytest.raises(ValueError, match="between the ends"):
        Figure(float("nan"))


def cells() -> list:  # type: ignore[type-arg]
    mixed = [
        make_cell(
            concurrency=n,
            decode_tokens_per_s=rate,
            metrics=make_cell().metrics | {"output_tokens_per_s_per_gpu": rate},
            intervals={"output_tokens_per_s_per_gpu": (rate - 1, rate + 1), "ttft_s/p99": (0.3, 0.32)},
        )
        for n, rate in ((1, 30.0), (4, 100.0), (8, 160.0))
    ]
    return [make_cell(CellKind.PREFILL), make_cell(CellKind.CACHED), *mixed]


def test_cells_and_cost_rows_become_points() -> None:
    speed = speed_points([*cells(), make_cell(concurrency=2, invalid="warm")])
    assert [round(one.y.value) for one in speed] == [30, 25, 20]
    assert set(standings(pareto_front(speed, Goal.MORE, Goal.MORE)).values()) == {Standing.FRONT}

    class Price:
        usd_per_hour, source, date = 0.04, "test", "2026-11-01"

    rows = build([MeasuredCell(cell, "run") for cell in cells()], {"cpu": Price()}).rows
    cost = cost_points(rows, cells())
    assert len(cost) == 3 and cost[0].y.high == 0.32
    assert standings(pareto_front(cost, Goal.LESS, Goal.LESS))[cost[2].name] is Standing.FRONT


def test_curves_of_prefill_and_decode() -> None:
    curves = phase_curves(cells())
    assert [one.is_cached for one in curves.prefill] == [False, True]
    assert [one.concurrency for one in curves.decode] == [1, 4, 8]
    assert curves.prefill_line is None
    assert curves.decode_line is not None and curves.decode_line.s_per_unit > 0
    with pytest.raises(ValueError, match="several engines"):
        phase_curves([*cells(), make_cell(engine_fingerprint="other")])


def test_a_line_has_intervals_and_needs_three_points() -> None:
    fit = line([(1, 3.0), (2, 5.0), (4, 9.1), (8, 17.0)])
    assert fit is not None
    assert fit.slope_interval[0] < 2.0 < fit.slope_interval[1]
    assert line([(1, 1.0), (2, 2.0)]) is None
    assert line([(1, 1.0), (1, 2.0), (1, 3.0)]) is None
