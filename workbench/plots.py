"""The figures of notebooks and reports: throughput against concurrency, latency against load, cost.

Each function takes a frame and returns a plotly figure; none computes a metric. A frame of cells
is `workbench.sweeps.frames.cells_frame`'s: a row a cell, a column a metric under MLflow's name, its 95 % interval
beside it. Cells that are invalid, or that exist only to split the price, are not drawn. A frame of cost
rows is the cost table itself.

Series differ in colour (Okabe and Ito's palette, safe for colour-blind readers) and marker, so that they
can be told apart in print too. An open marker is a figure that its sample is too small to carry. Axis titles
carry the unit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import cycle

import numpy as np
import pandas as pd
import plotly.graph_objects as go
from plotly.subplots import make_subplots

from serving.core.state import Task
from workbench.sweeps.cells import TargetKind
from workbench.sweeps.frames import LOAD_KINDS

# Okabe & Ito, "Color Universal Design" (2008), without the yellow that vanishes on white.
PALETTE = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#56B4E9", "#E69F00", "#000000")
MARKERS = ("circle", "square", "diamond", "triangle-up", "x", "star", "cross")
SLO_LINE = {"dash": "dot", "color": "#444"}

TEMPLATE = go.layout.Template(
    layout=go.Layout(
        colorway=PALETTE,
        font={"family": "Helvetica, Arial, sans-serif", "size": 14, "color": "#222"},
        title={"x": 0.0, "xanchor": "left", "xref": "paper", "font": {"size": 18}},
        paper_bgcolor="white",
        plot_bgcolor="white",
        margin={"l": 70, "r": 20, "t": 110, "b": 60},
        height=460,
        legend={"orientation": "h", "yanchor": "bottom", "y": 1.06, "xanchor": "left", "x": 0.0},
        hovermode="closest",
        xaxis={"gridcolor": "#e5e5e5", "linecolor": "#888", "showline": True, "ticks": "outside", "zeroline": False},
        yaxis={"gridcolor": "#e5e5e5", "linecolor": "#888", "showline": True, "ticks": "outside", "zeroline": False},
    )
)

_SERIES_COLUMNS = ("model", "version", "hardware_class", "num_prompt_tokens", "num_output_tokens", "target")


class NothingToPlot(ValueError):
    """The frame has no row that the figure could show; the message says what is missing."""


@dataclass(frozen=True, slots=True)
class _Series:
    """One line of a figure: cells that differ in concurrency alone."""

    name: str
    rows: pd.DataFrame
    color: str
    marker: str


def compact(figure: go.Figure) -> go.Figure:
    """The figure for one column of a page, down to a phone's width: no title of its own, the legend below."""
    legend = {"orientation": "h", "yanchor": "top", "y": -0.22, "yref": "paper", "x": 0.0, "font": {"size": 12}}
    figure.update_layout(title=None, autosize=True, font={"size": 12}, legend=legend)
    figure.update_layout(margin={"l": 56, "r": 12, "t": 16, "b": 48})
    return figure.update_xaxes(automargin=True).update_yaxes(automargin=True)


def throughput(cells: pd.DataFrame) -> go.Figure:
    """Tokens a second of one GPU (or core) against concurrency: output tokens, or input tokens of embeddings.

    Raises:
        NothingToPlot: no cell carries the metric.
    """
    shown = _load_cells(cells)
    kind = "Input" if _is_embed(shown) else "Output"
    metric = "prompt_tokens_per_s_per_gpu" if _is_embed(shown) else "output_tokens_per_s_per_gpu"
    figure = _figure("Throughput against concurrency")
    for series in _series(shown, [metric]):
        figure.add_trace(_line(series, "concurrency", metric, hover="%{y:.1f} tokens/s at %{x} in flight"))
    figure.update_xaxes(title="Concurrency (requests in flight)", **_log_ticks(shown))
    figure.update_yaxes(title=f"{kind} tokens/s per GPU or core", rangemode="tozero")
    return figure


