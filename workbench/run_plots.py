"""Figures of one run, in the looks of `workbench.plots`: its timeline, and how its latencies spread."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from workbench import stats
from workbench.loadgen import RequestRecord, Slo
from workbench.measurement.findings import Findings
from workbench.plots import PALETTE, SLO_LINE, TEMPLATE, NothingToPlot

LATENCIES = {"ttft_s": "TTFT", "tpot_s": "TPOT", "e2e_s": "E2E"}
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
