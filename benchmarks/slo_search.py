"""How often the search for the highest load under an SLO finds a capacity that is known in closed form.

Engines are drawn at random, seed by seed, and so is where the search begins: up to six doublings below the capacity or
one above. Batching engines are searched by users in flight, queues by requests a second. Found is an answer within 5 %
of the truth; a search may take 10 cells. The search's constants were chosen on seeds 0 to 199: others are drawn here.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable

import numpy as np
from rich.console import Console

from benchmarks.harness import Bar, Mode, at_least, at_most, run
from benchmarks.modelled_engines import BatchEngine, QueueEngine, random_batch, random_queue
from workbench.slo.search import Capacity, Probe, SearchPlan, search

TOLERANCE = 0.05
MAX_CELLS = 10
MIN_SHARE = 0.95
FIRST_FRESH_SEED = 5000
NUM_SEEDS = {Mode.QUICK: 20, Mode.FULL: 200}

Searched = Callable[[int], tuple[float, Capacity]]


def find(plan: SearchPlan, engine: QueueEngine | BatchEngine, rng: np.random.Generator) -> Capacity:
    """The search to its end, each cell drawn from the engine."""
    probes: list[Probe] = []
    while True:
        step = search(plan, probes)
        if isinstance(step, Capacity):
            return step
        probes.append(engine.probe(step.load, rng, step.effort))


def on_queue(seed: int) -> tuple[float, Capacity]:
    """The true capacity of the seed's queue in requests a second, and what was found."""
    rng = np.random.default_rng([seed, 1])
    engine = random_queue(rng)
    capacity = engine.capacity()
    start = capacity * 2 ** rng.uniform(-6, 1)
    return capacity, find(SearchPlan(start, start / 1000, start * 1000), engine, rng)


def on_batch(seed: int) -> tuple[float, Capacity]:
    """The true capacity of the seed's batching engine in users in flight, and what was found."""
    rng = np.random.default_rng([seed, 2])
    engine = random_batch(rng)
    capacity = engine.capacity()
    start = max(1, round(capacity * 2 ** rng.uniform(-6, 1)))
    return capacity, find(SearchPlan(start, 1, 4096, is_whole=True), engine, rng)


def bars_of(name: str, searched: Searched, num_seeds: int, *, judged: bool) -> list[Bar]:
    """The share of searches that found the capacity, and what they took."""
    outcomes = [searched(seed) for seed in range(FIRST_FRESH_SEED, FIRST_FRESH_SEED + num_seeds)]
    is_found = [found.load is not None and abs(found.load / true - 1) <= TOLERANCE for true, found in outcomes]
    num_cells = [found.num_cells for _, found in outcomes]
    endings = Counter(found.ending.value for _, found in outcomes)
    return [
        at_least(
            f"{name}: found within 5 %, share of {num_seeds} seeds", sum(is_found) / num_seeds, MIN_SHARE, judged=judged
        ),
        at_most(f"{name}: most cells", max(num_cells), MAX_CELLS),
        Bar(f"{name}: cells, mean", float(np.mean(num_cells)), "shown", None),
        Bar(
            f"{name}: endings",
            ", ".join(f"{ending} {count}" for ending, count in sorted(endings.items())),
            "shown",
            None,
        ),
    ]


def measure(mode: Mode, console: Console) -> list[Bar]:
    """Searches on modelled engines of known capacity. A few seeds cannot judge a share."""
    bars: list[Bar] = []
    for name, searched in (("batching engine, users", on_batch), ("queue, requests a second", on_queue)):
        console.print(f"[dim]{name}: {NUM_SEEDS[mode]} searches …")
        bars += bars_of(name, searched, NUM_SEEDS[mode], judged=mode is Mode.FULL)
    return bars


if __name__ == "__main__":
    sys.exit(run("slo_search", measure))