def latency(
    cells: pd.DataFrame, *, slo_ttft_p99_s: float | None = None, slo_tpot_p99_s: float | None = None
) -> go.Figure:
    """TTFT and TPOT (of embeddings: E2E) against the load served; P50 dashed, P99 solid, concurrency on hover.

    Args:
        cells: a frame of cells with `request_rps` and the percentiles.
        slo_ttft_p99_s: drawn as a line over TTFT, if given; seconds.
        slo_tpot_p99_s: drawn as a line over TPOT, if given; seconds.

    Raises:
        NothingToPlot: no cell carries a latency.
    """
    shown = _load_cells(cells)
    panels = [("ttft_s", "TTFT (s)", slo_ttft_p99_s), ("tpot_s", "TPOT (s per token)", slo_tpot_p99_s)]
    if _is_embed(shown):
        panels = [("e2e_s", "E2E (s)", None)]
    figure = _figure("Latency against load", panels=len(panels))
    for column, (metric, title, slo_s) in enumerate(panels, start=1):
        for trace in _percentiles(shown, metric):
            trace.showlegend = column == 1
            figure.add_trace(trace, row=1, col=column)
        if slo_s is not None:
            figure.add_hline(y=slo_s, line=SLO_LINE, row=1, col=column)
            figure.layout.shapes[-1].label = {"text": "SLO, P99", "textposition": "start", "yanchor": "bottom"}
        figure.update_yaxes(title=title, rangemode="tozero", row=1, col=column)
    figure.update_xaxes(title="Load served (requests/s)", rangemode="tozero")
    return figure


def cost(rows: pd.DataFrame) -> go.Figure:
    """USD per million output and input tokens against concurrency, on a log scale.

    The bars on output prices are the throughput's 95 % interval carried over: a price goes as 1 / rate.

    Args:
        rows: the cost table (`workbench.cost_table()`).

    Raises:
        NothingToPlot: the table has no row with a price.
    """
    kinds = [kind for kind in ("output", "input") if (rows.get(_price(kind), pd.Series(dtype=float)) > 0).any()]
    if not kinds:
        raise NothingToPlot(f"the cost table has no price in its {len(rows)} rows")
    figure = _figure("What a million tokens costs", panels=len(kinds))
    in_legend: set[str] = set()
    for column, kind in enumerate(kinds, start=1):
        for series in _series(_priced(rows, kind), [_price(kind)]):
            trace = _line(series, "concurrency", _price(kind), hover="%{y:$.4f} at %{x} in flight")
            figure.add_trace(trace.update(showlegend=series.name not in in_legend), row=1, col=column)
            in_legend.add(series.name)
        title = f"USD per million {kind} tokens"
        figure.update_yaxes(title=title, **_usd_ticks(_priced(rows, kind), _price(kind)), row=1, col=column)
    figure.update_xaxes(title="Concurrency (requests in flight)", **_log_ticks(rows))
    return figure


def cost_heatmap(rows: pd.DataFrame, kind: str = "output") -> go.Figure:
    """USD per million tokens as colours: a line a model, hardware and shape, a column a concurrency.

    Args:
        rows: the cost table.
        kind: `output`, or `input`.

    Raises:
        NothingToPlot: the table has no such price.
    """
    priced = rows[rows[_price(kind)] > 0] if _price(kind) in rows.columns else rows.iloc[:0]
    if priced.empty:
        raise NothingToPlot(f"the cost table has no {kind} price in its {len(rows)} rows")
    names = [_heat_name(row) for _, row in priced.iterrows()]
    grid = priced.assign(name=names).pivot_table(
        index="name", columns="concurrency", values=_price(kind), aggfunc="min", sort=False
    )
    grid = grid[sorted(grid.columns)]
    prices = grid.to_numpy(dtype=float)
    text = [["" if math.isnan(value) else f"${value:.3g}" for value in line] for line in prices]
    figure = go.Figure(
        go.Heatmap(
            z=np.log10(prices).tolist(), x=[str(value) for value in grid.columns], y=list(grid.index), text=text,
            texttemplate="%{text}", colorscale="Cividis", reversescale=True, showscale=False, xgap=2, ygap=2,
            hovertemplate="%{y}, %{x} in flight: %{text}<extra></extra>",
        )
    )  # fmt: skip
    figure.update_xaxes(title="Concurrency (requests in flight)", type="category")
    figure.update_yaxes(automargin=True, type="category")
    return figure.update_layout(template=TEMPLATE, title=f"USD per million {kind} tokens (lighter is cheaper)")


