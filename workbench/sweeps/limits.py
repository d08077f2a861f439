"""What ends a sweep before its plan does: time, money, and saturation; and what a plan will take. Pure.

estimate     a cell like it that was measured says its seconds; else the assumptions below, and the result says so
budget       a cell begins only if its estimate fits what is left; the rest waits for the next run
saturation   more users brought no more tokens and the SLO is broken: higher concurrencies of that shape are skipped
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape

OVERHEAD_S = 3.0
"""Waiting for an idle replica, counters that settle, writing."""
ASSUMED_PREFILL_TOKENS_PER_S = 500.0
ASSUMED_STEP_S = 0.03
ASSUMED_STEP_S_PER_SEQ = 0.002
MAX_GAIN = 1.05
MAX_SURE_GAIN = 1.10
RATE = "output_tokens_per_s_per_gpu"
EMBED_RATE = "prompt_tokens_per_s_per_gpu"
LOADS = (CellKind.MIXED, CellKind.EMBED)


@dataclass(frozen=True, slots=True)
class CellEstimate:
    """Seconds that a cell will take; `is_assumed` when nothing like it was measured."""

    spec: CellSpec
    seconds: float
    is_assumed: bool


@dataclass(frozen=True, slots=True)
class SkippedCell:
    """A cell of the plan that was not measured, and why; `is_final` when no later run is to measure it."""

    spec: CellSpec
    reason: str
    is_final: bool


@dataclass(frozen=True, slots=True)
class SweepLimits:
    """What a sweep may take.

    Attributes:
        max_s: seconds of measuring, of this run; None is without end.
        max_usd: money, by `usd_per_s` of the replica.
        usd_per_s: price of the whole replica.
        served_within_frac: share of requests that the SLO asks for, to tell whether it is broken.
        stops_at_saturation: skip higher concurrencies once more users bring nothing.
    """

    max_s: float | None = None
    max_usd: float | None = None
    usd_per_s: float = 0.0
    served_within_frac: float = 0.99
    stops_at_saturation: bool = True

    @property
    def bound_s(self) -> float | None:
        """Seconds that time and money allow together; None without a bound."""
        bounds = [] if self.max_s is None else [self.max_s]
        if self.max_usd is not None and self.usd_per_s > 0:
            bounds.append(self.max_usd / self.usd_per_s)
        return min(bounds, default=None)

    def over_budget(self, spent_s: float, estimate: CellEstimate) -> str | None:
        """Why a cell no longer fits, or None when it does."""
        bound_s = self.bound_s
        if bound_s is None or spent_s + estimate.seconds <= bound_s:
            return None
        usd = f" (${bound_s * self.usd_per_s:.3g})" if self.usd_per_s else ""
        return (
            f"over the budget of {bound_s / 60:.3g} minutes{usd}: {spent_s / 60:.2g} are spent and this cell takes "
            f"about {estimate.seconds / 60:.2g}; run the sweep again to go on here"
        )


def estimates(specs: Iterable[CellSpec], known: Sequence[CellResult]) -> tuple[CellEstimate, ...]:
    """What each cell will take, by those of the same replica that are known."""
    return tuple(_estimate(spec, known) for spec in specs)


def _estimate(spec: CellSpec, known: Sequence[CellResult]) -> CellEstimate:
    alike = [cell for cell in known if cell.spec.kind is spec.kind and cell.invalid is None and cell.num_requests]
    same = [cell for cell in alike if cell.spec.shape == spec.shape and cell.spec.concurrency == spec.concurrency]
    if same:
        newest = max(same, key=lambda cell: cell.started_at_s)
        per_request_s = (newest.ended_at_s - newest.started_at_s) / newest.num_requests
        return CellEstimate(spec, _bounded(spec, per_request_s * spec.num_requests), is_assumed=False)
    return CellEstimate(spec, _bounded(spec, _assumed_s(spec)), is_assumed=True)


def _bounded(spec: CellSpec, seconds: float) -> float:
    return min(seconds, spec.max_duration_s) + OVERHEAD_S


def _assumed_s(spec: CellSpec) -> float:
    step_s = ASSUMED_STEP_S + ASSUMED_STEP_S_PER_SEQ * spec.concurrency
    prefill_s = spec.num_requests * spec.shape.num_prompt_tokens / ASSUMED_PREFILL_TOKENS_PER_S
    decode_s = spec.num_requests / spec.concurrency * spec.shape.num_output_tokens * step_s
    return prefill_s + decode_s


def saturated(spec: CellSpec, measured: Mapping[str, CellResult], served_within_frac: float) -> str | None:
    """Why a cell of a load need not be measured: the two highest concurrencies below it say that it is of no use.

    Returns:
        The reason, or None when the cell should be measured.
    """
    if spec.kind not in LOADS:
        return None
    below = _below(spec.kind, spec.shape, spec.concurrency, measured.values())
    if len(below) < 2:
        return None
    before, last = below[-2:]
    name = EMBED_RATE if spec.kind is CellKind.EMBED else RATE
    gain = _gain(before, last, name)
    if gain is None or not _is_broken(last, served_within_frac):
        return None
    return (
        f"saturated: {last.spec.concurrency} in flight brought {gain - 1:+.1%} tokens/s over {before.spec.concurrency} "
        f"and only {last.metrics['slo_good_frac']:.1%} of requests kept the SLO"
    )


def _below(kind: CellKind, shape: Shape, concurrency: int, cells: Iterable[CellResult]) -> list[CellResult]:
    same = [
        cell
        for cell in cells
        if cell.spec.kind is kind
        and cell.spec.shape == shape
        and cell.spec.concurrency < concurrency
        and cell.invalid is None
    ]
    return sorted(same, key=lambda cell: cell.spec.concurrency)


def _gain(before: CellResult, last: CellResult, name: str) -> float | None:
    """Rate over rate where it surely grew by little; None where it grew, or the interval leaves that open."""
    earlier, later = before.metrics.get(name), last.metrics.get(name)
    interval = last.intervals.get(name)
    if not earlier or later is None or interval is None:
        return None
    gain = later / earlier
    return gain if gain <= MAX_GAIN and interval[1] / earlier <= MAX_SURE_GAIN else None


def _is_broken(cell: CellResult, served_within_frac: float) -> bool:
    interval = cell.intervals.get("slo_good_frac")
    return interval is not None and interval[1] < served_within_frac
