"""The same load on engines that differ in one setting, each started for it, measured, and ended.

    batching      one request at a time against continuous batching
    long_prefill  a victim's token gaps while long prompts are prefilled, with chunked prefill off and on

Both take the cores of the model's first pool: stop it before (`workbench pool stop`). One turn a setting: for a
difference that is no larger than the machine's drift take `workbench.compare` with runs in turns.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from statistics import median
from typing import Any

import pandas as pd

from workbench.config import WorkbenchConfig
from workbench.connection import connected
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    LoadResult,
    Slo,
    Target,
    TargetKind,
    Vocabulary,
    parse_arrival,
    run_load,
    summarize,
    synthetic_prompts,
)
from workbench.stats import Percentile, percentile
from workbench.sweeps.cells import MeasuredReplica, Shape
from workbench.sweeps.run import client_on_other_cores
from workbench.sync import run_sync
from workbench.tuning.halving import Value
from workbench.tuning.on_pool import USUAL_SHAPE, CannotTune, company, pool_of
from workbench.tuning.run import EngineBench, TuningLoad
from workbench.wiring import layout, running_stack

Settings = Mapping[str, Mapping[str, Value]]
VICTIM = Shape(32, 128)
MAX_LOAD_S = 600.0
WARM_UP_REQUESTS = 2
LONG_OUTPUT_TOKENS = 2
"""The first token of a long prompt, and one to tell that it decodes."""


def batching(model: str, *, concurrency: int = 8, shape: Shape = USUAL_SHAPE, num_requests: int = 48) -> pd.DataFrame:
    """So many users at an engine that runs one request at a time, and at one that batches as many as they are.

    Returns:
        A row an engine: output tokens a second with interval, TTFT, time between tokens, E2E; `invalid` when it does
        not count.

    Raises:
        CannotTune: the pool's cores are taken.
    """
    settings = {
        "one request at a time": {"max_num_seqs": 1},
        "continuous batching": {"max_num_seqs": concurrency},
    }

    async def measure(engine: _Engine) -> dict[str, Any]:
        load = await engine.load(shape, ClosedLoop(concurrency), num_requests)
        found = summarize(
            load.records, slo=engine.slo, num_units=1, num_warm_up=concurrency, client_error=load.client_error
        )
        low, high = found.intervals.get("output_tokens_per_s_per_gpu", (None, None))
        names = ("output_tokens_per_s_per_gpu", "ttft_s/p50", "itl_s/p50", "e2e_s/p50")
        figures = {name: found.metrics.get(name) for name in names}
        interval = {"output_tokens_per_s_per_gpu/ci_low": low, "output_tokens_per_s_per_gpu/ci_high": high}
        return figures | interval | {"num_requests": found.num_requests, "invalid": found.invalid}

    return _each(model, settings, measure)


def long_prefill(
    model: str,
    *,
    num_long_tokens: int = 1500,
    num_chunk_tokens: int = 128,
    victim: Shape = VICTIM,
    num_victims: int = 4,
    long_rate_rps: float = 0.15,
) -> pd.DataFrame:
    """Gaps between the tokens of a victim that decodes while long prompts come, with chunked prefill off and on.

    Off, a step takes a whole prompt; on, at most `num_chunk_tokens` of it beside the running requests.

    Returns:
        A row a setting: the victim's ITL at P50 and P99 (None, and why, where the sample does not carry it), the
        longest gap, the number of gaps, and the TTFT of the long prompts, which is what chunking costs.

    Raises:
        CannotTune: the pool's cores are taken.
    """
    whole = num_long_tokens + victim.num_prompt_tokens + victim.num_output_tokens
    settings = {
        "chunked prefill off": {
            "enable_chunked_prefill": False,
            "max_num_batched_tokens": max(whole, 2048),
            "max_model_len": max(whole, 2048),
        },
        f"chunks of {num_chunk_tokens}": {
            "enable_chunked_prefill": True,
            "max_num_batched_tokens": num_chunk_tokens,
            "max_model_len": max(whole, 2048),
        },
    }

    async def measure(engine: _Engine) -> dict[str, Any]:
        stop = asyncio.Event()
        long_shape = Shape(num_long_tokens, LONG_OUTPUT_TOKENS)
        arrival = parse_arrival(f"constant:rate={long_rate_rps}")
        beside = asyncio.ensure_future(engine.load(long_shape, arrival, 10_000, stop=stop))
        try:
            load = await engine.load(victim, ClosedLoop(1), num_victims)
        finally:
            stop.set()
            others = await beside
        return _victim_row(load, others)

    return _each(model, settings, measure)


def _victim_row(load: LoadResult, others: LoadResult) -> dict[str, Any]:
    gaps = [gap for record in load.records if record.ok for gap in record.itl_s()]
    found = {f"itl_s/p{round(100 * q)}": _percentile(gaps, q) for q in (0.5, 0.99)}
    waits = [record.ttft_s for record in others.records if record.ok and record.ttft_s is not None]
    return {
        **{name: value for name, (value, _) in found.items()},
        **{f"{name}/told": reason for name, (_, reason) in found.items() if reason},
        "itl_s/max": max(gaps, default=None),
        "num_gaps": len(gaps),
        "num_failed": sum(not record.ok for record in load.records),
        "long_ttft_s/median": median(waits) if waits else None,
        "num_long": len(waits),
        "invalid": load.client_error.invalid,
    }


def _percentile(values: Sequence[float], q: float) -> tuple[float | None, str | None]:
    """The percentile, or why the sample does not carry it."""
    if not values:
        return None, "nothing was measured"
    found = percentile(list(values), q)
    return (found.value, None) if isinstance(found, Percentile) else (None, str(found))


class _Engine:
    """An engine under test and what is sent to it."""

    def __init__(self, replica: MeasuredReplica, vocabulary: Vocabulary, slo: Slo) -> None:
        self.slo = slo
        self._replica = replica
        self._vocabulary = vocabulary

    async def load(
        self, shape: Shape, arrival: Arrival, num_requests: int, *, stop: asyncio.Event | None = None
    ) -> LoadResult:
        """Fresh prompts of one shape."""
        replica, salt, seed = self._replica, f"contrast-{secrets.token_hex(6)}", secrets.randbits(32)
        return await run_load(
            Target(replica.url, replica.request_model, replica.task, TargetKind.ENGINE, replica.replica_id),
            synthetic_prompts(
                self._vocabulary,
                num_prompt_tokens=shape.num_prompt_tokens,
                num_output_tokens=shape.num_output_tokens,
                seed=seed,
            ),
            arrival,
            num_requests=num_requests,
            max_duration_s=MAX_LOAD_S,
            cache_salt=salt,
            seed=seed,
            run_id=salt,
            stop=stop,
        )


def _each(model: str, settings: Settings, measure: Callable[[_Engine], Any]) -> pd.DataFrame:
    config = connected().config

    async def all_of_them() -> list[dict[str, Any]]:
        rows = []
        for name, flags in settings.items():
            async with _started(config, model, flags) as engine:
                rows.append({"engine": name} | await measure(engine))
        return rows

    return pd.DataFrame(run_sync(all_of_them))


@asynccontextmanager
async def _started(config: WorkbenchConfig, model: str, flags: Mapping[str, Value]) -> AsyncIterator[_Engine]:
    pool = pool_of(config, model, None)
    if (trouble := company(pool, running_stack(config))) is not None:
        raise CannotTune(trouble)
    limits = config.slo.of(pool.hardware)
    slo = Slo(limits.ttft_p99_s, limits.tpot_p99_s)
    bench = EngineBench(pool, config.models[model], layout(config), TuningLoad(USUAL_SHAPE, 1, slo))
    async with bench.engine(tuple(flags.items())) as (replica, vocabulary):
        with client_on_other_cores(replica.cores):
            engine = _Engine(replica, vocabulary, slo)
            await engine.load(USUAL_SHAPE, ClosedLoop(1), WARM_UP_REQUESTS)
            yield engine
