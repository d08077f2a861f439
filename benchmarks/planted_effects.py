"""What each planted fault does to accuracy: the sound model and the fault asked the same many items, on real engines.

    python -m benchmarks.planted_effects [--quick] [--json FILE]

Items are those of suite `gate` (`--quick`: `smoke`), asked of the engine itself, an engine a core at a time. Answers
are kept by the digest of weights, flags and items below `.workbench/planted`, so a run that was cut off goes on where
it was. The lines that it prints are what `evals/fault_effects.py` keeps.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, run
from benchmarks.planted_engines import BASE, FOLDER, MODEL, Planted, engine_on, flags, made, planted, sound
from evals import readings, results
from evals.compare import TOLERANCE
from evals.endpoint import Endpoint
from evals.harness import ask
from evals.results import Evaluation
from evals.suite_compare import SuiteComparison, compare_suites
from evals.suites import items_digest, suite_of
from serving.core.sequential import Verdict
from serving.engine.weights import Weights

SUITE = {Mode.QUICK: "smoke", Mode.FULL: "gate"}
CONCURRENCY = 32
ITEMS_SEED = 0


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """The accuracy that each planted fault costs, on real engines."""
    base = sound(console.print)
    asked = asyncio.run(_all([Planted(BASE, 0), Planted(BASE, 1), *planted(mode)], base, SUITE[mode], console))
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


async def _all(faults: Sequence[Planted], base: Weights, suite: str, console: Console) -> list[Evaluation]:
    """Each asked, as many at once as there are cores."""
    cores: asyncio.Queue[int] = asyncio.Queue()
    for core in sorted(os.sched_getaffinity(0)):
        cores.put_nowait(core)

    async def one_of(one: Planted) -> Evaluation:
        core = await cores.get()
        try:
            return await answers_of(one, base, suite, core, console)
        finally:
            cores.put_nowait(core)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(one_of(one)) for one in faults]
    return [task.result() for task in tasks]


async def answers_of(one: Planted, base: Weights, suite: str, core: int, console: Console) -> Evaluation:
    """The fault's answers to the suite: those kept, or asked of an engine that is started for it."""
    with made(one, base) as weights:
        kept = _path(one, weights, suite)
        if kept.is_file():
            return results.read(kept)
        console.print(f"[dim]{one.name}: starting the engine on core {core} …")
        async with engine_on(weights, one.name, core) as url:
            endpoint = Endpoint(url, MODEL, weights.path, concurrency=CONCURRENCY)
            items = suite_of(suite).items(ITEMS_SEED)
            began_at = datetime.now(UTC).isoformat(timespec="seconds")
            found, seconds = await asyncio.to_thread(ask, items, endpoint, seed=ITEMS_SEED)
        digest = items_digest(items)
        evaluation = Evaluation(
            MODEL,
            one.name,
            suite,
            ITEMS_SEED,
            digest,
            weights.digest,
            CONCURRENCY,
            None,
            began_at,
            seconds,
            tuple(found),
        )
        results.write(evaluation, kept)
        console.print(f"[dim]{one.name}: {len(items)} items in {sum(seconds.values()):.0f} s")
        return evaluation


def _path(one: Planted, weights: Weights, suite: str) -> Path:
    items = items_digest(suite_of(suite).items(ITEMS_SEED))
    key = readings.digest([weights.digest, flags().model_dump(mode="json"), items, CONCURRENCY])
    return FOLDER / "answers" / f"{one.name}-{suite}-{key[:16]}.json"


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("planted_effects", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
