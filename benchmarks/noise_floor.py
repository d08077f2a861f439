"""What this machine's noise lets an A/B find: identical cells one after another (an A/A), and the plan made of them.

    python -m benchmarks.noise_floor [--quick]                                 the fake engine: client and machine
    python -m benchmarks.noise_floor --vllm                                    SmolLM2 on vLLM, started here
    python -m benchmarks.noise_floor --url http://127.0.0.1:8100 --model NAME  a real engine that serves nobody else

Shown for each metric: how far identical cells lie `apart` (deviation); what `pairs` of neighbours see of that; the
correlation of a cell with the `next`; how many times as far cells lie apart as one's `own` interval says; and the
smallest change that so many pairs find four times in five. Judged is that every cell counts.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from benchmarks.harness import Bar, Mode, equal_to, run
from benchmarks.processes import child, until
from benchmarks.real_engine import vllm_engine
from workbench import stats
from workbench.loadgen import ClosedLoop, Prompt, RequestRecord, Slo, Summary, Target, run_load, summarize
from workbench.measurement.timeline import timeline

METRICS = {"output_tokens_per_s_per_gpu": True, "ttft_s/p50": False, "tpot_s/p50": False}
SHORT_NAMES = {"output_tokens_per_s_per_gpu": "tokens/s/GPU"}
SLO = Slo(60.0, 60.0)
NUM_CELLS = {Mode.QUICK: 8, Mode.FULL: 24}
CELL_S = {Mode.QUICK: 3.0, Mode.FULL: 15.0}
NUM_PAIRS = (8, 16, 32)
FAKE = ("--ttft-ms", "40", "--prefill-ms-per-token", "0.2", "--itl-ms-per-seq", "0.2")
FAKE_ITL_MS = 15.0
FAKE_MODEL = "fake-model"
TOKEN_IDS = (200, 5000)  # known to every vocabulary, and no special tokens
MAX_SECONDS_FACTOR = 10.0


@dataclass(frozen=True, slots=True)
class Load:
    """The cell that is repeated."""

    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    num_cells: int
    cell_s: float


@dataclass(frozen=True, slots=True)
class Cell:
    """One of the repeats."""

    summary: Summary
    records: list[RequestRecord]

    def __str__(self) -> str:
        if self.summary.invalid is not None:
            return f"does not count: {self.summary.invalid}"
        return f"{self.summary.metrics['output_tokens_per_s_per_gpu']:.1f} tokens/s"


def arguments(argv: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """What belongs to this benchmark, and what is left for the harness."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--url")
    parser.add_argument("--model", default=FAKE_MODEL)
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--concurrency", type=int, default=8)
    parser.add_argument("--cells", type=int)
    parser.add_argument("--cell-s", type=float)
    return parser.parse_known_args(argv)


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    parser = argparse.ArgumentParser(add_help=False)
    parser.add_argument("--vllm", action="store_true")
    mine, others = parser.parse_known_args(sys.argv[1:] if argv is None else argv)
    own, rest = arguments(others)
    if mine.vllm and own.url is not None:
        parser.error("--vllm starts its own engine: leave out --url")

    def measure(mode: Mode, console: Console) -> list[Bar]:
        num_cells, cell_s = own.cells or NUM_CELLS[mode], own.cell_s or CELL_S[mode]
        load = Load(own.prompt_tokens, own.output_tokens, own.concurrency, num_cells, cell_s)
        measured = _of_vllm(load, console) if mine.vllm else _measured(own.url, own.model, load, console)
        cells = asyncio.run(measured)
        return judge(cells, console)

    measure.__doc__ = "The spread of identical cells, and the smallest change that pairs of them find."
    return run("noise_floor", measure, rest)


async def _of_vllm(load: Load, console: Console) -> list[Cell]:
    with tempfile.TemporaryDirectory() as folder:
        console.print("[dim]starting vLLM …")
        async with vllm_engine(Path(folder), "smollm2-135m") as url:
            os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})  # the engine has the first core
            return await repeat(Target(url, "smollm2-135m"), load, console)


async def _measured(url: str | None, model: str, load: Load, console: Console) -> list[Cell]:
    if url is not None:
        return await repeat(Target(url, model), load, console)
    with tempfile.TemporaryDirectory() as folder:
        async with fake_engine(Path(folder)) as fake_url:
            return await repeat(Target(fake_url, FAKE_MODEL), load, console)


@asynccontextmanager
async def fake_engine(folder: Path, itl_ms: float = FAKE_ITL_MS) -> AsyncIterator[str]:
    """The fake engine as a process until the block ends; yields its URL."""
    port_file = folder / "port"
    words = ["serving.engine.fake", "--model", FAKE_MODEL, "--port-file", str(port_file), "--log-limit", "1", *FAKE]
    words += ["--itl-ms", str(itl_ms)]
    async with child(words, folder / "fake.log"):
        await until(lambda: asyncio.to_thread(port_file.exists), "the fake engine to listen", folder / "fake.log")
        yield f"http://127.0.0.1:{port_file.read_text().strip()}"


async def repeat(target: Target, load: Load, console: Console) -> list[Cell]:
    """The same cell again and again, with fresh prompts and a fresh cache salt each; the first one sets its size."""
    num_requests = await size_of_cell(target, load)
    console.print(f"[dim]{load.num_cells} cells of {num_requests} requests, {load.concurrency} in flight …")
    cells = []
    for number in range(load.num_cells):
        cells.append(await measure_cell(target, load, num_requests))
        console.print(f"[dim]cell {number + 1} of {load.num_cells}: {cells[-1]}")
    return cells