def _heat_name(row: pd.Series) -> str:
    through = ", gateway" if row.get("target") == TargetKind.GATEWAY.value else ""
    shape = f"{row['num_prompt_tokens']:.0f} in / {row['num_output_tokens']:.0f} out"
    return f"{row['model']}<br>{row['hardware_class']}, {shape}{through}"


def _price(kind: str) -> str:
    return f"usd_per_million_{kind}_tokens"


def _priced(rows: pd.DataFrame, kind: str) -> pd.DataFrame:
    """The rows with a price of `kind` or NaN (embeddings have no output), and an interval for output prices."""
    price = rows[_price(kind)].where(rows[_price(kind)] > 0)
    columns = {_price(kind): price}
    if kind == "output":
        usd_rate = price * rows["output_tokens_per_s_per_gpu"]
        # A rate whose interval reaches down to 0 leaves the price without an upper end.
        columns[f"{_price(kind)}/ci_low"] = usd_rate / rows["ci_high"].where(rows["ci_high"] > 0)
        columns[f"{_price(kind)}/ci_high"] = usd_rate / rows["ci_low"].where(rows["ci_low"] > 0)
    return rows.assign(**columns)


def _load_cells(cells: pd.DataFrame) -> pd.DataFrame:
    """Valid cells that measured a load."""
    if "kind" not in cells.columns or "invalid" not in cells.columns:
        raise NothingToPlot(f"not a frame of cells: its columns are {', '.join(map(str, cells.columns))}")
    shown = cells[cells["kind"].isin(LOAD_KINDS) & cells["invalid"].isna()]
    if shown.empty:
        raise NothingToPlot(f"none of {len(cells)} cells is a valid one under load")
    return shown


def _is_embed(cells: pd.DataFrame) -> bool:
    return bool((cells["task"] == Task.EMBED.value).all())


def _percentiles(cells: pd.DataFrame, metric: str) -> Iterator[go.Scatter]:
    for series in _series(cells, ["request_rps", f"{metric}/p99"]):
        for percentile, dash in (("p50", "dash"), ("p99", "solid")):
            hover = "%{y:.3s}s at %{x:.2f} requests/s, %{customdata} in flight"
            trace = _line(series, "request_rps", f"{metric}/{percentile}", hover=hover)
            name = f"{series.name}, {percentile.upper()}"
            yield trace.update(name=name, legendgroup=name, line_dash=dash)


def _figure(title: str, panels: int = 1) -> go.Figure:
    figure = make_subplots(rows=1, cols=panels, horizontal_spacing=0.12)
    figure.update_layout(template=TEMPLATE, title=title)
    return figure


