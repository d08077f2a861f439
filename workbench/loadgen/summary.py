"""Figures of a run, each with its interval, or the reason why there are none.

Rates are of the steady window (window.py); latencies are of all requests after the warm-up, drained to their
end, because leaving out those that outlive the window would leave out the long ones.

Intervals: percentiles of requests by order statistics, of token gaps by a bootstrap that draws whole streams,
rates by batch means over blocks about as long as a request, shares by Wilson's formula.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np

from serving.core.state import Task
from workbench import stats
from workbench.loadgen.client_error import ClientError
from workbench.loadgen.records import FailureKind, RequestRecord
from workbench.loadgen.window import (
    Window,
    joined,
    left_at_s,
    output_work,
    prompt_work,
    request_work,
    steady_window,
    total_work,
)

PERCENTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99}
MIN_BLOCKS = 4
MAX_BLOCKS = 20
REQUEST_RATES = ("request_rps", "goodput_rps")


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as good: judged request by request.

    An embedding has no first token: its whole time is held against `ttft_s`.
    """

    ttft_s: float
    tpot_s: float

    def is_met(self, record: RequestRecord) -> bool:
        """Whether the request was served and within both limits."""
        wait_s = record.e2e_s if record.task is Task.EMBED else record.ttft_s
        in_time = record.ok and wait_s is not None and wait_s <= self.ttft_s
        return in_time and (record.tpot_s is None or record.tpot_s <= self.tpot_s)


@dataclass(frozen=True, slots=True)
class Summary:
    """Figures of the steady window. When `invalid` is set, only counts, shares of failures and send lag are there.

    `intervals` holds 95 % intervals. `weak` names percentiles that the sample cannot carry (no interval
    exists at its size): the value is then only the sample's own, for a p99 the largest seen; print it
    with a mark, never compare by it. No value is NaN or infinite; a figure that does not exist is absent.
    `num_requests`, `num_failed` and `failures` count all that was sent, the warm-up too.
    """

    metrics: dict[str, float]
    intervals: dict[str, tuple[float, float]]
    num_requests: int
    num_failed: int
    failures: dict[FailureKind, int] = field(default_factory=dict)
    weak: frozenset[str] = frozenset()
    window: Window | None = None
    invalid: str | None = None


def summarize(
    records: Sequence[RequestRecord],
    *,
    slo: Slo,
    num_units: int,
    num_warm_up: int,
    client_error: ClientError | None = None,
    max_failed_frac: float = 0.05,
    seed: int = 0,
) -> Summary:
    """Summarizes the steady window.

    Args:
        records: of one run.
        slo: what counts as good.
        num_units: GPUs (or cores) of the replica, for figures per GPU.
        num_warm_up: requests cut from the start; for a closed loop its concurrency.
        client_error: of the run; when it is invalid, so is the summary.
        max_failed_frac: share of failed requests above which no figure is given.
        seed: of the bootstrap.
    """
    ordered = sorted(records, key=lambda record: record.index)
    failures = Counter(record.failure for record in ordered if record.failure is not None)
    num_failed = sum(failures.values())
    known = {"failed_frac": num_failed / len(ordered)} if ordered else {}
    if client_error is not None:
        known["send_lag_s/p99"] = client_error.send_lag_p99_s
        known["client_loop_lag_s/p99"] = client_error.loop_lag_p99_s
        known["client_stamp_error_s/p99"] = client_error.stamp_error_p99_s
        known["client_cpu_frac"] = client_error.cpu_frac
        known["client_processes"] = float(client_error.num_processes)
    counts = Summary(
        metrics=known,
        intervals={},
        num_requests=len(ordered),
        num_failed=num_failed,
        failures=dict(failures),
    )
    measured = ordered[num_warm_up:]
    served = [record for record in measured if record.ok]
    window = steady_window(ordered, num_warm_up) if served else None
    invalid = _invalid(counts, len(served), window, client_error, max_failed_frac)
    if invalid is not None or window is None:
        return replace(counts, invalid=invalid)
    figures = _Figures(seed)
    _add_latencies(figures, served, client_error)
    _add_shares(figures, measured, slo)
    _add_rates(figures, ordered, slo, window, num_units)
    return replace(
        counts,
        metrics=counts.metrics | figures.metrics,
        intervals=figures.intervals,
        weak=frozenset(figures.weak),
        window=total_work(ordered, window),
    )


def _invalid(
    counts: Summary,
    num_served: int,
    window: tuple[float, float] | None,
    client_error: ClientError | None,
    max_failed_frac: float,
) -> str | None:
    if counts.num_requests and counts.num_failed > max_failed_frac * counts.num_requests:
        kinds = ", ".join(f"{kind.value} {count}" for kind, count in sorted(counts.failures.items()))
        return f"{counts.num_failed} of {counts.num_requests} requests failed ({kinds})"
    if not num_served:
        return "no request was served after the warm-up: send more requests than the warm-up cuts"
    if window is None:
        return "no steady window: the load fell before the warm-up had ended; send more requests"
    return None if client_error is None else client_error.invalid


