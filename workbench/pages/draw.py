"""One page of what was measured: figures, table with intervals, fingerprints, warnings. Self-contained HTML.

    cells + their requests + SLO + prices → write_page() → one file

The page loads nothing from elsewhere, keeps nothing in the browser and leads nowhere, so that it reads well in
MLflow's artifact view, offline and by mail. The plotting library lies in it once. It is one column, for a phone too.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import plotly.graph_objects as go

from workbench import plots, run_plots
from workbench.loadgen import RequestRecord, Slo
from workbench.measurement.findings import find
from workbench.run_fields import flat
from workbench.sweeps.cells import MEASURED, CellKind, CellResult
from workbench.sweeps.frames import LOAD_KINDS
from workbench.sweeps.pareto import Goal, latency_points, pareto_front

if TYPE_CHECKING:
    import pandas as pd

SHOWN = (
    *("output_tokens_per_s_per_gpu", "prompt_tokens_per_s_per_gpu", "ttft_s/p50", "ttft_s/p99", "tpot_s/p50"),
    *("tpot_s/p99", "itl_s/p99", "e2e_s/p99", "goodput_rps", "slo_good_frac", "joules_per_output_token"),
)
MAX_CLIENT_ERROR_FRAC = 0.01
FIGURE_CONFIG = {"responsive": True, "displayModeBar": False, "displaylogo": False}
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
STYLE = """
:root { color-scheme: light; }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1rem; max-width: 60rem; color: #222; background: #fff;
  font: 16px/1.5 Helvetica, Arial, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.5rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin: 2rem 0 .25rem; }
