"""Two benchmarks in turns: A B | B A | A B …, which one begins each pair by a coin.

A change of the machine, or a neighbour who comes and goes, then falls on both alike. Each run has prompts and a cache
salt of its own: nothing is served from what an earlier run left in a prefix cache.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from workbench.benchmark.request import BenchRequest
from workbench.benchmark.result import BenchResult
from workbench.benchmark.run import SpecError, WorkloadError, abench
from workbench.comparison.cells import Difference, RunComparison
from workbench.comparison.compare import compare
from workbench.config import WorkbenchConfig

__all__ = ["BenchRequest", "Measured", "SpecError", "WorkloadError", "in_turns", "judged", "request_of"]

WARM_UP_REQUESTS = 8
OnRun = Callable[[int, int, str, BenchResult], None]


@dataclass(frozen=True, slots=True)
class Measured:
    """The runs of both sides, in the order of their turns."""

    baseline: tuple[BenchResult, ...]
    candidate: tuple[BenchResult, ...]


def request_of(name: str, model: str | None, **more: Any) -> BenchRequest:
    """What is asked of a served model (NAME or NAME@VERSION), or of `model` at an address.

    Raises:
        SpecError: an address without a model.
    """
    if "://" not in name:
        return BenchRequest(model=name, **more)
    if model is None:
        raise SpecError(f"{name} is an address: say which model to ask there")
    return BenchRequest(model=model, url=name, **more)


async def in_turns(
    config: WorkbenchConfig | None,
    baseline: BenchRequest,
    candidate: BenchRequest,
    *,
    num_pairs: int = 8,
    seed: int | None = None,
    on_run: OnRun = lambda number, total, side, result: None,
) -> Measured:
    """Measures both, pair by pair, after a few requests to each that nobody measures.

    Args:
        config: of the stack; None where both have a url.
        baseline: A.
        candidate: B, with the same load and workload.
        num_pairs: runs of each.
        seed: of the coin.
        on_run: told of each run: its number, how many there are, whose it is, and what came out.

    Raises:
        ValueError: no pairs.
        SpecError, NotRunning, NotFound, Unavailable, WorkloadError: as `abench`.
    """
    if num_pairs < 1:
        raise ValueError(f"num_pairs is {num_pairs}; one pair at least")
    coin = random.Random(seed)
    asked = {"A": baseline, "B": candidate}
    for request in asked.values():
        await abench(config, replace(request, load="closed:concurrency=1", num_requests=WARM_UP_REQUESTS))
    runs: dict[str, list[BenchResult]] = {"A": [], "B": []}
    for pair in range(num_pairs):
        for turn, side in enumerate("AB" if coin.random() < 0.5 else "BA", start=1):
            result = await abench(config, asked[side])
            runs[side].append(result)
            on_run(2 * pair + turn, 2 * num_pairs, side, result)
    return Measured(tuple(runs["A"]), tuple(runs["B"]))


def judged(pair: Measured, *, metrics: Sequence[str] | None = None) -> RunComparison:
    """Whether B is better: what differs between two that were named side by side is what is asked about.

    Raises:
        NotComparable, UnknownMetric: as `workbench.comparison.cells.compare_cells`.
    """
    allow = [difference.value for difference in Difference if difference is not Difference.SEPARATE]
    return compare(pair.baseline, pair.candidate, metrics=metrics, allow=allow).result