@dataclass(slots=True)
class _Figures:
    """Collects figures with their intervals."""

    seed: int
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, stats.Interval] = field(default_factory=dict)
    weak: set[str] = field(default_factory=set)

    def add(self, name: str, value: float, interval: stats.Interval | None) -> None:
        """Keeps a figure.

        Raises:
            ValueError: it is NaN or infinite.
        """
        if not math.isfinite(value):
            raise ValueError(f"{name} is {value}: only finite figures are kept")
        self.metrics[name] = value
        if interval is not None:
            self.intervals[name] = interval

    def add_percentiles(self, name: str, values: Iterable[float | None]) -> None:
        """Percentiles and mean of one value a request."""
        sample = [value for value in values if value is not None]
        if not sample:
            return
        self.add(f"{name}/mean", float(np.mean(sample)), stats.mean_interval(sample))
        for label, q in PERCENTILES.items():
            self._add_percentile(f"{name}/{label}", stats.quantile(sample, q), stats.quantile_interval(sample, q))

    def add_gap_percentiles(self, name: str, streams: Sequence[Sequence[float]]) -> None:
        """Percentiles of values that come in streams."""
        sample = [gap for gaps in streams for gap in gaps]
        if not sample:
            return
        for label, q in PERCENTILES.items():
            rng = stats.named_rng(self.seed, f"{name}/{label}")
            interval = stats.clustered_quantile_interval(streams, q, rng)
            self._add_percentile(f"{name}/{label}", stats.quantile(sample, q), interval)

    def add_user_speed(self, speeds: Sequence[float]) -> None:
        """How fast a user's stream goes on, in tokens a second: the median, and what nine of ten get at least."""
        for label, q in (("p50", 0.5), ("p10", 0.1)) if speeds else ():
            name = f"output_tokens_per_s_per_user/{label}"
            self._add_percentile(name, stats.quantile(speeds, q), stats.quantile_interval(speeds, q))

    def _add_percentile(self, name: str, value: float, interval: stats.Interval | None) -> None:
        self.add(name, value, interval)
        if interval is None:
            self.weak.add(name)


def _add_latencies(figures: _Figures, served: Sequence[RequestRecord], client_error: ClientError | None) -> None:
    for name in ("ttft_s", "ttfc_s", "service_ttft_s", "tpot_s", "e2e_s", "service_e2e_s"):
        figures.add_percentiles(name, (getattr(record, name) for record in served))
    figures.add_gap_percentiles("itl_s", [record.itl_s() for record in served])
    figures.add_user_speed([1.0 / record.tpot_s for record in served if record.tpot_s])
    if client_error is not None:
        shortest = "ttft_s/p50" if "ttft_s/p50" in figures.metrics else "e2e_s/p50"
        figures.add("client_error_frac", client_error.stamp_lag_s / figures.metrics[shortest], None)


def _add_shares(figures: _Figures, measured: Sequence[RequestRecord], slo: Slo) -> None:
    num_good = sum(slo.is_met(record) for record in measured)
    figures.add("slo_good_frac", num_good / len(measured), stats.share_interval(num_good, len(measured)))
    known = [record for record in measured if record.num_cached_tokens is not None]
    if known:
        num_prompt_tokens = sum(record.num_prompt_tokens for record in known)
        num_cached_tokens = sum(record.num_cached_tokens or 0 for record in known)
        figures.add("cached_prompt_frac", num_cached_tokens / num_prompt_tokens, None)


def _add_rates(
    figures: _Figures, ordered: Sequence[RequestRecord], slo: Slo, window: tuple[float, float], num_units: int
) -> None:
    served = [record for record in ordered if record.ok]
    start_s, end_s = window
    usual_s = float(np.median([left_at_s(record) - record.sent_at_s for record in served]))
    num_blocks = min(MAX_BLOCKS, max(MIN_BLOCKS, int((end_s - start_s) / max(usual_s, 1e-9))))
    edges = np.linspace(start_s, end_s, num_blocks + 1)
    rates = {
        "request_rps": (request_work(served), 1),
        "goodput_rps": (request_work([record for record in served if slo.is_met(record)]), 1),
        "prompt_tokens_per_s_per_gpu": (prompt_work(served), num_units),
    }
    if any(record.task is Task.GENERATE for record in served):
        rates["output_tokens_per_s_per_gpu"] = (output_work(served), num_units)
        rates["tokens_per_s_per_gpu"] = (joined(prompt_work(served), output_work(served)), num_units)
    for name, (work, units) in rates.items():
        blocks = [work.between(a, b) / (b - a) / units for a, b in pairwise(edges)]
        # Requests are counted by the share of their time in a block. In a window that holds too few whole ones the
        # same requests fill every block, and blocks that must be alike say nothing about spread.
        is_carried = name not in REQUEST_RATES or end_s - start_s >= MIN_BLOCKS * usual_s
        interval = stats.mean_interval(blocks) if is_carried else None
        value = work.between(start_s, end_s) / (end_s - start_s) / units
        figures.add(name, value, None if interval is None else (max(0.0, interval[0]), interval[1]))
    figures.add("window_s", end_s - start_s, None)
