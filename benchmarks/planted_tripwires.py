"""Planted faults against the drift tripwires, on real engines: does each show, after how many prompts and tokens?

    python -m benchmarks.planted_tripwires [--quick] [--json FILE]

Each fault is made from the model's own weights, served by real vLLM, read (`evals/readings.py`) and compared with the
sound model. The sound model is started several times: all pairs of its runs must say `same`. Readings are kept by the
digest of weights, flags and prompts below `.workbench/planted`, so a run that was cut off goes on where it was.

Judged here is what the tripwires see; `planted_effects` measures what each fault costs, `planted_regressions` whether
a rollout of it is stopped.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations

from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.harness import Bar, Mode, at_most, equal_to, run
from benchmarks.planted_engines import (
    BASE,
    FOLDER,
    MODEL,
    Planted,
    flags,
    made,
    planted,
    served,
    sound,
)
from evals import readings
from evals.drift import EARLY_PROMPTS, EARLY_TOKENS, Action, Drift, compare
from evals.readings import Reading
from serving.engine.client import EngineClient
from serving.engine.weights import Weights

NUM_BASE_RUNS = {Mode.QUICK: 2, Mode.FULL: 7}
_READING = TypeAdapter(Reading)


@dataclass(frozen=True, slots=True)
class Seen:
    """A fault as the tripwires saw it."""

    planted: Planted
    drift: Drift


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """Planted faults against the drift tripwires, on real engines."""
    base = sound(console.print)
    runs = base_readings(base, NUM_BASE_RUNS[mode], console)
    seen = []
    for one in planted(mode):
        with made(one, base) as weights:
            reading = asyncio.run(reading_of(one, weights, console))
        seen.append(Seen(one, compare(runs[0], runs[1], reading)))
        console.print(line(seen[-1]), highlight=False)
    return [*base_bars(runs), *(bar for one in seen for bar in fault_bars(one.planted, one.drift))]


def base_readings(base: Weights, num: int, console: Console) -> list[Reading]:
    """Of the sound model, started anew for each."""
    return [asyncio.run(reading_of(Planted(BASE, n), base, console)) for n in range(num)]


def line(seen: Seen) -> str:
    """One fault's row."""
    drift = seen.drift
    return (
        f"{seen.planted.name}: {drift.action}; KL {drift.kl_mean:.4f} (short {drift.kl_short:.4f}, long "
        f"{drift.kl_long:.4f}), by {drift.found_by_prompts} prompts; equal answers {drift.agreement_frac:.2f}, first "
        f"difference at token {drift.first_difference}; {'; '.join(drift.reasons)}"
    )


async def reading_of(one: Planted, weights: Weights, console: Console) -> Reading:
    """Starts an engine on `weights`, reads it and ends it; a kept reading of the same digests is taken instead."""
    key = readings.digest([weights.digest, flags().model_dump(mode="json"), readings.PROTOCOL, one.name])
    kept = FOLDER / f"{one.name}-{key[:16]}.json"
    if kept.is_file():
        return _READING.validate_json(kept.read_bytes())
    console.print(f"[dim]{one.name}: starting the engine …")
    async with served(one, weights, max(os.sched_getaffinity(0))) as url, EngineClient(url) as client:
        reading = await readings.take(client, MODEL, weights.path)
    partial = kept.with_suffix(".partial")
    partial.write_bytes(_READING.dump_json(reading))
    partial.replace(kept)
    return reading


def base_bars(runs: Sequence[Reading]) -> list[Bar]:
    """All pairs of the sound model's runs."""
    pairs = [compare(a, a, b) for a, b in combinations(runs, 2)]
    worst = max(drift.kl_mean for drift in pairs)
    changed = sum(drift.action is not Action.SAME for drift in pairs)
    return [
        equal_to(f"sound model, {len(pairs)} pairs of {len(runs)} runs: not `same`", changed, 0),
        at_most("sound model: largest mean KL, nats", worst, 0.003),
        Bar("sound model: least share of equal answers", min(d.agreement_frac for d in pairs), "shown", None),
    ]


def fault_bars(one: Planted, drift: Drift) -> list[Bar]:
    """What one fault's drift is held to."""
    name = f"{one.kind}, seed {one.seed}"
    bars = [
        Bar(f"{name}: mean KL, nats", drift.kl_mean, "shown", None),
        # What a proxy does to sampling shows in no next token, and hardly where few requests suffer.
        Bar(f"{name}: action", drift.action.value, "not same", drift.action is not Action.SAME)
        if not one.is_of_serving
        else Bar(f"{name}: action", drift.action.value, "shown", None),
    ]
    if one.kind.startswith("int4"):
        bars.append(at_most(f"{name}: prompts until KL tells", float(drift.found_by_prompts or 1e9), EARLY_PROMPTS))
        bars.append(at_most(f"{name}: tokens until answers differ", float(drift.first_difference or 1e9), EARLY_TOKENS))
    return bars


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("planted_tripwires", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
