"""What one benchmark measured: figures with intervals, what a reader must know, frames, figures, MLflow."""

from __future__ import annotations

import html
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from serving.core.state import Task
from workbench import stats
from workbench.absent import Absent
from workbench.loadgen import ClientError, RequestRecord, Slo, Summary, to_table
from workbench.measurement.energy import Energy
from workbench.measurement.engine_window import EngineCount
from workbench.measurement.findings import Findings
from workbench.measurement.metered import energy_metrics
from workbench.sparkline import sparkline

if TYPE_CHECKING:
    import pandas as pd
    import plotly.graph_objects as go

    from workbench.tracking import Tracker

SHOWN_METRICS = (
    *("request_rps", "goodput_rps", "slo_good_frac", "output_tokens_per_s_per_gpu", "prompt_tokens_per_s_per_gpu"),
    *("output_tokens_per_s_per_user/p50", "ttft_s/p50", "ttft_s/p99", "ttfc_s/p50", "itl_s/p50", "itl_s/p99"),
    *("tpot_s/p50", "tpot_s/p99", "e2e_s/p50", "e2e_s/p99", "service_ttft_s/p99", "cached_prompt_frac"),
    *("joules_per_output_token", "joules_per_token", "usd_per_million_tokens"),
    *("failed_frac", "send_lag_s/p99", "client_stamp_error_s/p99", "client_error_frac", "queue_growth_rps"),
)
USD_PER_MILLION = 1e6 / 3600.0


