"""The highest load that keeps an SLO, to 5 % in at most 10 cells. Pure: all cells -> the next load, or the end.

    bracket   doubled, then quadrupled, until a load breaks the SLO; halved until one keeps it
    bisect    at the median of what all cells say of the capacity (workbench/slo/posterior.py)
    flank     once that is within 15 %: a little below and a little above the median, where a cell says the most

A cell counts by its own error. A load is *kept* when every limit is at 97.5 %, *broken* when one is at 97.5 %, else
inconclusive: such a cell ends nothing, is measured again, and all its measurements count together.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from workbench.slo.posterior import Posterior, posterior
from workbench.slo.readings import Reading

MAX_FACTOR = 4.0
SURE = 0.975
MAX_REPEATS = 2
NEAR_FRAC = 0.15
NEAR_EFFORT = 2
FLANK_FRAC = (0.025, 0.05)


class Verdict(StrEnum):
    """Whether a load keeps the SLO."""

    KEPT = "kept"
    BROKEN = "broken"
    INCONCLUSIVE = "inconclusive"


@dataclass(frozen=True, slots=True)
class Probe:
    """One cell of a search. `is_complete`: every limit has a reading; a load is not called kept without."""

    load: float
    readings: tuple[Reading, ...]
    is_complete: bool = True


@dataclass(frozen=True, slots=True)
class SearchPlan:
    """What is searched.

    Attributes:
        start: the first load.
        lowest, highest: loads that are never left.
        is_whole: loads are whole numbers (concurrency), or any (requests a second).
        tolerance_frac: half the width of the interval, against its middle, that ends the search.
        max_cells: measurements, repeated ones too.
    """

    start: float
    lowest: float
    highest: float
    is_whole: bool = False
    tolerance_frac: float = 0.05
    max_cells: int = 10

    def __post_init__(self) -> None:
        if not 0 < self.lowest <= self.start <= self.highest:
            raise ValueError(f"loads: 0 < {self.lowest} <= {self.start} <= {self.highest} must hold")
        if not 0 < self.tolerance_frac < 1 or self.max_cells < 2:
            raise ValueError("a search needs a tolerance between 0 and 1 and at least 2 cells")

    def load(self, wanted: float) -> float:
        """The nearest load that can be asked for."""
        held = min(max(wanted, self.lowest), self.highest)
        return float(round(held)) if self.is_whole else held


@dataclass(frozen=True, slots=True)
class Measure:
    """The search goes on: measure this load, with `effort` times the usual requests; `why` for people."""

    load: float
    why: str
    effort: int = 1


class Ending(StrEnum):
    """How a search ended."""

    FOUND = "found"
    CELLS_USED_UP = "cells_used_up"
    NEVER_KEPT = "never_kept"
    ALWAYS_KEPT = "always_kept"
    TOO_FEW_REQUESTS = "too_few_requests"


@dataclass(frozen=True, slots=True)
class Capacity:
    """The answer. `load` is None where there is none; `low` and `high` bound the capacity, None where nothing does.

    `limit` names what breaks first. `reason` says in words how it ended and what to do about it.
    """

    ending: Ending
    load: float | None
    low: float | None
    high: float | None
    limit: str | None
    num_cells: int
    reason: str


def search(plan: SearchPlan, probes: Sequence[Probe]) -> Measure | Capacity:
    """What to do after these cells, in any order."""
    if not probes:
        return Measure(plan.load(plan.start), "the first cell")
    low, high = _bracket(probes)
    if low is None or high is None:
        return _unbracketed(plan, probes, low, high)
    where = posterior(
        [(probe.load, reading) for probe in probes for reading in probe.readings],
        max(plan.lowest * 0.99, low / MAX_FACTOR),
        min(plan.highest * 1.01, high * MAX_FACTOR),
    )
    is_narrow = _is_narrow(plan, probes, where)
    if is_narrow or len(probes) >= plan.max_cells:
        return _answer(plan, probes, where, is_narrow)
    return _next(plan, probes, where)


def verdict(probe: Probe) -> Verdict:
    """Whether the load keeps the SLO, by this cell alone."""
    if any(reading.p_kept <= 1 - SURE for reading in probe.readings):
        return Verdict.BROKEN
    if probe.is_complete and probe.readings and all(reading.p_kept >= SURE for reading in probe.readings):
        return Verdict.KEPT
    return Verdict.INCONCLUSIVE


def _worst(probe: Probe) -> Reading:
    return max(probe.readings, key=lambda reading: reading.score / reading.se)


def _bracket(probes: Sequence[Probe]) -> tuple[float | None, float | None]:
    """The lowest load that broke, and the highest kept one below it."""
    high = min((probe.load for probe in probes if verdict(probe) is Verdict.BROKEN), default=None)
    kept = [probe.load for probe in probes if verdict(probe) is Verdict.KEPT and (high is None or probe.load < high)]
    return max(kept, default=None), high


def _unbracketed(
    plan: SearchPlan, probes: Sequence[Probe], low: float | None, high: float | None
) -> Measure | Capacity:
    """Further out on the side that is missing, again where nothing was decided, or the end."""
    count = len(probes)
    edge = max(probes, key=lambda p: p.load) if high is None else min(probes, key=lambda p: p.load)
    edges = [probe for probe in probes if probe.load == edge.load]
    is_open = all(verdict(probe) is Verdict.INCONCLUSIVE for probe in edges)
    at_end = edge.load >= plan.highest if high is None else edge.load <= plan.lowest
    if count < plan.max_cells and is_open and len(edges) < (MAX_REPEATS if not at_end else MAX_REPEATS + 1):
        return Measure(edge.load, f"{edge.load:.4g} was inconclusive", NEAR_EFFORT)
    if at_end and not is_open:
        return _at_the_end(edge, low, count)
    if count >= plan.max_cells or at_end:
        return _undecided(probes, low, high)
    factor = 2.0 if len({probe.load for probe in probes}) < 2 else MAX_FACTOR
    if high is None:
        return Measure(
            plan.load(max(edge.load * factor, edge.load + plan.is_whole)), f"nothing broke at {edge.load:.4g}"
        )
    return Measure(plan.load(min(edge.load / factor, edge.load - plan.is_whole)), f"nothing is kept at {edge.load:.4g}")


def _at_the_end(edge: Probe, low: float | None, count: int) -> Capacity:
    if verdict(edge) is Verdict.BROKEN or low is None:
        limit = _worst(edge).name
        reason = f"{limit} is broken already at {edge.load:g}, the lowest load: no load keeps the SLO"
        return Capacity(Ending.NEVER_KEPT, None, None, edge.load, limit, count, reason)
    reason = f"the SLO is kept at {edge.load:g}, the highest load asked for: the capacity lies above"
    return Capacity(Ending.ALWAYS_KEPT, edge.load, edge.load, None, None, count, reason)


def _undecided(probes: Sequence[Probe], low: float | None, high: float | None) -> Capacity:
    known = "kept at no load" if low is None else f"kept at {low:g}"
    reason = f"{len(probes)} cells do not say where the SLO breaks ({known}): send more requests a cell"
    is_small = any(not probe.is_complete for probe in probes)
    ending = Ending.TOO_FEW_REQUESTS if is_small else Ending.CELLS_USED_UP
    return Capacity(ending, low, low, high, None, len(probes), reason)


def _is_narrow(plan: SearchPlan, probes: Sequence[Probe], where: Posterior) -> bool:
    """Whether the interval is within the tolerance of its middle, or two whole numbers decide it."""
    reach = 1 + plan.tolerance_frac
    if where.high <= where.load * reach and where.low >= where.load / reach:
        return True
    return plan.is_whole and math.floor(where.low) == math.floor(where.high)


def _answer(plan: SearchPlan, probes: Sequence[Probe], where: Posterior, is_narrow: bool) -> Capacity:
    load, low, high = where.load, where.low, where.high
    if plan.is_whole:
        # The capacity is the highest whole load that is kept, so a crossing is rounded down.
        load, low, high = (float(max(math.floor(value), plan.lowest)) for value in (load, low, high))
    span = f"{low:.4g} to {high:.4g}"
    if is_narrow:
        reason = f"{where.limit} breaks above {load:.4g} (95 % interval {span})"
        return Capacity(Ending.FOUND, load, low, high, where.limit, len(probes), reason)
    reason = f"{len(probes)} cells leave the capacity at {span}: send more requests a cell, or allow more cells"
    return Capacity(Ending.CELLS_USED_UP, load, low, high, where.limit, len(probes), reason)


def _next(plan: SearchPlan, probes: Sequence[Probe], where: Posterior) -> Measure:
    half = math.sqrt(where.high / where.low) - 1
    if half > NEAR_FRAC:
        load = plan.load(where.load)
        return Measure(load, f"the capacity lies between {where.low:.4g} and {where.high:.4g}", NEAR_EFFORT)
    aside = min(max(0.6 * half, FLANK_FRAC[0]), FLANK_FRAC[1])
    near = [probe.load for probe in probes if abs(math.log(probe.load / where.load)) <= 3 * FLANK_FRAC[1]]
    goes_up = sum(load > where.load for load in near) < sum(load <= where.load for load in near)
    wanted = where.load * (1 + aside) if goes_up else where.load / (1 + aside)
    if plan.is_whole:
        wanted = math.floor(where.load) + 1 if goes_up and wanted < math.floor(where.load) + 1 else wanted
        wanted = math.floor(wanted) if not goes_up else wanted
    return Measure(plan.load(wanted), f"beside {where.load:.4g}, where the limit is crossed", NEAR_EFFORT)
