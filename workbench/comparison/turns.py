"""Which runs of A and B make pairs, and which pairs are one piece of evidence together.

A B | B A | A B        a cell in turns: three turns of one pair
A1 A2 B1 B2 | …        two cells of a sweep, then of the other: one turn of two pairs
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from workbench.sweeps.cells import CellResult

Pair = tuple[CellResult, CellResult]


@dataclass(frozen=True, slots=True)
class Paired:
    """Pairs of runs, gathered by turns: one turn is one piece of evidence, however many cells it measured."""

    turns: tuple[tuple[Pair, ...], ...]
    num_invalid: int
    num_single: int


def neighbours(baseline: Sequence[CellResult], candidate: Sequence[CellResult]) -> Paired:
    """Runs of one cell next to each other in time, one of each side; of several of one side the last waits."""
    runs = sorted(
        [(cell.started_at_s, 0, cell) for cell in baseline] + [(cell.started_at_s, 1, cell) for cell in candidate],
        key=lambda run: run[:2],
    )
    pairs: list[Pair] = []
    num_single = 0
    waiting: tuple[int, CellResult] | None = None
    for _, side, cell in runs:
        if waiting is not None and waiting[0] != side:
            pairs.append((waiting[1], cell) if side else (cell, waiting[1]))
            waiting = None
        else:
            num_single += 0 if waiting is None else 1
            waiting = (side, cell)
    valid = [pair for pair in pairs if pair[0].invalid is None and pair[1].invalid is None]
    return Paired(tuple((pair,) for pair in valid), len(pairs) - len(valid), num_single + (waiting is not None))


def in_order(baseline: Sequence[CellResult], candidate: Sequence[CellResult]) -> Paired:
    """The first valid run of A with the first valid one of B, and so on."""
    valid = [
        sorted((c for c in side if c.invalid is None), key=lambda c: c.started_at_s) for side in (baseline, candidate)
    ]
    pairs = list(zip(*valid, strict=False))
    num_single = abs(len(valid[0]) - len(valid[1]))
    return Paired(
        tuple(((a, b),) for a, b in pairs), len(baseline) + len(candidate) - 2 * len(pairs) - num_single, num_single
    )


def together(paired: Iterable[Paired], *, share_turns: bool) -> Paired:
    """The pairs of all cells. Those whose times overlap (a sweep of A, then one of B) share a turn, if asked."""
    every = list(paired)
    pairs = sorted((pair for one in every for turn in one.turns for pair in turn), key=lambda pair: _span_s(pair)[0])
    turns: list[list[Pair]] = []
    until_s = float("-inf")
    for pair in pairs:
        start_s, end_s = _span_s(pair)
        if share_turns and start_s < until_s:
            turns[-1].append(pair)
        else:
            turns.append([pair])
        until_s = max(until_s, end_s)
    return Paired(tuple(map(tuple, turns)), sum(one.num_invalid for one in every), sum(one.num_single for one in every))


def _span_s(pair: Pair) -> tuple[float, float]:
    starts_s = sorted(cell.started_at_s for cell in pair)
    return starts_s[0], starts_s[1]