@dataclass(frozen=True, slots=True, repr=False)
class BenchResult:
    """The outcome of a benchmark; shows itself in a notebook.

    Attributes:
        load, workload: their short forms.
        records: of every request, the warm-up and what was cut off included.
        summary: figures of the steady part.
        client_error: how late the client itself was.
        found: what the timeline shows.
        counted: what the engines counted, or why that is not known.
        used: energy of the whole run, or why it is not known.
        load_notes: of the load generator.
        is_interrupted: it was ended before its time.
        facts: version, fingerprints and whatever else it is known by.
        run_id: in MLflow, where it was logged as it ended.
    """

    model: str
    url: str
    load: str
    workload: str
    task: Task
    slo: Slo
    num_units: int
    usd_per_hour: float | None
    started_at_s: float
    ended_at_s: float
    records: tuple[RequestRecord, ...]
    summary: Summary
    client_error: ClientError
    found: Findings
    counted: EngineCount | Absent
    used: Energy | Absent
    load_notes: tuple[str, ...] = ()
    is_interrupted: bool = False
    facts: Mapping[str, str] = field(default_factory=dict)
    run_id: str | None = None

    @property
    def invalid(self) -> str | None:
        """Why the figures do not count; None when they do."""
        return self.summary.invalid

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader of the figures must know."""
        return self.load_notes + self.found.notes

    @property
    def metrics(self) -> dict[str, float]:
        """All figures by their MLflow names; finite. A figure that does not exist is absent."""
        unsent = {"num_unsent": float(self.client_error.num_unsent)}
        price = {} if self._usd() is None else {"usd_per_million_tokens": self._usd() or 0.0}
        return (
            self.summary.metrics
            | self.found.metrics
            | unsent
            | energy_metrics(self.used, self.records, counts_prompts=self.task is Task.EMBED)
            | price
        )

    @property
    def intervals(self) -> dict[str, tuple[float, float]]:
        """95 % intervals, under the same names."""
        found = self.summary.intervals | self.found.intervals
        low, high = found.get("tokens_per_s_per_gpu") or found.get("prompt_tokens_per_s_per_gpu") or (0.0, 0.0)
        if self.usd_per_hour is not None and low > 0.0:
            usd = self.usd_per_hour * USD_PER_MILLION / self.num_units
            found["usd_per_million_tokens"] = (usd / high, usd / low)
        return found

    def frame(self) -> pd.DataFrame:
        """A row a request, with raw times and the latencies that follow from them."""
        frame = to_table(self.records).to_pandas()
        for name in ("ttft_s", "service_ttft_s", "ttfc_s", "tpot_s", "e2e_s", "service_e2e_s", "send_lag_s", "ok"):
            frame[name] = [getattr(record, name) for record in self.records]
        frame["is_good"] = [self.slo.is_met(record) for record in self.records]
        return frame

    def figure(self, kind: str = "timeline") -> go.Figure:
        """A plotly figure: `timeline` (tokens a second and requests in flight) or `latency` (shares of requests).

        Raises:
            ValueError: no such figure.
            NothingToPlot: nothing was served.
        """
        from workbench import run_plots

        if kind == "timeline":
            return run_plots.timeline(self.found)
        if kind == "latency":
            return run_plots.latency_shares(self.records, self.slo)
        raise ValueError(f"no figure {kind!r}; there are `timeline` and `latency`")

    def log(self, tracker: Tracker | None = None, *, run_id: str | None = None) -> str:
        """Logs it as a run of `benchmarks/MODEL` in MLflow, with its records; returns the run's id.

        Args:
            tracker: the server; that of the connected workbench when None.
            run_id: a run that followed it live, instead of a new one.

        Raises:
            NotRunning, RegistryUnavailable, RegistryRefused: MLflow is not there, or said no.
        """
        from workbench.benchmark.logged import log_result

        if tracker is None:
            from workbench.connection import connected

            tracker = connected().tracker
        return log_result(self, tracker, run_id)

    def page(self, path: Path | str) -> None:
        """Writes one self-contained HTML page of it. Raises OSError."""
        from workbench.benchmark.cell import write_page

        write_page(self, Path(path))

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types, without the records."""
        return {
            "model": self.model,
            "url": self.url,
            "load": self.load,
            "workload": self.workload,
            "started_at_s": self.started_at_s,
            "ended_at_s": self.ended_at_s,
            "metrics": self.metrics,
            "intervals": self.intervals,
            "weak": self.weak,
            "num_requests": self.summary.num_requests,
            "num_failed": self.summary.num_failed,
            "failures": {kind.value: number for kind, number in self.summary.failures.items()},
            "invalid": self.invalid,
            "notes": list(self.notes),
            "steady": self.found.steady,
            "is_saturated": self.found.is_saturated,
            "is_interrupted": self.is_interrupted,
            "engine_counters": str(self.counted) if isinstance(self.counted, Absent) else asdict(self.counted),
            "energy": str(self.used) if isinstance(self.used, Absent) else asdict(self.used),
            "client": asdict(self.client_error),
            "facts": dict(self.facts),
        }

    def rows(self) -> list[tuple[str, str, str]]:
        """Metric, value and interval as people read them."""
        metrics, intervals, rows = self.metrics, self.intervals, []
        for name in (name for name in SHOWN_METRICS if name in metrics):
            low, high = intervals.get(name, (None, None))
            interval = "" if low is None else f"{low:.4g} – {high:.4g}"
            mark = " (largest seen)" if name in self.summary.weak and name.endswith("p99") else ""
            rows.append((name, f"{metrics[name]:.4g}", interval + mark))
        return rows

    def lines(self) -> list[str]:
        """What stands beside the figures, a sentence a line."""
        lines = [f"does not count: {self.invalid}"] if self.invalid else []
        lines += [f"note: {note}" for note in self.notes]
        steady = [] if self.found.steady in self.notes else [self.found.steady]
        lines += ["; ".join([*steady, f"{self.summary.num_failed} of {self.summary.num_requests} requests failed"])]
        counted = self.counted
        lines += [
            f"engine counters: {counted.reason}"
            if isinstance(counted, Absent)
            else f"engine counters: {counted.num_prompt_tokens} prompt and {counted.num_output_tokens} output tokens, "
            f"{'apart from' if counted.gap else 'within 1 % of'} the client's"
        ]
        used = self.used
        energy = used.reason if isinstance(used, Absent) else f"{used.joules:.0f} J, {used.watts:.0f} W ({used.source})"
        return [*lines, f"energy: {energy}"]

    def __repr__(self) -> str:
        width = max((len(name) for name, *_ in self.rows()), default=0)
        rows = [f"  {name:<{width}}  {value:>10}  {interval}".rstrip() for name, value, interval in self.rows()]
        return "\n".join([f"{self.model} at {self.url}: {self.load}, {self.workload}", *rows, *self.lines()])

    def _repr_html_(self) -> str:
        escape = html.escape
        cells = ("".join(f"<td style='text-align:left'>{escape(cell)}</td>" for cell in row) for row in self.rows())
        rows = "".join(f"<tr>{row}</tr>" for row in cells)
        title = f"{self.model} at {self.url}: {self.load}, {self.workload}"
        told = "".join(f"<li>{escape(line)}</li>" for line in self.lines())
        head = "<tr><th>metric</th><th>value</th><th>95 % interval</th></tr>"
        return f"<h4>{escape(title)}</h4>{self._line()}<table>{head}{rows}</table><ul>{told}</ul>"

    def _line(self) -> str:
        """Tokens a second over the run as a small figure, the steady part shaded."""
        line, judged = self.found.line, self.found.judged
        if line is None:
            return ""
        steady = None if judged is None or not isinstance(judged.steady, stats.Steady) else judged.steady
        num_slots = len(line.tokens_per_s)
        shaded = None if steady is None else (steady.first / num_slots, steady.end / num_slots)
        return sparkline(line.tokens_per_s, "tokens/s over the run (steady part shaded)", shaded)

    @property
    def weak(self) -> list[str]:
        """Figures that the sample is too small to carry."""
        return sorted(self.summary.weak)

    def _usd(self) -> float | None:
        """Of prompt and output tokens alike; a cost table sets the two apart."""
        metrics = self.summary.metrics
        rate = metrics.get("tokens_per_s_per_gpu") or metrics.get("prompt_tokens_per_s_per_gpu")
        if self.usd_per_hour is None or not rate:
            return None
        return self.usd_per_hour * USD_PER_MILLION / self.num_units / rate
