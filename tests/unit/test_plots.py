"""The figures say what the frame says: values, intervals, units, and nothing where there is nothing."""

from __future__ import annotations

from typing import Any

import pandas as pd
import pytest

from serving.core.state import Task
from tests.cells import make_cell
from workbench import plots
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape
from workbench.sweeps.frames import cells_frame


def cell(concurrency: int = 1, *, kind: CellKind = CellKind.MIXED, model: str = "m", **changes: Any) -> CellResult:
    """A cell of every metric that a figure draws; rate and TTFT grow with concurrency."""
    rate = 30.0 * concurrency**0.7
    values: dict[str, Any] = {
        "metrics": {
            "output_tokens_per_s_per_gpu": rate,
            "prompt_tokens_per_s_per_gpu": 2 * rate,
            "request_rps": rate / 32,
            "ttft_s/p50": 0.1 * concurrency,
            "ttft_s/p99": 0.2 * concurrency,
            "tpot_s/p50": 0.03,
            "tpot_s/p99": 0.05,
            "e2e_s/p50": 0.5,
            "e2e_s/p99": 0.7,
        },
        "intervals": {"output_tokens_per_s_per_gpu": (rate * 0.9, rate * 1.2)},
    }
    return make_cell(kind, concurrency=concurrency, model=model, **(values | changes))


def cost_rows(**changes: Any) -> pd.DataFrame:
    row = {
        "model": "m",
        "version": "1",
        "task": "generate",
        "hardware_class": "cpu",
        "num_prompt_tokens": 64,
        "num_output_tokens": 32,
        "target": "engine",
        "concurrency": 1,
        "output_tokens_per_s_per_gpu": 30.0,
        "ci_low": 20.0,
        "ci_high": 40.0,
        "usd_per_million_output_tokens": 0.4,
        "usd_per_million_input_tokens": 0.02,
    }
    other = {"concurrency": 4, "usd_per_million_output_tokens": 0.2}
    return pd.DataFrame([row | changes, row | other | changes])


def axis_titles(figure: Any) -> set[str]:
    layout = figure.to_plotly_json()["layout"]
    return {axis["title"]["text"] for name, axis in layout.items() if name.startswith(("xaxis", "yaxis"))}


def test_throughput_is_drawn_by_concurrency_with_its_interval() -> None:
    figure = plots.throughput(cells_frame([cell(4), cell(1)]))
    (trace,) = figure.data
    assert list(trace.x) == [1, 4]
    assert trace.y[0] == pytest.approx(30.0)
    assert trace.error_y.array[0] == pytest.approx(6.0)
    assert trace.error_y.arrayminus[0] == pytest.approx(3.0)
    assert axis_titles(figure) == {"Concurrency (requests in flight)", "Output tokens/s per GPU or core"}


def test_a_series_is_named_by_what_tells_it_apart() -> None:
    names = [trace.name for trace in plots.throughput(cells_frame([cell(), cell(model="n")])).data]
    assert names == ["m", "n"]
    other_shape = cell(spec=CellSpec(CellKind.MIXED, Shape(512, 32), 1, 10))
    names = [trace.name for trace in plots.throughput(cells_frame([cell(), other_shape])).data]
    assert names == ["m, 64 in / 32 out", "m, 512 in / 32 out"]
    names = [trace.name for trace in plots.throughput(cells_frame([cell(), cell(kind=CellKind.GATEWAY)])).data]
    assert names == ["m", "m, through the gateway"]


def test_cells_that_price_or_do_not_count_are_not_drawn() -> None:
    cells = [cell(1), cell(2, kind=CellKind.PREFILL), cell(4, invalid="warm cache")]
    (trace,) = plots.throughput(cells_frame(cells)).data
    assert list(trace.x) == [1]


def test_latency_has_both_metrics_both_percentiles_and_the_slo() -> None:
    figure = plots.latency(cells_frame([cell(1), cell(8)]), slo_ttft_p99_s=1.0)
    assert [trace.name for trace in figure.data] == ["m, P50", "m, P99"] * 2
    assert figure.data[1].y[1] == pytest.approx(1.6)
    assert list(figure.data[0].customdata) == [1, 8]
    assert axis_titles(figure) == {"Load served (requests/s)", "TTFT (s)", "TPOT (s per token)"}
    assert [shape.y0 for shape in figure.layout.shapes] == [1.0]


def test_a_figure_its_sample_cannot_carry_has_an_open_marker() -> None:
    figure = plots.latency(cells_frame([cell(1, weak=("ttft_s/p99",)), cell(8)]))
    assert list(figure.data[0].marker.symbol) == ["circle", "circle"]
    assert list(figure.data[1].marker.symbol) == ["circle-open", "circle"]


def test_embeddings_have_input_tokens_and_one_latency() -> None:
    frame = cells_frame([cell(kind=CellKind.EMBED, task=Task.EMBED)])
    assert "Input tokens/s per GPU or core" in axis_titles(plots.throughput(frame))
    assert axis_titles(plots.latency(frame)) == {"Load served (requests/s)", "E2E (s)"}


def test_cost_carries_the_interval_of_the_rate_to_the_price() -> None:
    figure = plots.cost(cost_rows())
    output, price_of_input = figure.data
    assert list(output.y) == [0.4, 0.2]
    assert output.y[0] + output.error_y.array[0] == pytest.approx(0.4 * 30 / 20)
    assert output.y[0] - output.error_y.arrayminus[0] == pytest.approx(0.4 * 30 / 40)
    assert list(price_of_input.y) == [0.02, 0.02]
    assert axis_titles(figure) == {
        "Concurrency (requests in flight)",
        "USD per million output tokens",
        "USD per million input tokens",
    }


def test_a_rate_that_may_be_nothing_leaves_the_price_without_an_upper_end() -> None:
    rows = cost_rows()
    rows["ci_low"] = 0.0
    output = plots.cost(rows).data[0]
    assert list(output.y) == [0.4, 0.2] and output.error_y.array[0] == 0
    assert output.error_y.arrayminus[0] > 0


def test_a_series_keeps_its_colour_from_panel_to_panel_and_stands_once_in_the_legend() -> None:
    embed = cost_rows(
        model="a-embed", task="embed", usd_per_million_output_tokens=0.0, output_tokens_per_s_per_gpu=None
    )
    figure = plots.cost(pd.concat([embed, cost_rows()], ignore_index=True))
    by_name = {(trace.name, trace.xaxis): trace for trace in figure.data}
    assert set(by_name) == {("m", "x"), ("a-embed", "x2"), ("m", "x2")}
    assert by_name["m", "x"].line.color == by_name["m", "x2"].line.color != by_name["a-embed", "x2"].line.color
    assert [key for key, trace in by_name.items() if trace.showlegend] == [("m", "x"), ("a-embed", "x2")]


@pytest.mark.parametrize(
    ("draw", "frame", "says"),
    [
        (plots.throughput, cells_frame([]), "none of 0 cells"),
        (plots.latency, cells_frame([cell(invalid="it failed")]), "none of 1 cells"),
        (plots.throughput, cells_frame([cell(metrics={})]), "output_tokens_per_s_per_gpu"),
        (plots.throughput, pd.DataFrame({"x": [1]}), "not a frame of cells"),
        (plots.cost, pd.DataFrame(), "no price in its 0 rows"),
    ],
)
def test_nothing_to_plot_says_what_is_missing(draw: Any, frame: pd.DataFrame, says: str) -> None:
    with pytest.raises(plots.NothingToPlot, match=says):
        draw(frame)
