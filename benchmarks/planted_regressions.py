"""Planted regressions on real engines: does each show in the drift tripwires, and after how many prompts and tokens?

    python -m benchmarks.planted_regressions [--quick] [--json FILE]

Each fault is made from the model's own weights, served by real vLLM, read (`evals/readings.py`) and compared with the
sound model. The sound model is started several times: all pairs of its runs must say `same`. Readings are kept by the
digest of weights, flags and prompts below `.workbench/planted`, so a run that was cut off goes on where it was.

Judged here is what the tripwires see. Whether a fault is blocked before it has all traffic needs the evaluation sets.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path

from pydantic import TypeAdapter
from rich.console import Console

from benchmarks.harness import REPOSITORY, Bar, Mode, at_most, equal_to, run
from evals import faults, readings
from evals.drift import EARLY_PROMPTS, EARLY_TOKENS, Action, Drift, compare
from evals.readings import Reading
from serving.clock import SystemClock
from serving.engine.catalogue import CATALOGUE
from serving.engine.client import EngineClient
from serving.engine.flags import EngineFlags
from serving.engine.process import ReplicaProcess, ReplicaSpec
from serving.engine.weights import Weights, resolve

MODEL = "smollm2-135m"
DATA_DIR = Path(os.environ.get("WORKBENCH_DATA_DIR", REPOSITORY / ".workbench"))
# Faults that leave the weights as they are cannot show in the divergence of one model's next tokens.
KINDS = {
    Mode.QUICK: ("int4-channel", "missing-template", "dropped-layer"),
    Mode.FULL: tuple(fault.kind for fault in faults.FAULTS if fault.proxy is None),
}
NUM_BASE_RUNS = {Mode.QUICK: 2, Mode.FULL: 7}
SEEDS = {Mode.QUICK: (0,), Mode.FULL: (0, 1, 2)}
DRAWN = ("noise-", "merge-")
CHANGED_NOT_WORSE = ("int8-group128", "int8-channel", "merge-weak")
_READING = TypeAdapter(Reading)


@dataclass(frozen=True, slots=True)
class Seen:
    """A fault as the tripwires saw it."""

    kind: str
    seed: int
    drift: Drift


def measure(mode: Mode, console: Console) -> Sequence[Bar]:
    """Planted faults against the drift tripwires, on real engines."""
    base = resolve(CATALOGUE[MODEL].source, DATA_DIR / "models", on_progress=console.print)
    runs = [asyncio.run(reading_of(base, f"base-{n}", console)) for n in range(NUM_BASE_RUNS[mode])]
    seen = []
    for kind in KINDS[mode]:
        for seed in SEEDS[mode] if kind.startswith(DRAWN) else (0,):
            seen.append(Seen(kind, seed, compare(runs[0], runs[1], fault_reading(base, kind, seed, console))))
            console.print(line(seen[-1]), highlight=False)
    return [*_base_bars(runs), *(bar for one in seen for bar in _bars(one))]


def line(seen: Seen) -> str:
    """One fault's row."""
    drift = seen.drift
    return (
        f"{seen.kind} (seed {seen.seed}): {drift.action}; KL {drift.kl_mean:.4f} (short {drift.kl_short:.4f}, long "
        f"{drift.kl_long:.4f}), by {drift.found_by_prompts} prompts; equal answers {drift.agreement_frac:.2f}, first "
        f"difference at token {drift.first_difference}; {'; '.join(drift.reasons)}"
    )


def fault_reading(base: Weights, kind: str, seed: int, console: Console) -> Reading:
    """The reading of a fault: made, served, read and removed, unless it is kept from a run before."""
    with tempfile.TemporaryDirectory(dir=DATA_DIR) as scratch:
        folder = faults.make(kind, base.path, Path(scratch) / kind, seed=seed)
        weights = resolve(str(folder), DATA_DIR / "models", on_progress=console.print)
        return asyncio.run(reading_of(weights, f"{kind}-{seed}", console))


async def reading_of(weights: Weights, name: str, console: Console) -> Reading:
    """Starts an engine on `weights`, reads it and ends it; a kept reading of the same digests is taken instead."""
    flags = EngineFlags.defaults(context_length=CATALOGUE[MODEL].context_length, shutdown_timeout_s=5)
    key = readings.digest([weights.digest, flags.model_dump(mode="json"), readings.PROTOCOL, name])
    folder = DATA_DIR / "planted"
    kept = folder / f"{name}-{key[:16]}.json"
    if kept.is_file():
        return _READING.validate_json(kept.read_bytes())
    folder.mkdir(parents=True, exist_ok=True)
    console.print(f"[dim]{name}: starting the engine …")
    spec = ReplicaSpec(name, MODEL, weights, flags, folder / f"{name}.log", cores=(max(os.sched_getaffinity(0)),))
    replica = ReplicaProcess(spec, SystemClock())
    try:
        await replica.start(lambda _: None)
        async with EngineClient(replica.url) as client:
            reading = await readings.take(client, MODEL, weights.path)
    finally:
        await replica.stop()
    partial = kept.with_suffix(".partial")
    partial.write_bytes(_READING.dump_json(reading))
    partial.replace(kept)
    return reading


def _base_bars(runs: Sequence[Reading]) -> list[Bar]:
    pairs = [compare(a, a, b) for a, b in combinations(runs, 2)]
    worst = max(drift.kl_mean for drift in pairs)
    changed = sum(drift.action is not Action.SAME for drift in pairs)
    return [
        equal_to(f"sound model, {len(pairs)} pairs of {len(runs)} runs: not `same`", changed, 0),
        at_most("sound model: largest mean KL, nats", worst, 0.003),
        Bar("sound model: least share of equal answers", min(d.agreement_frac for d in pairs), "shown", None),
    ]


def _bars(seen: Seen) -> list[Bar]:
    drift, name = seen.drift, f"{seen.kind}, seed {seen.seed}"
    bars = [
        Bar(f"{name}: mean KL, nats", drift.kl_mean, "shown", None),
        Bar(f"{name}: action", drift.action.value, "not same", drift.action is not Action.SAME),
    ]
    if seen.kind.startswith("int4"):
        bars.append(at_most(f"{name}: prompts until KL tells", float(drift.found_by_prompts or 1e9), EARLY_PROMPTS))
        bars.append(at_most(f"{name}: tokens until answers differ", float(drift.first_difference or 1e9), EARLY_TOKENS))
    return bars


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("planted_regressions", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