p { margin: .25rem 0; } .quiet { color: #595959; } figure { margin: 0; }
.warn { border-left: 4px solid #D55E00; background: #fdf3ec; padding: .5rem 1rem; }
.warn ul { padding-left: 1rem; margin: .25rem 0; }
table { border-collapse: collapse; width: 100%; font-size: .9rem; }
caption { text-align: left; font-weight: bold; padding-top: 1rem; }
th, td { text-align: left; vertical-align: top; padding: .25rem .5rem .25rem 0; border-bottom: 1px solid #e5e5e5; }
th { font-weight: normal; } td { font-variant-numeric: tabular-nums; }
"""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a page shows.

    Attributes:
        title: whose figures they are.
        cells: valid or not, in the order to show.
        records: requests by `measurement_id`; a cell without them has no latency curve.
        slo: limits drawn as lines.
        prices: a cost table, or None.
        notes: what a reader must know beside what the cells say.
    """

    title: str
    cells: Sequence[CellResult]
    records: Mapping[str, Sequence[RequestRecord]]
    slo: Slo
    prices: pd.DataFrame | None = None
    notes: Sequence[str] = field(default=())


def write_page(measured: Measured, path: Path) -> None:
    """Writes the page, whole or not at all.

    Raises:
        OSError: the file cannot be written.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(page(measured), encoding="utf-8")
    partial.replace(path)


def page(measured: Measured) -> str:
    """The page's HTML."""
    title = html.escape(measured.title)
    body = "\n".join(
        [
            f"<h1>{title}</h1><p class='quiet'>{html.escape(_when(measured.cells))}</p>",
            _list("Warnings", warnings(measured)),
            *_figures(measured),
            "<h2>Figures with 95 % intervals</h2>",
            *(_cell_table(cell) for cell in measured.cells),
            "<h2>Measured on</h2>",
            *_fingerprints(measured.cells),
        ]
    )
    head = (
        f"<meta charset='utf-8'><meta name='viewport' content='width=device-width, initial-scale=1'>"
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><title>{title}</title><style>{STYLE}</style>'
    )
    return f"<!doctype html><html lang='en'><head>{head}</head><body>{body}</body></html>"


def warnings(measured: Measured) -> list[str]:
    """What a reader must know before the figures, a sentence each: invalid cells, failures, weak percentiles, notes."""
    found = list(measured.notes)
    for cell in measured.cells:
        name = cell.spec.cell_id
        if cell.invalid is not None:
            found.append(f"{name} does not count: {cell.invalid}")
        if cell.num_failed:
            kinds = ", ".join(f"{kind} {number}" for kind, number in cell.failures.items())
            found.append(
                f"{name}: {cell.num_failed} of {cell.num_requests} requests failed ({kinds or 'kinds unknown'})"
            )
        if cell.num_unsent:
            found.append(f"{name}: {cell.num_unsent} requests came due and were never sent")
        if cell.weak:
            found.append(f"{name}: {len(cell.weak)} figures are more than its sample can carry; the table marks them")
        if cell.client_error_frac > MAX_CLIENT_ERROR_FRAC:
            found.append(f"{name}: the client itself may have added {cell.client_error_frac:.1%} to the median TTFT")
        found += [f"{name}: {note}" for note in cell.notes]
    return found


def _figures(measured: Measured) -> Iterator[str]:
    """Each figure under its heading, or why there is none; the first that is drawn brings the library."""
    is_first = True
    for title, told, draw in _plans(measured):
        try:
            figure = plots.compact(draw())
        except plots.NothingToPlot as error:
            yield f"<h2>{title}</h2><p class='quiet'>Not drawn: {html.escape(str(error))}.</p>"
            continue
        drawn = figure.to_html(full_html=False, include_plotlyjs=is_first, config=FIGURE_CONFIG)
        is_first = False
        yield f"<h2>{title}</h2><p class='quiet'>{told}</p><figure>{drawn}</figure>"


def _plans(measured: Measured) -> Iterator[tuple[str, str, Callable[[], go.Figure]]]:
    """Heading, what the figure says, and how it is drawn."""
    records = {
        cell.spec.cell_id: measured.records[cell.measurement_id]
        for cell in measured.cells
        if cell.measurement_id in measured.records and cell.invalid is None and cell.spec.kind.value in LOAD_KINDS
    }
    slo = measured.slo
    for name, limit_s in (("ttft_s", slo.ttft_s), ("tpot_s", slo.tpot_s)):
        label = run_plots.LATENCIES[name]
        told = "Right and low is better. The dotted line is the SLO; bars are intervals."
        yield f"Tokens/s per GPU against {label}", told, _front(measured.cells, name, label, limit_s)
    for name, label in run_plots.LATENCIES.items():
        told = f"Share of each cell's served requests that had at most that {label}."
        yield f"{label} of all requests", told, lambda name=name: run_plots.shares_by_cell(records, name)  # type: ignore[misc]
    best = _fastest(measured)
    name = "none" if best is None else best.spec.cell_id
    yield "Timeline", f"Of {name}; the steady part is shaded.", lambda: _timeline(measured, best)
    yield "Cost", "USD a million output tokens; lighter is cheaper.", lambda: _cost(measured.prices)


def _front(cells: Sequence[CellResult], name: str, label: str, limit_s: float) -> Callable[[], go.Figure]:
    def draw() -> go.Figure:
        placed = pareto_front(latency_points(cells, f"{name}/p99"), Goal.MORE, Goal.LESS)
        titles = {"x_title": "Output tokens/s per GPU or core", "y_title": f"{label} P99 (s)"}
        return run_plots.pareto(placed, y_limit=limit_s, **titles)

    return draw


def _fastest(measured: Measured) -> CellResult | None:
    """The cell with the most output tokens a second whose requests are at hand."""
    found = [
        cell
        for cell in measured.cells
        if cell.measurement_id in measured.records and cell.invalid is None and cell.spec.kind is not CellKind.CACHED
    ]
    return max(found, key=lambda cell: cell.metrics.get("output_tokens_per_s_per_gpu", 0.0), default=None)


def _timeline(measured: Measured, cell: CellResult | None) -> go.Figure:
    if cell is None:
        raise plots.NothingToPlot("no cell that counts has its requests at hand")
    return run_plots.timeline(find(measured.records[cell.measurement_id], is_closed=cell.spec.is_closed))


def _cost(prices: pd.DataFrame | None) -> go.Figure:
    if prices is None:
        raise plots.NothingToPlot("nothing gives a price here")
    return plots.cost_heatmap(prices)


def _when(cells: Sequence[CellResult]) -> str:
    if not cells:
        return "Nothing was measured."
    ends = (min(cell.started_at_s for cell in cells), max(cell.ended_at_s for cell in cells))
    first, last = (f"{datetime.fromtimestamp(end, UTC):%Y-%m-%d %H:%M}" for end in ends)
    counting = sum(cell.invalid is None for cell in cells)
    return f"Measured {first} to {last} UTC; {counting} of {len(cells)} cells count."


def _list(title: str, lines: Sequence[str]) -> str:
    if not lines:
        return "<p>No warnings: nothing failed, and every figure is carried by its sample.</p>"
    items = "".join(f"<li>{html.escape(line)}</li>" for line in lines)
    return f"<div class='warn'><strong>{title}</strong><ul>{items}</ul></div>"


def _cell_table(cell: CellResult) -> str:
    rows = []
    for name in (name for name in SHOWN if name in cell.metrics):
        low, high = cell.intervals.get(name, (None, None))
        interval = "" if low is None else f"{low:.4g} – {high:.4g}"
        weak = "too small a sample" if name in cell.weak else interval
        rows.append((name, f"{cell.metrics[name]:.4g}", weak))
    client = f"{cell.client_error_frac:.2%} of the median TTFT"
    rows.append(("requests, failed", f"{cell.num_requests}, {cell.num_failed}", ""))
    return _table(cell.spec.cell_id, [*rows, ("client's own error, at most", client, "")])


def _fingerprints(cells: Sequence[CellResult]) -> Iterator[str]:
    """What each pair of fingerprints of the cells covers, once."""
    seen = {(cell.engine_fingerprint, cell.hardware_fingerprint): cell for cell in cells}
    for (engine, hardware), cell in seen.items():
        covers = flat("engine", cell.engine_covers) | flat("hardware", cell.hardware_covers)
        rows = [("engine fingerprint", engine), ("hardware fingerprint", hardware), ("commit", cell.commit)]
        rows += [] if cell.provenance == MEASURED else [("imported from", cell.provenance)]
        name = f"{cell.model}@{cell.version}, {cell.num_units} × {cell.hardware_class}"
        yield _table(name, [*rows, *((key, str(value)) for key, value in covers.items())])


def _table(caption: str, rows: Sequence[Sequence[str]]) -> str:
    lines = (
        f"<tr><th scope='row'>{html.escape(row[0])}</th>{''.join(f'<td>{html.escape(cell)}</td>' for cell in row[1:])}"
        for row in rows
    )
    return f"<table><caption>{html.escape(caption)}</caption>{''.join(lines)}</table>"
