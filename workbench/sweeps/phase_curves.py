"""Prefill and decode apart, from cells: how fast prompts go in by their length, how fast tokens come by concurrency.

    prefill  rate and seconds a prompt against prompt tokens   (prefill cells; cached cells beside them)
    decode   rate of all streams, and of one, against concurrency   (mixed cells, their prefill taken out)

A line through each says what a planner needs: seconds = fixed + per token x tokens, and seconds a step = base + per
stream x streams. It is given where at least three points carry it, with the interval of its two numbers. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
from scipy import stats as distributions

from workbench.stats import CONFIDENCE, Interval
from workbench.sweeps.cells import CellKind, CellResult

MIN_POINTS = 3


@dataclass(frozen=True, slots=True)
class PrefillPoint:
    """One prompt length. `s_per_prompt` is the replica's time for each, at the cell's concurrency."""

    num_prompt_tokens: int
    prompt_tokens_per_s_per_gpu: float
    s_per_prompt: float
    is_cached: bool
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class DecodePoint:
    """One concurrency of one shape. `s_per_step` is the time in which every stream gets a token."""

    num_prompt_tokens: int
    concurrency: int
    decode_tokens_per_s_per_gpu: float
    tokens_per_s_per_user: float
    s_per_step: float


@dataclass(frozen=True, slots=True)
class Line:
    """seconds = fixed_s + s_per_unit x units, with 95 % intervals by Student's t."""

    fixed_s: float
    s_per_unit: float
    fixed_interval: Interval
    slope_interval: Interval
    num_points: int


@dataclass(frozen=True, slots=True)
class PhaseCurves:
    """Both curves, ascending; a line is None where fewer than three points carry it."""

    prefill: tuple[PrefillPoint, ...]
    decode: tuple[DecodePoint, ...]
    prefill_line: Line | None
    decode_line: Line | None


def phase_curves(cells: Iterable[CellResult]) -> PhaseCurves:
    """The curves of one replica's cells; those that do not count are left out.

    Raises:
        ValueError: cells of more than one engine configuration.
    """
    valid = [cell for cell in cells if cell.invalid is None]
    if len({(cell.engine_fingerprint, cell.hardware_fingerprint) for cell in valid}) > 1:
        raise ValueError("the cells are of several engines: a curve is of one configuration on one hardware")
    prefill = sorted(
        (_prefill_point(cell) for cell in valid if cell.spec.kind in (CellKind.PREFILL, CellKind.CACHED)),
        key=lambda point: (point.is_cached, point.num_prompt_tokens),
    )
    mixed = [cell for cell in valid if cell.spec.kind is CellKind.MIXED and cell.decode_tokens_per_s]
    decode = sorted((_decode_point(c) for c in mixed), key=lambda p: (p.num_prompt_tokens, p.concurrency))
    uncached = [(float(p.num_prompt_tokens), p.s_per_prompt) for p in prefill if not p.is_cached]
    return PhaseCurves(
        tuple(prefill),
        tuple(decode),
        line(uncached),
        line([(float(point.concurrency), point.s_per_step) for point in decode]),
    )


def _prefill_point(cell: CellResult) -> PrefillPoint:
    rate = cell.prompt_tokens_per_s
    length = cell.spec.shape.num_prompt_tokens
    return PrefillPoint(
        length,
        rate / cell.num_units,
        length / rate if rate > 0 else 0.0,
        cell.spec.kind is CellKind.CACHED,
        cell.intervals.get("prompt_tokens_per_s_per_gpu"),
    )


def _decode_point(cell: CellResult) -> DecodePoint:
    rate = cell.decode_tokens_per_s or 0.0
    streams = cell.spec.concurrency
    return DecodePoint(
        cell.spec.shape.num_prompt_tokens, streams, rate / cell.num_units, rate / streams, streams / rate
    )


def line(points: Sequence[tuple[float, float]]) -> Line | None:
    """Least squares through (units, seconds); None for fewer than three points or a single number of units."""
    if len(points) < MIN_POINTS or len({units for units, _ in points}) < 2:
        return None
    x, y = np.array(points, dtype=float).T
    centred = x - x.mean()
    spread = float(centred @ centred)
    slope = float(centred @ y) / spread
    fixed = float(y.mean()) - slope * float(x.mean())
    freedom = len(points) - 2
    variance = float(np.sum((y - fixed - slope * x) ** 2)) / freedom
    t = float(distributions.t.ppf(0.5 + CONFIDENCE / 2, freedom))
    slope_half = t * (variance / spread) ** 0.5
    fixed_half = t * (variance * (1 / len(points) + float(x.mean()) ** 2 / spread)) ** 0.5
    return Line(
        fixed, slope, (fixed - fixed_half, fixed + fixed_half), (slope - slope_half, slope + slope_half), len(points)
    )
