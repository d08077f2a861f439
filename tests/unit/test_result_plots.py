"""Figures of sweeps: what is worth choosing, the two phases apart, latencies by cell, prices as colours."""

from __future__ import annotations

import math

import pandas as pd
import pytest

from serving.core.state import Task
from tests.cells import make_cell
from workbench import plots, run_plots
from workbench.costs.table import MeasuredCell, build
from workbench.loadgen import RequestRecord
from workbench.sweeps.cells import CellKind
from workbench.sweeps.pareto import Figure, Goal, Placed, Point, Standing, pareto_front
from workbench.sweeps.phase_curves import phase_curves


class Price:
    usd_per_hour = 0.04
    source = "test"
    date = "2026-11-01"


def served(index: int, ttft_s: float) -> RequestRecord:
    first_s = 1.0 + ttft_s
    return RequestRecord(
        f"r-{index}", index, Task.GENERATE, 8, 2, 1.0, 1.0, chunk_at_s=(first_s, first_s + 0.1), chunk_tokens=(1, 1),
        num_output_tokens=2,
    )  # fmt: skip


def placed() -> tuple[Placed, ...]:
    best, other = Point("best", Figure(4, 3, 6), Figure(9, 8, 10)), Point("slow", Figure(1, 1, 1), Figure(2, 2, 2))
    return pareto_front([best, other, Point("alone", Figure(5), Figure(1))], Goal.MORE, Goal.MORE)


def test_the_front_is_drawn_apart_from_what_it_beats_with_both_intervals() -> None:
    figure = run_plots.pareto(placed(), x_title="x (1/s)", y_title="y (1/s)")
    by_name = {trace.name: trace for trace in figure.data if trace.name}
    assert set(by_name) == {"on the front", "something is better"}
    front, beaten = by_name["on the front"], by_name["something is better"]
    assert list(front.x) == [4, 5] and list(front.y) == [9, 1]
    assert list(front.error_x.array) == [2, 0] and list(front.error_x.arrayminus) == [1, 0]
    assert beaten.text == ("slow<br>better: best",)
    joined = figure.data[0]
    assert list(joined.x) == sorted(joined.x) == [4, 5]
    assert figure.layout.xaxis.title.text == "x (1/s)"


def test_a_point_that_only_values_beat_stands_between() -> None:
    near = Point("near", Figure(3.9, 3, 5), Figure(8.9, 8, 10))
    top = Point("top", Figure(4, 3, 6), Figure(9, 8, 10))
    found = pareto_front([top, near], Goal.MORE, Goal.MORE)
    assert found[1].standing is Standing.MAYBE
    names = [trace.name for trace in run_plots.pareto(found, x_title="", y_title="").data]
    assert "perhaps on it: intervals overlap" in names


def test_prefill_and_decode_are_drawn_apart_each_with_its_line() -> None:
    lengths = (64, 128, 256)
    cells = [
        make_cell(CellKind.PREFILL, prompt=length, window_s=length / 10, num_requests=30) for length in lengths
    ] + [make_cell(concurrency=count, decode_tokens_per_s=100.0 * count / (1 + count)) for count in (1, 2, 4)]
    figure = run_plots.phases(phase_curves([*cells, make_cell(CellKind.CACHED)]))
    points = {trace.name: trace for trace in figure.data if trace.mode == "markers"}
    assert list(points["prefill"].x) == list(lengths)
    assert list(points["prefill"].y) == pytest.approx([length / 300 for length in lengths])
    assert list(points["decode after 64 tokens"].y) == pytest.approx([0.02, 0.03, 0.05])
    assert "prefill, from the prefix cache" in points
    assert [trace.yaxis for trace in figure.data if trace.mode == "lines"] == ["y", "y2"]


def test_each_cell_has_its_share_of_requests_and_failed_ones_have_none() -> None:
    lost = RequestRecord("lost", 9, Task.GENERATE, 8, 2, 0.0, 0.0)
    figure = run_plots.shares_by_cell({"c1": [served(0, 0.2), served(1, 0.1)], "c4": [served(0, 0.4)], "none": [lost]})
    assert [trace.name for trace in figure.data] == ["c1", "c4"]
    assert list(figure.data[0].x) == pytest.approx([0.1, 0.2]) and list(figure.data[0].y) == [0.5, 1.0]


def test_prices_are_a_grid_of_shapes_and_concurrencies_with_gaps_left_empty() -> None:
    cells = [
        make_cell(CellKind.PREFILL), make_cell(CellKind.PREFILL, prompt=256), make_cell(concurrency=1),
        make_cell(concurrency=8), make_cell(prompt=256, concurrency=8),
    ]  # fmt: skip
    rows = build([MeasuredCell(cell, "run") for cell in cells], {"cpu": Price()}).to_frame()
    [heat] = plots.cost_heatmap(rows).data
    assert list(heat.x) == ["1", "8"]
    shown = {name: list(line) for name, line in zip(heat.y, heat.text, strict=True)}
    gaps = {name: [text == "" for text in line] for name, line in shown.items()}
    assert gaps == {"smollm2-135m<br>cpu, 64 in / 32 out": [False, False],
                    "smollm2-135m<br>cpu, 256 in / 32 out": [True, False]}  # fmt: skip
    prices = sorted(10**z for line in heat.z for z in line if not math.isnan(z))
    assert prices == pytest.approx(sorted(rows["usd_per_million_output_tokens"]))


def test_figures_without_data_say_what_is_missing() -> None:
    with pytest.raises(plots.NothingToPlot, match="nothing to choose"):
        run_plots.pareto((), x_title="", y_title="")
    with pytest.raises(plots.NothingToPlot, match="prefill or decode"):
        run_plots.phases(phase_curves([]))
    with pytest.raises(plots.NothingToPlot, match="ttft_s"):
        run_plots.shares_by_cell({"a": []})
    with pytest.raises(plots.NothingToPlot, match="no output price in its 0 rows"):
        plots.cost_heatmap(pd.DataFrame())