async def size_of_cell(target: Target, load: Load) -> int:
    """Requests that take about `cell_s`, from a pilot that is not counted; it also warms the engine up."""
    pilot = await measure_cell(target, load, 6 * load.concurrency)
    sent_s = max(record.stream_end_at_s or record.sent_at_s for record in pilot.records)
    return max(6 * load.concurrency, round(len(pilot.records) / sent_s * load.cell_s))


async def measure_cell(target: Target, load: Load, num_requests: int) -> Cell:
    """One cell, with prompts and a cache salt of its own."""
    salt = f"noise-{random.SystemRandom().randrange(2**32):08x}"
    result = await run_load(
        target,
        list(islice(_prompts(load, salt), num_requests)),
        ClosedLoop(load.concurrency),
        num_requests=num_requests,
        max_duration_s=MAX_SECONDS_FACTOR * load.cell_s + 60.0,
        cache_salt=salt,
        run_id=salt,
    )
    records = list(result.records)
    summary = summarize(records, slo=SLO, num_units=1, num_warm_up=load.concurrency, client_error=result.client_error)
    return Cell(summary, records)


def _prompts(load: Load, seed: str) -> Iterator[Prompt]:
    rng = random.Random(seed)
    while True:
        ids = tuple(rng.randrange(*TOKEN_IDS) for _ in range(load.num_prompt_tokens))
        yield Prompt(load.num_prompt_tokens, load.num_output_tokens, token_ids=ids)


def judge(cells: Sequence[Cell], console: Console) -> list[Bar]:
    """The table of the metrics, and the bars."""
    valid = [cell for cell in cells if cell.summary.invalid is None]
    bars = [equal_to("cells that count", len(valid), len(cells))]
    plans = {name: stats.plan([c.summary.metrics[name] for c in valid], num_pairs=NUM_PAIRS) for name in METRICS}
    console.print(_table(valid, plans))
    for name, plan in plans.items():
        if isinstance(plan, stats.Refusal):
            console.print(f"{name}: {plan}", highlight=False)
            continue
        bars.append(Bar(f"{name}: cells apart (deviation), %", 100 * plan.spread_frac, f"of {plan.num_repeats}", None))
        bars += [
            Bar(f"{name}: found in {row.num_pairs} pairs, %", 100 * row.effect_frac, "80 % power", None)
            for row in plan.rows
        ]
    return [*bars, *_inside(valid), *_against_itself(valid)]


def _table(cells: Sequence[Cell], plans: dict[str, stats.Plan | stats.Refusal]) -> Table:
    table = Table(
        title="Identical cells, %; smallest change found four times in five, %, by pairs", title_justify="left"
    )
    for column in ("metric", "apart", "pairs", "next", "own", *map(str, NUM_PAIRS)):
        table.add_column(column, justify="left" if column == "metric" else "right", no_wrap=True)
    for name, plan in plans.items():
        if not isinstance(plan, stats.Refusal):
            found = {row.num_pairs: f"{100 * row.effect_frac:.2g}" for row in plan.rows}
            spreads = [f"{100 * plan.spread_frac:.2g}", f"{100 * plan.pair_spread_frac:.2g}", f"{plan.memory:.2f}"]
            own = _over_own_interval(cells, name, plan.spread_frac)
            table.add_row(
                SHORT_NAMES.get(name, name),
                *spreads,
                "–" if own is None else f"{own:.1f}×",
                *(found.get(count, "–") for count in NUM_PAIRS),
            )
    return table


def _over_own_interval(cells: Sequence[Cell], name: str, spread_frac: float) -> float | None:
    """How many times as far cells lie apart as the interval of a single one says; None where they have none."""
    halves = [
        (cell.summary.intervals[name][1] - cell.summary.intervals[name][0]) / 2.0 / cell.summary.metrics[name]
        for cell in cells
        if name in cell.summary.intervals
    ]
    usual = float(np.median(halves)) / 1.96 if halves else 0.0
    return spread_frac / usual if usual > 0.0 else None


def _inside(cells: Sequence[Cell]) -> list[Bar]:
    """Inside the cells: how alike neighbouring slots are, and how long blocks must be."""
    memories, blocks_s = [], []
    for cell in cells:
        line = timeline(cell.records)
        first, end = stats.ramps(line.in_flight)
        inside = line.tokens_per_s[first:end]
        if len(inside) > 20:
            memories.append(stats.lag1_correlation(inside))
            blocks_s.append(stats.block_length(inside) * line.slot_s)
    if not memories:
        return []
    return [
        Bar("tokens/s in a cell: slot with the next, correlation", float(np.median(memories)), "shown", None),
        Bar("tokens/s in a cell: block, s", float(np.median(blocks_s)), "shown", None),
    ]


def _against_itself(cells: Sequence[Cell]) -> list[Bar]:
    """The cells as pairs with sides by coins: an A/A, in which a verdict would be false."""
    rng = stats.named_rng(random.SystemRandom().randrange(2**32), "sides")
    orders = stats.pair_orders(len(cells) // 2, rng)
    pairs: dict[str, stats.Pairs] = {}
    for name in METRICS:
        values = [cell.summary.metrics[name] for cell in cells]
        neighbours = list(zip(values[::2], values[1::2], strict=False))
        pairs[name] = [
            (b, a) if first is stats.Side.CANDIDATE else (a, b)
            for (first, _), (a, b) in zip(orders, neighbours, strict=True)
        ]
    found = stats.compare(pairs, METRICS)
    shown = [Bar(f"{one.metric}: A/A of {one.num_pairs} pairs", str(one), "shown", None) for one in found.compared]
    return shown + [Bar(f"{name}: A/A", str(refusal), "shown", None) for name, refusal in found.refused.items()]


if __name__ == "__main__":
    sys.exit(main())
