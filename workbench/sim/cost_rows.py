"""The cost table of a simulated fleet: each pool's replica put through the cells of a sweep, as a real one would be.

A closed loop at each concurrency over a grid of shapes; lengths vary around the shape's, so that the streams don't run
in step. Prices are split as for real cells (workbench/costs/pricing.py); a cached token takes no time here and so costs
nothing. All rows are `predicted`.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from serving.core.state import CostRow, Task
from workbench.costs.pricing import MixedWindow, split_price
from workbench.sim.fleet import EngineSpec, FleetSpec, PoolSpec
from workbench.sim.kernel import Kernel
from workbench.sim.replica_model import ReplicaModel, Running, Work
from workbench.sim.step_time import StepTime

PROMPT_TOKENS = (128, 512, 1024, 2048, 4096, 12288)
OUTPUT_TOKENS = (32, 192, 512)
CONCURRENCIES = (1, 2, 4, 8, 16, 32, 64, 128, 256)
MODEL_VERSION = "1"
EXPIRES_AT_S = 1e9
SPREAD = (0.5, 1.5)


@dataclass(slots=True)
class Cell:
    """A closed loop on one replica: what its requests took after the first round."""

    engine: EngineSpec
    step_time: StepTime
    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    ttft_s: list[float] = field(default_factory=list)
    tpot_s: list[float] = field(default_factory=list)
    tokens: list[tuple[int, int]] = field(default_factory=list)
    length_s: float = 0.0

    def run(self) -> None:
        """Runs it: at least forty requests, and each stream four."""
        kernel, rng = Kernel(), random.Random(f"{self.num_prompt_tokens}/{self.num_output_tokens}/{self.concurrency}")
        begun: dict[str, float] = {}
        left, names, warm = max(5 * self.concurrency, 50), itertools.count(), self.concurrency
        warm_at_s = 0.0

        def submit() -> None:
            nonlocal left
            if left:
                left -= 1
                prompt, output = (
                    max(round(tokens * rng.uniform(*SPREAD)), 1)
                    for tokens in (self.num_prompt_tokens, self.num_output_tokens)
                )
                name = str(next(names))
                begun[name] = kernel.now_s
                replica.submit(Work(name, prompt, output))

        def on_finished(running: Running) -> None:
            nonlocal warm_at_s
            work = running.work
            if int(work.request_id) < warm:
                warm_at_s = kernel.now_s
            elif left:  # the last ones run beside fewer
                self.ttft_s.append(running.first_token_at_s - begun[work.request_id])
                self.tpot_s.append((kernel.now_s - running.first_token_at_s) / max(work.num_output_tokens - 1, 1))
                self.tokens.append((work.num_prompt_tokens, work.num_output_tokens))
                self.length_s = kernel.now_s - warm_at_s
            submit()

        replica = ReplicaModel(
            kernel,
            self.step_time,
            self.engine,
            block_tokens=self.engine.block_size,
            on_first_token=lambda _: None,
            on_finished=on_finished,
        )
        for _ in range(self.concurrency):
            submit()
        kernel.run()


@dataclass(frozen=True, slots=True)
class Grid:
    """The cells of a sweep."""

    prompt_tokens: tuple[int, ...] = PROMPT_TOKENS
    output_tokens: tuple[int, ...] = OUTPUT_TOKENS
    concurrencies: tuple[int, ...] = CONCURRENCIES


WHOLE = Grid()


def cost_rows(fleet: FleetSpec, model: str, pool: PoolSpec, grid: Grid = WHOLE) -> Iterator[CostRow]:
    """The rows of a pool; cells that its KV cache or batch cannot hold are left out."""
    step_time = StepTime.of(fleet, model, pool.class_name, pool.tp)
    for prompt, output, concurrency in itertools.product(grid.prompt_tokens, grid.output_tokens, grid.concurrencies):
        most = (prompt + output) * SPREAD[1] + fleet.engine.block_size
        if concurrency > fleet.engine.max_num_seqs or most > step_time.kv_capacity_tokens:
            continue
        if concurrency > 1 and (prompt + output) * concurrency > step_time.kv_capacity_tokens:
            continue
        cell = Cell(fleet.engine, step_time, prompt, output, concurrency)
        cell.run()
        yield _row(fleet, model, pool, cell)


def _row(fleet: FleetSpec, model: str, pool: PoolSpec, cell: Cell) -> CostRow:
    step, chunk = cell.step_time, fleet.engine.max_num_batched_tokens
    prefill_tokens_per_s = chunk / step.step_s(0, 0, chunk, chunk * chunk / 2.0, 1)
    context = cell.num_prompt_tokens + cell.num_output_tokens // 2
    decode_tokens_per_s = cell.concurrency / step.step_s(cell.concurrency, cell.concurrency * context, 0, 0.0, 0)
    num_prompt_tokens, num_output_tokens = (sum(tokens) for tokens in zip(*cell.tokens, strict=True))
    prices = split_price(
        fleet.usd_per_hour(pool) / 3600.0,
        MixedWindow(num_prompt_tokens, num_output_tokens, cell.length_s),
        prefill_tokens_per_s=prefill_tokens_per_s,
        decode_tokens_per_s=decode_tokens_per_s,
    )
    ttft_s, tpot_s = (np.quantile(times, (0.5, 0.99)).tolist() for times in (cell.ttft_s, cell.tpot_s))
    return CostRow(
        model=model,
        version=MODEL_VERSION,
        task=Task.GENERATE,
        hardware_class=pool.class_name,
        engine_fingerprint="simulated",
        hardware_fingerprint="simulated",
        num_prompt_tokens=cell.num_prompt_tokens,
        num_output_tokens=cell.num_output_tokens,
        concurrency=cell.concurrency,
        output_tokens_per_s_per_gpu=num_output_tokens / cell.length_s / pool.tp,
        prefill_tokens_per_s_per_gpu=prefill_tokens_per_s / pool.tp,
        ttft_p50_s=ttft_s[0],
        ttft_p99_s=ttft_s[1],
        tpot_p50_s=tpot_s[0],
        tpot_p99_s=tpot_s[1],
        usd_per_million_input_tokens=prices.input,
        usd_per_million_cached_input_tokens=0.0,
        usd_per_million_output_tokens=prices.output,
        provenance="predicted",
        measured_at_s=0.0,
        expires_at_s=EXPIRES_AT_S,
        mlflow_run_id="simulated",
        num_requests=len(cell.ttft_s),
    )