def _series(frame: pd.DataFrame, metrics: Sequence[str]) -> Iterator[_Series]:
    """The frame's rows as lines, ordered by concurrency; rows that lack one of `metrics` are left out."""
    missing = [name for name in ("concurrency", *metrics) if name not in frame.columns]
    if missing:
        raise NothingToPlot(
            f"the frame has no column {', '.join(missing)}; it has {', '.join(map(str, frame.columns))}"
        )
    keys = [name for name in _SERIES_COLUMNS if name in frame.columns]
    # What all rows share is left out of the legend: it belongs in the text around the figure.
    telling = [name for name in keys if frame[name].nunique() > 1]
    looks = cycle(zip(PALETTE, MARKERS, strict=True))
    found = False
    # Looks go by the group's place among all groups, so that a series keeps its colour from panel to panel.
    for (_, rows), (color, marker) in zip(
        frame.groupby(keys, dropna=False) if keys else [((), frame)], looks, strict=False
    ):
        shown = rows.dropna(subset=["concurrency", *metrics]).sort_values("concurrency")
        if not shown.empty:
            found = True
            yield _Series(_series_name(shown.iloc[0], telling), shown, color, marker)
    if not found:
        raise NothingToPlot(f"no row of {len(frame)} has a value for {', '.join(metrics)}")


def _series_name(row: pd.Series, telling: Sequence[str]) -> str:
    model = str(row.get("model", "all"))
    if "version" in telling:
        model += f"@{row['version']}"
    parts = [model]
    if "hardware_class" in telling:
        parts.append(str(row["hardware_class"]))
    if "num_prompt_tokens" in telling or "num_output_tokens" in telling:
        parts.append(f"{row['num_prompt_tokens']:.0f} in / {row['num_output_tokens']:.0f} out")
    if row.get("target") == TargetKind.GATEWAY.value:
        parts.append("through the gateway")
    return ", ".join(parts)


def _line(series: _Series, x: str, y: str, *, hover: str) -> go.Scatter:
    rows = series.rows
    return go.Scatter(
        x=rows[x].tolist(),
        y=rows[y].tolist(),
        customdata=rows["concurrency"].tolist(),
        error_y=_error_bars(rows, y),
        name=series.name,
        mode="lines+markers",
        line={"color": series.color, "width": 2},
        marker={"symbol": _symbols(rows, y, series.marker), "size": 9},
        legendgroup=series.name,
        hovertemplate=f"{hover}<extra>{series.name}</extra>",
    )


def _symbols(rows: pd.DataFrame, metric: str, marker: str) -> list[str]:
    weak = rows.get(f"{metric}/weak", pd.Series(False, index=rows.index))
    return [f"{marker}-open" if flag is True else marker for flag in weak]


def _error_bars(rows: pd.DataFrame, metric: str) -> dict[str, object] | None:
    low, high = f"{metric}/ci_low", f"{metric}/ci_high"
    if low not in rows.columns or high not in rows.columns:
        return None
    above = (rows[high] - rows[metric]).clip(lower=0).fillna(0)
    below = (rows[metric] - rows[low]).clip(lower=0).fillna(0)
    return {"type": "data", "symmetric": False, "array": above.tolist(), "arrayminus": below.tolist(), "thickness": 1.2}


def _log_ticks(rows: pd.DataFrame) -> dict[str, object]:
    """A log axis labelled at the concurrencies that were measured: sweeps double from cell to cell."""
    values = sorted({int(value) for value in rows["concurrency"]})
    return {"type": "log", "tickvals": values, "ticktext": [str(value) for value in values]}


def _usd_ticks(rows: pd.DataFrame, metric: str) -> dict[str, object]:
    """A log axis from the tick below all values to the tick above, at 1, 2 and 5 of each decade."""
    columns = [name for name in (metric, f"{metric}/ci_low", f"{metric}/ci_high") if name in rows.columns]
    prices = rows[columns].to_numpy(dtype=float)
    low, high = float(np.nanmin(prices)), float(np.nanmax(prices))
    decades = range(math.floor(math.log10(low)) - 1, math.ceil(math.log10(high)) + 1)
    steps = [step * 10.0**decade for decade in decades for step in (1, 2, 5)]
    first = max(value for value in steps if value < low)
    last = min(value for value in steps if value > high)
    values = [value for value in steps if first <= value <= last]
    bounds = [math.log10(first), math.log10(last)]
    return {"type": "log", "tickvals": values, "ticktext": [f"${value:g}" for value in values], "range": bounds}
