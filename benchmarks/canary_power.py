"""How often a canary's sequential tests are wrong, and how many pairs they need, on simulated answers.

Pairs are yes-or-no scores of the same item by two versions: with chance `discordance` they differ, and the share of
those that the candidate loses makes the drop. Every test is looked at after every pair (cluster), as a rollout does,
and stops at the first look that suits it.

A/A: both versions are the same, so every alarm is false. Clusters: ten items of a source that mostly go the same way.
The family: seven signals that share most of their noise, one of them two-sided, alarmed by `sequential.alarms`.
Fixed-n McNemar stands beside it: the exact test at one size chosen before, and the same test looked at after every
pair, which is what people do.

The arithmetic here is that of `serving/core/sequential.py` for many runs at once; each form first has to agree with the
core on a few of its own runs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from scipy.stats import beta, binom

from benchmarks.harness import Bar, Mode, at_least, at_most, run
from serving.core.family import Family, Signal
from serving.core.sequential import BETS, LOG_WEIGHTS, PairedTest, Verdict
from workbench.stats import named_rng

Floats = npt.NDArray[np.float64]
ALPHA = 0.05
TOLERANCE = 0.02
SEED = 1
NUM_RUNS = {Mode.QUICK: 400, Mode.FULL: 4000}
AA_PAIRS = {Mode.QUICK: 2000, Mode.FULL: 5000}
AA_DISCORDANCE = 0.14
CLUSTERS, CLUSTER_ITEMS = 50, 10
MAX_FALSE = 0.06
FAMILY_PAIRS = {Mode.QUICK: 500, Mode.FULL: 2000}
FAMILY = tuple(
    Signal(name, TOLERANCE, two_sided=name == "length")
    for name in ("quality", "errors", "refusals", "length", "finish_reason", "latency", "cost")
)
NUM_CHECKED = 3


@dataclass(frozen=True, slots=True)
class Effect:
    """A drop and how often answers differ; bars on the median stop and on the share found by `by_pairs`."""

    drop: float
    discordance: float
    num_pairs: int
    max_median: float
    by_pairs: int
    min_found: float | None = None


EFFECTS = (Effect(0.02, 0.06, 4000, 1000, 1800, 0.8), Effect(0.10, 0.14, 600, 100, 100))


def differences(rng: np.random.Generator, shape: tuple[int, ...], drop: float, discordance: float) -> Floats:
    """Candidate less stable of yes-or-no items."""
    moved = rng.random(shape) < discordance
    lost = rng.random(shape) < 0.5 + drop / (2.0 * discordance)
    return np.where(moved, np.where(lost, -1.0, 1.0), 0.0)


def clustered(rng: np.random.Generator, runs: int) -> Floats:
    """A/A clusters, runs × clusters × items: in a source that moves, nine in ten items move, and the same way."""
    moved = rng.random((runs, CLUSTERS, 1)) < AA_DISCORDANCE
    sign = np.where(rng.random((runs, CLUSTERS, 1)) < 0.5, -1.0, 1.0)
    each = rng.random((runs, CLUSTERS, CLUSTER_ITEMS)) < 0.9
    return np.where(moved & each, sign, 0.0)


def log_capital(sums: Floats, sizes: float, claim: float, lowest: float, max_size: int) -> Floats:
    """`sequential.Capital` after each cluster of each run, in nats; sums are runs × clusters."""
    shares = ((sums - sizes * lowest) / (claim - lowest) - sizes) / max_size
    # The mixture's capital: one bet after another, so that memory holds two arrays of the shape alone.
    total = np.full(shares.shape, -np.inf)
    for bet, log_weight in zip(BETS, LOG_WEIGHTS, strict=True):
        total = np.logaddexp(total, np.cumsum(np.log1p(bet * shares), axis=1) + log_weight)
    return total


def first_at(evidence: Floats, enough: float) -> Floats:
    """The look at which each run first has enough; inf where it never has."""
    reached = evidence >= enough
    return np.where(reached.any(axis=1), reached.argmax(axis=1) + 1.0, np.inf)


def stops(sums: Floats, size: int = 1) -> tuple[Floats, Floats]:
    """Looks at which each run first alarms and first passes, by `PairedTest`'s rules before one ends the other."""
    enough = -math.log(ALPHA)
    alarm = first_at(log_capital(-sums, size, 0.0, -1.0, size), enough)
    within = first_at(log_capital(sums, size, -TOLERANCE, -1.0, size), enough)
    return alarm, within


