"""Which cells are worth choosing: the Pareto front of two figures, with what their intervals leave open. Pure.

    front      nothing measured can be better in both figures
    dominated  something is better in one figure and not worse in the other, and the intervals say so
    maybe      something is so by its values, but the intervals overlap: more requests would tell

Of two figures whose intervals overlap neither is better. Equal points are both kept.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.costs.schema import CostTableRow
from workbench.sweeps.cells import CellKind, CellResult


class Goal(StrEnum):
    """Which way a figure is better."""

    MORE = "more"
    LESS = "less"


class Standing(StrEnum):
    """Where a point stands against all others."""

    FRONT = "front"
    MAYBE = "maybe"
    DOMINATED = "dominated"


@dataclass(frozen=True, slots=True)
class Figure:
    """A value between the ends of its interval; a figure without an interval decides nothing against another."""

    value: float
    low: float | None = None
    high: float | None = None

    def __post_init__(self) -> None:
        ends = [end for end in (self.low, self.value, self.high) if end is not None]
        if not all(math.isfinite(end) for end in ends) or sorted(ends) != ends:
            raise ValueError(f"a figure lies between the ends of its interval: {self.low}, {self.value}, {self.high}")


@dataclass(frozen=True, slots=True)
class Point:
    """Something to choose, by two figures."""

    name: str
    x: Figure
    y: Figure


@dataclass(frozen=True, slots=True)
class Placed:
    """A point and where it stands; `by` names the points that are better, surely or maybe."""

    point: Point
    standing: Standing
    by: tuple[str, ...] = ()


def pareto_front(points: Sequence[Point], x: Goal, y: Goal) -> tuple[Placed, ...]:
    """Each point with its standing, in the given order."""
    return tuple(_placed(point, [other for other in points if other is not point], (x, y)) for point in points)


def _placed(point: Point, others: Iterable[Point], goals: tuple[Goal, Goal]) -> Placed:
    surely: list[str] = []
    maybe: list[str] = []
    for other in others:
        pairs = ((other.x, point.x, goals[0]), (other.y, point.y, goals[1]))
        gains = [_gain(theirs.value, ours.value, goal) for theirs, ours, goal in pairs]
        if min(gains) < 0 or max(gains) <= 0:
            continue
        # Worse in neither by value and better in one; sure where the intervals part for every figure that differs.
        is_sure = all(gain == 0 or _is_apart(*pair) for gain, pair in zip(gains, pairs, strict=True))
        (surely if is_sure else maybe).append(other.name)
    if surely:
        return Placed(point, Standing.DOMINATED, tuple(surely))
    return Placed(point, Standing.MAYBE if maybe else Standing.FRONT, tuple(maybe))


def _gain(theirs: float, ours: float, goal: Goal) -> float:
    return theirs - ours if goal is Goal.MORE else ours - theirs


def _is_apart(theirs: Figure, ours: Figure, goal: Goal) -> bool:
    if theirs.low is None or theirs.high is None or ours.low is None or ours.high is None:
        return False
    return theirs.low > ours.high if goal is Goal.MORE else theirs.high < ours.low


def speed_points(cells: Iterable[CellResult]) -> tuple[Point, ...]:
    """Tokens a second of a unit (x) and of a user (y) of the mixed cells that count.

    A user's rate is that of the whole replica over the concurrency; its interval is the rate's.
    """
    name = "output_tokens_per_s_per_gpu"
    points = []
    for cell in cells:
        if cell.spec.kind is not CellKind.MIXED or cell.invalid is not None or name not in cell.metrics:
            continue
        share = cell.num_units / cell.spec.concurrency
        rate = _figure(cell.metrics[name], cell.intervals.get(name), is_weak=name in cell.weak)
        points.append(Point(cell.spec.cell_id, rate, _scaled(rate, share)))
    return tuple(points)


def latency_points(cells: Iterable[CellResult], latency: str) -> tuple[Point, ...]:
    """Tokens a second of a unit (x) and a latency such as `ttft_s/p99` in seconds (y) of the mixed cells that count.

    A percentile that its sample is too small to carry has no interval, so it decides nothing.
    """
    rate = "output_tokens_per_s_per_gpu"
    points = []
    for cell in cells:
        if cell.spec.kind is CellKind.MIXED and cell.invalid is None and {rate, latency} <= cell.metrics.keys():
            figures = (
                _figure(cell.metrics[name], cell.intervals.get(name), is_weak=name in cell.weak)
                for name in (rate, latency)
            )
            points.append(Point(cell.spec.cell_id, *figures))
    return tuple(points)


def cost_points(rows: Iterable[CostTableRow], cells: Iterable[CellResult]) -> tuple[Point, ...]:
    """Usd a million output tokens (x) and TTFT P99 (y) of cost rows; the interval of TTFT is the cell's.

    The price's interval follows the rate's: a price is money a second over tokens a second.
    """
    by_key = {_key(cell): cell for cell in cells if cell.invalid is None and cell.spec.kind is CellKind.MIXED}
    points = []
    for row in rows:
        key = (row.engine_fingerprint, row.num_prompt_tokens, row.num_output_tokens, row.concurrency)
        cell = by_key.get(key)
        rate, price = row.output_tokens_per_s_per_gpu, row.usd_per_million_output_tokens
        if row.ttft_p99_s is None or rate is None or rate <= 0 or row.target != "engine":
            continue
        ends = None
        if row.ci_low is not None and row.ci_high is not None and row.ci_low > 0:
            ends = (price * rate / row.ci_high, price * rate / row.ci_low)
        interval = None if cell is None else cell.intervals.get("ttft_s/p99")
        ttft = _figure(row.ttft_p99_s, interval, is_weak=False)
        shape = f"{row.num_prompt_tokens}x{row.num_output_tokens}-c{row.concurrency}"
        points.append(Point(f"{row.model}@{row.version}-{row.hardware_class}-{shape}", _figure(price, ends), ttft))
    return tuple(points)


def _key(cell: CellResult) -> tuple[str, int, int, int]:
    shape = cell.spec.shape
    return cell.engine_fingerprint, shape.num_prompt_tokens, shape.num_output_tokens, cell.spec.concurrency


def _figure(value: float, interval: tuple[float, float] | None, *, is_weak: bool = False) -> Figure:
    """The figure; an interval of block means that misses the value itself by rounding is widened to it."""
    if interval is None or is_weak:
        return Figure(value)
    return Figure(value, min(interval[0], value), max(interval[1], value))


def _scaled(figure: Figure, factor: float) -> Figure:
    ends = (None if end is None else end * factor for end in (figure.low, figure.high))
    return Figure(figure.value * factor, *ends)
