"""Whether an engine that takes 5 % longer a step is found, and in how many minutes.

    python -m benchmarks.effect_found [--quick]                   two fake engines, the second 5 % slower
    python -m benchmarks.effect_found --vllm                      two real ones, the second with a plugin that sleeps
    python -m benchmarks.effect_found --url A --against B --model NAME   any two; nothing else may use either

Cells of the two in pairs, the order of each pair by a coin, until the pairs are full; then `stats.compare`. Where the
second is slower by our doing it is judged that it is seen as such; of any two, that it took at most 10 minutes.
`--vllm` starts SmolLM2 twice on the first core, where only one of them ever works, and stays on the last itself.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path
from random import SystemRandom

from rich.console import Console

from benchmarks import slow_step
from benchmarks.harness import REPOSITORY, Bar, Mode, at_most, equal_to, run
from benchmarks.noise_floor import (
    CELL_S,
    FAKE_ITL_MS,
    FAKE_MODEL,
    METRICS,
    Cell,
    Load,
    arguments,
    fake_engine,
    measure_cell,
    size_of_cell,
)
from benchmarks.real_engine import vllm_engine
from workbench import stats
from workbench.loadgen import Target

NUM_PAIRS = {Mode.QUICK: 7, Mode.FULL: 12}
SLOWER = 1.05
MAX_MINUTES = 10.0

Measured = tuple[list[tuple[Cell, Cell]], float]


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--against")
    parser.add_argument("--vllm", action="store_true")
    mine, others = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    own, rest = arguments(others)
    if (own.url is None) != (mine.against is None):
        parser.error("--url and --against go together: two engines, or neither for two fakes")
    if mine.vllm and own.url is not None:
        parser.error("--vllm starts its own engines: leave out --url and --against")

    def measure(mode: Mode, console: Console) -> list[Bar]:
        num_cells, cell_s = 2 * (own.cells or NUM_PAIRS[mode]), own.cell_s or CELL_S[mode]
        load = Load(own.prompt_tokens, own.output_tokens, own.concurrency, num_cells, cell_s)
        urls = None if own.url is None else (own.url, mine.against)
        measured = _of_vllm(load, console) if mine.vllm else _measured(urls, own.model, load, console)
        pairs, measured_s = asyncio.run(measured)
        return judge(pairs, measured_s / 60.0, is_known=urls is None)

    measure.__doc__ = "An engine that takes 5 % longer a step, found by pairs."
    return run("effect_found", measure, rest)


async def _of_vllm(load: Load, console: Console) -> Measured:
    """Two real engines, the second with the plugin."""
    model = "smollm2-135m"
    async with AsyncExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        slow = (slow_step.metadata(folder / "plugin"), REPOSITORY)
        targets = []
        for name, python_path in (("A", ()), ("B", slow)):
            console.print(f"[dim]starting vLLM {name} …")
            engine = vllm_engine(folder, model, name, python_path=python_path)
            targets.append(Target(await parts.enter_async_context(engine), model))
        # The engines keep to the first core; a client of many threads would not keep to one by itself.
        os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
        return await in_turns(targets, load, console)


async def _measured(urls: tuple[str, str] | None, model: str, load: Load, console: Console) -> Measured:
    if urls is not None:
        return await in_turns([Target(url, model) for url in urls], load, console)
    async with AsyncExitStack() as parts:
        folder = Path(parts.enter_context(tempfile.TemporaryDirectory()))
        fakes = [
            await parts.enter_async_context(fake_engine(_made(folder / name), itl_ms))
            for name, itl_ms in (("A", FAKE_ITL_MS), ("B", FAKE_ITL_MS * SLOWER))
        ]
        return await in_turns([Target(url, FAKE_MODEL) for url in fakes], load, console)


def _made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def in_turns(targets: Sequence[Target], load: Load, console: Console) -> Measured:
    """Cells of both, pair by pair, the order of each by a coin; and how long they took, pilots included."""
    started_s = time.monotonic()
    by_side = dict(zip(stats.Side, targets, strict=True))
    sizes = [await size_of_cell(target, load) for target in targets]  # both, for it also warms an engine up
    num_requests = sizes[0]
    orders = stats.pair_orders(load.num_cells // 2, stats.named_rng(SystemRandom().randrange(2**32), "orders"))
    pairs = []
    for number, order in enumerate(orders):
        cells = {side: await measure_cell(by_side[side], load, num_requests) for side in order}
        pairs.append((cells[stats.Side.BASELINE], cells[stats.Side.CANDIDATE]))
        console.print(f"[dim]pair {number + 1} of {len(orders)}: A {pairs[-1][0]}, B {pairs[-1][1]}")
    return pairs, time.monotonic() - started_s


def judge(pairs: Sequence[tuple[Cell, Cell]], minutes: float, *, is_known: bool) -> list[Bar]:
    """The verdict by each metric; on fakes (`is_known`) it must be the right one, and in time."""
    valid = [pair for pair in pairs if all(cell.summary.invalid is None for cell in pair)]
    figures = {name: [(a.summary.metrics[name], b.summary.metrics[name]) for a, b in valid] for name in METRICS}
    found = stats.compare(figures, METRICS)
    bars = [equal_to("pairs that count", len(valid), len(pairs)), at_most("minutes", minutes, MAX_MINUTES)]
    for one in found.compared:
        interval = f"{one.ratio:.4f} ({one.low:.4f} – {one.high:.4f})"
        bars.append(Bar(f"{one.metric}: B / A", interval, "shown", None))
        # Of fakes it is known; their TTFT hardly depends on the time of a step.
        is_judged = is_known and not one.metric.startswith("ttft")
        bars.append(equal_to(one.metric, str(one), "worse") if is_judged else Bar(one.metric, str(one), "shown", None))
    return bars + [Bar(name, f"no verdict: {refusal}", "a verdict", False) for name, refusal in found.refused.items()]


if __name__ == "__main__":
    sys.exit(main())
