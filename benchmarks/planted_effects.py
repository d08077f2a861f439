"""What each planted fault does to accuracy: the sound model and the fault asked the same many items, on real engines.

    python -m benchmarks.planted_effects [--quick] [--json FILE]

Items are those of suite `gate`, asked of the engine itself, an engine a core at a time; `--quick` has three faults.
Answers are kept task by task, by the digest of weights, flags and items, below `.workbench/planted`: a run that was cut
off goes on where it was. The lines that it prints are what `evals/fault_effects.py` keeps.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, run
from benchmarks.planted_engines import BASE, FOLDER, MODEL, Planted, flags, made, planted, served, sound
from evals import readings, results
from evals.compare import TOLERANCE
from evals.endpoint import Endpoint
from evals.harness import ask
from evals.results import Evaluation
from evals.suite_compare import SuiteComparison, compare_suites
from evals.suites import items_digest, suite_of
from evals.tasks import Item
from serving.core.sequential import Verdict
from serving.engine.weights import Weights

SUITE = "gate"
CONCURRENCY = 32
ITEMS_SEED = 0


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """The accuracy that each planted fault costs, on real engines."""
    base = sound(console.print)
    asked = asyncio.run(_all([Planted(BASE, 0), Planted(BASE, 1), *planted(mode)], base, console))
    champion, again, *faulty = asked
    found = {one.name: compare_suites(champion, theirs) for one, theirs in zip(planted(mode), faulty, strict=True)}
    for name, comparison in found.items():
        console.print(line(name, comparison), highlight=False)
    floor = compare_suites(champion, again)
    return [
        at_most("sound model against itself: share of items that differ", floor.pool.discordant_frac, 0.02),
        *(_bar(name, comparison) for name, comparison in found.items()),
    ]


def line(name: str, found: SuiteComparison) -> str:
    """A fault's accuracy, and the tasks that move most."""
    low, high = (100.0 * end for end in found.pool.interval)
    tasks = ", ".join(f"{task} {100.0 * one.comparison.effect:+.1f}" for task, one in found.tasks.items())
    return f"{name}: {100.0 * found.pool.effect:+.2f} points [{low:+.2f}, {high:+.2f}], {found.verdict}; {tasks}"


def _bar(name: str, found: SuiteComparison) -> Bar:
    """A drop past the tolerance must not pass."""
    is_worse = found.pool.interval[1] < -TOLERANCE
    value = f"{100.0 * found.pool.effect:+.1f} points, {found.verdict}"
    return (
        Bar(name, value, "no pass", found.verdict is not Verdict.PASS) if is_worse else Bar(name, value, "shown", None)
    )


async def _all(faults: Sequence[Planted], base: Weights, console: Console) -> list[Evaluation]:
    """Each asked, as many at once as there are cores."""
    cores: asyncio.Queue[int] = asyncio.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put_nowait(core)

    async def one_of(one: Planted) -> Evaluation:
        core = await cores.get()
        try:
            return await evaluation_of(one, base, core, console)
        finally:
            cores.put_nowait(core)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_of(one)) for one in faults]
    return [task.result() for task in tasks]


async def evaluation_of(one: Planted, base: Weights, core: int, console: Console) -> Evaluation:
    """The fault's answers to the suite: those kept, the others asked of an engine that is started for them."""
    items = suite_of(SUITE).items(ITEMS_SEED)
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    with made(one, base) as weights:
        missing = [of_task for of_task in by_task.values() if not _path(one, weights, of_task).is_file()]
        if missing:
            console.print(f"[dim]{one.name}: starting the engine on core {core} …")
            async with served(one, weights, core) as url:
                endpoint = Endpoint(url, MODEL, weights.path, concurrency=CONCURRENCY)
                for of_task in missing:
                    await _ask(one, weights, of_task, endpoint, console)
        parts = [results.read(_path(one, weights, of_task)) for of_task in by_task.values()]
    seconds = {task: taken for part in parts for task, taken in part.seconds.items()}
    found = tuple(item for part in parts for item in part.items)
    return replace(parts[0], seconds=seconds, items=found, digest=items_digest(items))


async def _ask(one: Planted, weights: Weights, items: list[Item], endpoint: Endpoint, console: Console) -> None:
    began_at = datetime.now(UTC).isoformat(timespec="seconds")
    found, seconds = await asyncio.to_thread(ask, items, endpoint, seed=ITEMS_SEED)
    about = (MODEL, one.name, SUITE, ITEMS_SEED, items_digest(items), weights.digest, CONCURRENCY, None, began_at)
    results.write(Evaluation(*about, seconds, tuple(found)), _path(one, weights, items))
    console.print(f"[dim]{one.name}: {items[0].task}, {len(items)} items in {sum(seconds.values()):.0f} s")


def _path(one: Planted, weights: Weights, items: list[Item]) -> Path:
    key = readings.digest([weights.digest, flags().model_dump(mode="json"), items_digest(items), CONCURRENCY])
    return FOLDER / "answers" / f"{one.name}-{items[0].task}-{key[:16]}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("planted_effects", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
