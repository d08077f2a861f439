"""Figures of runs and sweeps from what they measured, in the looks of `workbench.plots`.

timeline, latency_shares        one run: its course, and how its latencies spread
shares_by_cell                  one latency of several cells
pareto, phases                  a sweep: what is worth choosing, prefill and decode apart
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import cycle

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import stats
from workbench.loadgen import RequestRecord, Slo
from workbench.measurement.findings import Findings
from workbench.plots import MARKERS, PALETTE, SLO_LINE, TEMPLATE, NothingToPlot
from workbench.sweeps.pareto import Figure, Placed, Standing
from workbench.sweeps.phase_curves import Line, PhaseCurves

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
STANDINGS = {
    Standing.FRONT: ("on the front", PALETTE[0], "circle"),
    Standing.MAYBE: ("perhaps on it: intervals overlap", PALETTE[5], "diamond-open"),
    Standing.DOMINATED: ("something is better", "#999", "x-thin-open"),
}
SHADE = {"fillcolor": PALETTE[2], "opacity": 0.12, "line_width": 0, "layer": "below"}


def timeline(found: Findings) -> go.Figure:
    """Tokens a second over requests in flight; the steady part is shaded, changes of level are dotted lines.

    Raises:
        NothingToPlot: nothing was served.
    """
    line, judged = found.line, found.judged
    if line is None or judged is None:
        raise NothingToPlot("no request was served, so there is no timeline")
    figure = make_subplots(rows=2, cols=1, shared_xaxes=True, vertical_spacing=0.08)
    times_s = [line.at_s(slot) + line.slot_s / 2 for slot in range(len(line.tokens_per_s))]
    panels = (("Tokens/s", line.tokens_per_s), ("Requests in flight", line.in_flight))
    for row, (title, values) in enumerate(panels, start=1):
        look = {"color": PALETTE[row - 1], "width": 1.5}
        trace = go.Scatter(x=times_s, y=list(values), name=title, mode="lines", line=look, showlegend=False)
        figure.add_trace(trace, row=row, col=1)
        figure.update_yaxes(title=title, rangemode="tozero", row=row, col=1)
        if isinstance(judged.steady, stats.Steady):
            edges_s = line.at_s(judged.steady.first), line.at_s(judged.steady.end)
            figure.add_vrect(x0=edges_s[0], x1=edges_s[1], row=row, col=1, **SHADE)
        for change in judged.changes:
            figure.add_vline(x=line.at_s(change.index), line=SLO_LINE, row=row, col=1)
    figure.update_xaxes(title="Seconds since the start", row=2, col=1)
    return figure.update_layout(template=TEMPLATE, title="The run over time (steady part shaded)")


def latency_shares(records: Sequence[RequestRecord], slo: Slo) -> go.Figure:
    """Which share of the served requests had at most a latency: TTFT, TPOT and E2E; limits of the SLO are dotted.

    Raises:
        NothingToPlot: nothing was served.
    """
    served = [record for record in records if record.ok]
    figure = go.Figure()
    for (name, title), color in zip(LATENCIES.items(), PALETTE, strict=False):
        values = sorted(value for value in (getattr(record, name) for record in served) if value is not None)
        shares = [(rank + 1) / len(values) for rank in range(len(values))]
        if values:
            figure.add_trace(
                go.Scatter(x=values, y=shares, name=title, mode="lines", line={"shape": "hv", "color": color})
            )
    if not figure.data:
        raise NothingToPlot("no request was served, so there are no latencies")
    for limit_s, title in ((slo.ttft_s, "TTFT"), (slo.tpot_s, "TPOT")):
        figure.add_vline(x=limit_s, line=SLO_LINE, annotation_text=f"SLO, {title}")
    figure.update_xaxes(title="Seconds", type="log")
    figure.update_yaxes(title="Share of served requests", range=[0, 1.02])
    return figure.update_layout(template=TEMPLATE, title="Latencies")


def shares_by_cell(cells: Mapping[str, Sequence[RequestRecord]], latency: str = "ttft_s") -> go.Figure:
    """Which share of each cell's served requests had at most a latency.

    Args:
        cells: records by the cell's name.
        latency: `ttft_s`, `tpot_s` or `e2e_s`.

    Raises:
        NothingToPlot: no cell has a served request with that latency.
    """
    figure = go.Figure()
    for (name, records), color in zip(cells.items(), cycle(PALETTE), strict=False):
        values = sorted(v for v in (getattr(record, latency) for record in records if record.ok) if v is not None)
        if values:
            shares = [(rank + 1) / len(values) for rank in range(len(values))]
            look = {"shape": "hv", "color": color}
            figure.add_trace(go.Scatter(x=values, y=shares, name=name, mode="lines", line=look))
    if not figure.data:
        raise NothingToPlot(f"no request has a {latency}")
    figure.update_xaxes(title=f"{LATENCIES[latency]} (s)", type="log")
    figure.update_yaxes(title="Share of served requests", range=[0, 1.02])
    return figure.update_layout(template=TEMPLATE, title=f"{LATENCIES[latency]} by cell")


def pareto(placed: Sequence[Placed], *, x_title: str, y_title: str, y_limit: float | None = None) -> go.Figure:
    """Points to choose from by two figures, with their intervals; those on the front are joined.

    Args:
        placed: `workbench.sweeps.pareto.pareto_front`'s.
        x_title: of the first figure, with its unit.
        y_title: of the second.
        y_limit: of the second figure, such as an SLO's, as a dotted line.

    Raises:
        NothingToPlot: there is no point.
    """
    if not placed:
        raise NothingToPlot("no cell has both figures, so there is nothing to choose from")
    figure = go.Figure()
    front = sorted((one for one in placed if one.standing is Standing.FRONT), key=lambda one: one.point.x.value)
    xs, ys = [one.point.x.value for one in front], [one.point.y.value for one in front]
    line = {"color": PALETTE[0], "width": 1, "dash": "dot"}
    figure.add_trace(go.Scatter(x=xs, y=ys, mode="lines", line=line, showlegend=False, hoverinfo="skip"))
    for standing, (name, color, symbol) in STANDINGS.items():
        of_it = [one for one in placed if one.standing is standing]
        if of_it:
            figure.add_trace(_points(of_it, name, color, symbol))
    figure.update_xaxes(title=x_title, rangemode="tozero")
    figure.update_yaxes(title=y_title, rangemode="tozero")
    if y_limit is not None:
        figure.add_hline(y=y_limit, line=SLO_LINE)
    return figure.update_layout(template=TEMPLATE, title="What is worth choosing")


def _points(placed: Sequence[Placed], name: str, color: str, symbol: str) -> go.Scatter:
    points = [one.point for one in placed]
    by = [f"<br>better: {', '.join(one.by)}" if one.by else "" for one in placed]
    return go.Scatter(
        x=[point.x.value for point in points],
        y=[point.y.value for point in points],
        error_x=_bars([point.x for point in points]),
        error_y=_bars([point.y for point in points]),
        text=[f"{point.name}{more}" for point, more in zip(points, by, strict=True)],
        name=name,
        mode="markers",
        marker={"color": color, "symbol": symbol, "size": 11},
        hovertemplate="%{text}<br>%{x:.4g}, %{y:.4g}<extra></extra>",
    )


def _bars(figures: Sequence[Figure]) -> dict[str, object]:
    above = [0.0 if one.high is None else one.high - one.value for one in figures]
    below = [0.0 if one.low is None else one.value - one.low for one in figures]
    return {"type": "data", "symmetric": False, "array": above, "arrayminus": below, "thickness": 1, "width": 3}


def phases(curves: PhaseCurves) -> go.Figure:
    """Seconds a prompt by its length over seconds a decode step by concurrency, each with its line where it has one.

    Raises:
        NothingToPlot: neither phase was measured.
    """
    if not curves.prefill and not curves.decode:
        raise NothingToPlot("no cell measured prefill or decode alone")
    figure = make_subplots(rows=2, cols=1, vertical_spacing=0.2)
    for is_cached, name in ((False, "prefill"), (True, "prefill, from the prefix cache")):
        found = [(p.num_prompt_tokens, p.s_per_prompt) for p in curves.prefill if p.is_cached is is_cached]
        _add_phase(figure, 1, name, found, None if is_cached else curves.prefill_line, int(is_cached))
    for number, length in enumerate(sorted({point.num_prompt_tokens for point in curves.decode})):
        steps = [(p.concurrency, p.s_per_step) for p in curves.decode if p.num_prompt_tokens == length]
        _add_phase(figure, 2, f"decode after {length} tokens", steps, None, 2 + number)
    _add_line(figure, 2, [point.concurrency for point in curves.decode], curves.decode_line)
    figure.update_xaxes(title="Prompt tokens", rangemode="tozero", row=1, col=1)
    figure.update_xaxes(title="Concurrency (streams)", rangemode="tozero", row=2, col=1)
    figure.update_yaxes(title="Seconds a prompt", rangemode="tozero", row=1, col=1)
    figure.update_yaxes(title="Seconds a step", rangemode="tozero", row=2, col=1)
    return figure.update_layout(template=TEMPLATE, title="Prefill and decode apart", height=640)


def _add_phase(
    figure: go.Figure, row: int, name: str, points: Sequence[tuple[int, float]], line: Line | None, look: int
) -> None:
    if not points:
        return
    xs, ys = [x for x, _ in points], [y for _, y in points]
    marker = {"color": PALETTE[look % len(PALETTE)], "symbol": MARKERS[look % len(MARKERS)], "size": 9}
    hover = "%{y:.4s}s at %{x}<extra></extra>"
    figure.add_trace(
        go.Scatter(x=xs, y=ys, name=name, mode="markers", marker=marker, hovertemplate=hover), row=row, col=1
    )
    _add_line(figure, row, xs, line)


def _add_line(figure: go.Figure, row: int, xs: Sequence[int], line: Line | None) -> None:
    if line is None:
        return
    ends = [0, max(xs)]
    text = f"{line.fixed_s:.3g} s + {line.s_per_unit:.3g} s each"
    values = [line.fixed_s + line.s_per_unit * x for x in ends]
    look = {"color": "#444", "dash": "dash", "width": 1}
    figure.add_trace(go.Scatter(x=ends, y=values, name=text, mode="lines", line=look), row=row, col=1)