def family_log_e(sums: Floats, two_sided: bool) -> Floats:
    """`Family`'s evidence of "worse" of one signal after each pair."""
    worse = log_capital(-sums, 1, 0.0, -1.0, 1)
    if not two_sided:
        return worse
    return np.logaddexp(worse, log_capital(sums, 1, 0.0, -1.0, 1)) - math.log(2.0)


def family_stops(rng: np.random.Generator, runs: int, num_pairs: int) -> Floats:
    """The look at which any signal of an A/A first alarms: when the average of all e-values suffices."""
    shared = differences(rng, (runs, num_pairs), 0.0, AA_DISCORDANCE)
    signals = []
    for _ in FAMILY:
        own = differences(rng, shared.shape, 0.0, AA_DISCORDANCE)
        signals.append(np.where(rng.random(shared.shape) < 0.7, shared, own))
    total = np.full(shared.shape, -np.inf)
    for signal, values in zip(FAMILY, signals, strict=True):
        total = np.logaddexp(total, family_log_e(values, signal.two_sided))
    found = first_at(total - math.log(len(FAMILY)), -math.log(ALPHA))
    for row in range(NUM_CHECKED):
        _agrees_with_family([values[row] for values in signals], found[row])
    return found


def mcnemar_p(sums: Floats) -> Floats:
    """One-sided exact McNemar of "no drop" after each pair of each run."""
    lost, won = np.cumsum(sums < 0, axis=1), np.cumsum(sums > 0, axis=1)
    return np.asarray(binom.sf(lost - 1, lost + won, 0.5))


def measure(mode: Mode, console: Console) -> list[Bar]:
    """False alarms and power of a canary's sequential tests, simulated."""
    bars: list[Bar] = []
    for name, part in (("A/A", _false_alarms), ("family", _family), ("effects", _effects)):
        console.print(f"[dim]{name}: {NUM_RUNS[mode]} runs …")
        bars += part(mode)
    return bars


def _false_alarms(mode: Mode) -> list[Bar]:
    rng, runs = named_rng(SEED, "A/A"), NUM_RUNS[mode]
    alarmed, watched = [], []
    for start in range(0, runs, 200):
        sums = differences(rng, (min(200, runs - start), AA_PAIRS[mode]), 0.0, AA_DISCORDANCE)
        alarm, within = stops(sums)
        _agrees_with_core(sums[:NUM_CHECKED, :, None], alarm, within)
        alarmed.append(alarm)
        watched.append((mcnemar_p(sums) <= ALPHA).any(axis=1))
    single, looks = np.concatenate(alarmed), np.concatenate(watched)
    items = clustered(named_rng(SEED, "clusters"), runs)
    by_cluster = stops(items.sum(axis=2), CLUSTER_ITEMS)
    _agrees_with_core(items[:NUM_CHECKED], *by_cluster)
    naive = (mcnemar_p(items.reshape(runs, -1)) <= ALPHA).any(axis=1)
    one, many = f"{AA_PAIRS[mode]} pairs", f"{CLUSTERS} clusters × {CLUSTER_ITEMS} items"
    return [
        *_limited(f"A/A, {one}", np.isfinite(single), mode),
        *_limited(f"A/A, {many}", np.isfinite(by_cluster[0]), mode),
        Bar(f"A/A, {one}: McNemar watched after every pair alarms, %", 100 * float(looks.mean()), "shown", None),
        Bar(f"A/A, {many}: McNemar watched after every item alarms, %", 100 * float(naive.mean()), "shown", None),
    ]


def _family(mode: Mode) -> list[Bar]:
    rng, runs = named_rng(SEED, "family"), NUM_RUNS[mode]
    found = [family_stops(rng, min(200, runs - start), FAMILY_PAIRS[mode]) for start in range(0, runs, 200)]
    name = f"A/A, family of {len(FAMILY)}, {FAMILY_PAIRS[mode]} pairs"
    return _limited(name, np.isfinite(np.concatenate(found)), mode)


def _effects(mode: Mode) -> list[Bar]:
    bars = []
    for effect in EFFECTS:
        rng = named_rng(SEED, f"drop {effect.drop}")
        sums = differences(rng, (NUM_RUNS[mode], effect.num_pairs), effect.drop, effect.discordance)
        alarm, within = stops(sums)
        _agrees_with_core(sums[:NUM_CHECKED, :, None], alarm, within)
        stop = np.where(alarm < within, alarm, np.inf)
        name = f"drop of {100 * effect.drop:g} points at {100 * effect.discordance:g} %"
        bars.append(at_most(f"{name}: median pairs until found", float(np.median(stop)), effect.max_median))
        found = float((stop <= effect.by_pairs).mean())
        by = f"{name}: found by {effect.by_pairs} pairs, share"
        bars.append(
            Bar(by, found, "shown", None) if effect.min_found is None else at_least(by, found, effect.min_found)
        )
        fixed = float((mcnemar_p(sums)[:, effect.by_pairs - 1] <= ALPHA).mean())
        bars.append(Bar(f"{name}: McNemar, one look at {effect.by_pairs}, share", fixed, "shown", None))
    return bars


def _limited(name: str, alarmed: npt.NDArray[np.bool_], mode: Mode) -> list[Bar]:
    num, runs = int(alarmed.sum()), len(alarmed)
    limit = 1.0 if num == runs else float(beta.ppf(0.95, num + 1, runs - num))
    judged = mode is Mode.FULL  # a few hundred runs cannot bring the limit under 6 %, whatever the truth
    return [
        Bar(f"{name}: false alarms, %", 100 * num / runs, f"of {runs} runs", None),
        at_most(f"{name}: upper limit, %", 100 * limit, 100 * MAX_FALSE, judged=judged),
    ]


def _agrees_with_core(items: Floats, alarm: Floats, within: Floats) -> None:
    """Raises ValueError when `PairedTest` itself, fed runs × clusters × items, stops elsewhere."""
    for row, run_items in enumerate(items):
        test = PairedTest(TOLERANCE, ALPHA, max_cluster_size=items.shape[2])
        found = next((n for n, cluster in enumerate(run_items, 1) if test.add(list(cluster)) is not _OPEN), math.inf)
        if found != min(alarm[row], within[row]) or (test.verdict is Verdict.FAIL) != (alarm[row] < within[row]):
            raise ValueError(f"run {row}: the core says {test.verdict} at {found}; here {alarm[row]}, {within[row]}")


def _agrees_with_family(signals: Sequence[Floats], stop: float) -> None:
    """Raises ValueError when `Family` itself alarms elsewhere."""
    family = Family(FAMILY, ALPHA)
    for number, values in enumerate(zip(*signals, strict=True), 1):
        family.add({signal.name: [value] for signal, value in zip(FAMILY, values, strict=True)})
        if family.alarmed:
            if number != stop:
                raise ValueError(f"the core alarms at {number}, this benchmark at {stop}")
            return
    if math.isfinite(stop):
        raise ValueError(f"the core never alarms, this benchmark at {stop}")


_OPEN = Verdict.INCONCLUSIVE


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("canary_power", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
