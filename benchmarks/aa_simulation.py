"""How often `workbench compare` is wrong, and how small a change it finds, on a machine that is simulated to be noisy.

The machine is one series of seconds over the whole experiment: noise that remembers a second and noise that remembers
minutes, a drift, and a neighbour who comes and goes and takes a third. Runs of 60 s are laid on it in pairs, the order
of each by a coin; each begins with a warm-up, ends in a cool-down, and has an offset of its own (fresh prompts). A
run's figure is the mean of what `stats.steady` leaves, B's is scaled by the effect, and `stats` says the verdict.

A/A: both are the same, so every verdict but `no difference seen` is a false alarm. Three metrics that share most of
their noise are compared together; one false verdict among them makes the comparison false.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from rich.console import Console
from scipy.signal import lfilter
from scipy.stats import beta

from benchmarks.harness import Bar, Mode, at_least, at_most, run
from workbench import stats

Floats = npt.NDArray[np.float64]
NUM_PAIRS = 12
RUN_S = 60
NUM_METRICS = 3
MAX_FALSE = 0.06
EFFECTS = (0.05, 0.10)
NUM_RUNS = {Mode.QUICK: 300, Mode.FULL: 4000}
NUM_POWER_RUNS = {Mode.QUICK: 100, Mode.FULL: 500}
MIN_POWER = 0.8
SEED = 1


@dataclass(frozen=True, slots=True)
class Machine:
    """Deviations are of logarithms; a neighbour takes `burst_frac` of the speed for `burst_s` on average."""

    name: str
    second_spread: float
    second_memory: float
    minutes_spread: float
    drift: float
    burst_share: float
    burst_s: float
    burst_frac: float
    run_spread: float


MACHINES = (
    Machine("quiet", 0.03, 0.5, 0.005, 0.0, 0.0, 1.0, 0.0, 0.005),
    Machine("shared", 0.05, 0.6, 0.02, 0.05, 0.1, 20.0, 0.3, 0.01),
    Machine("rough", 0.08, 0.8, 0.05, 0.15, 0.2, 90.0, 0.4, 0.02),
)


def experiments(machine: Machine, count: int, rng: np.random.Generator) -> Floats:
    """Runs as seconds of speed: experiments × runs × 60, in the order in which they run."""
    num_runs = 2 * NUM_PAIRS
    size = num_runs * RUN_S
    logs = machine.second_spread * _remembering(rng, count, size, machine.second_memory)
    logs += machine.minutes_spread * _remembering(rng, count, size, 1.0 - 1.0 / 300.0)
    logs += machine.drift * rng.uniform(-1.0, 1.0, size=(count, 1)) * np.linspace(0.0, 1.0, size)
    logs += np.log1p(-machine.burst_frac * _bursts(machine, rng, count, size))
    runs: Floats = np.exp(logs).reshape(count, num_runs, RUN_S)
    runs *= rng.lognormal(0.0, machine.run_spread, size=(count, num_runs, 1))
    warm_s = rng.integers(0, 6, size=(count, num_runs, 1))
    second = np.arange(RUN_S)
    runs *= np.where(second < warm_s, 0.5, 1.0) * np.where(second >= RUN_S - rng.integers(0, 4, warm_s.shape), 0.4, 1.0)
    return runs


def figures(runs: Floats) -> Floats:
    """Each run's figure: the mean of its steady part, or of its middle where none is found."""
    flat = runs.reshape(-1, RUN_S)
    means = np.empty(len(flat))
    for number, series in enumerate(flat):
        ends = stats.mser(series)
        first, last = ends if ends is not None else (RUN_S // 5, RUN_S // 5)
        means[number] = series[first : RUN_S - last].mean()
    return means.reshape(runs.shape[:2])


def false_alarm(speeds: Floats, effect: float, rng: np.random.Generator, run_spread: float) -> dict[str, bool]:
    """One experiment's verdicts: of the first metric alone and of three together; True where a difference is seen."""
    orders = stats.pair_orders(NUM_PAIRS, rng)
    is_second = np.array([first is stats.Side.CANDIDATE for first, _ in orders])
    pairs = speeds.reshape(NUM_PAIRS, 2)
    pairs = np.where(is_second[:, None], pairs[:, ::-1], pairs) * [1.0, 1.0 + effect]
    p_values = {}
    for metric in range(NUM_METRICS):
        own = pairs * rng.lognormal(0.0, run_spread if metric else 0.0, size=pairs.shape)
        p_values[str(metric)] = stats.shift(np.log(own[:, 1] / own[:, 0])).p
    together = any(step.rejects for step in stats.holm(p_values, 1.0 - stats.CONFIDENCE).values())
    return {"alone": p_values["0"] <= 1.0 - stats.CONFIDENCE, "together": together}


def measure(mode: Mode, console: Console) -> list[Bar]:
    """False alarms and power of comparisons on simulated machines."""
    bars: list[Bar] = []
    for machine in MACHINES:
        console.print(f"[dim]{machine.name}: {NUM_RUNS[mode]} A/As, {NUM_POWER_RUNS[mode]} A/Bs an effect …")
        bars += _false_alarms(machine, mode)
        bars += [bar for effect in EFFECTS for bar in _power(machine, mode, effect)]
    return bars


def _false_alarms(machine: Machine, mode: Mode) -> list[Bar]:
    seen = _seen(machine, NUM_RUNS[mode], 0.0, "A/A")
    bars = []
    for kind, hits in seen.items():
        share, limit = sum(hits) / len(hits), upper_limit(sum(hits), len(hits))
        name = f"{machine.name}: false alarms, one metric" if kind == "alone" else f"{machine.name}: of three together"
        bars.append(Bar(f"{name}, %", 100 * share, f"of {len(hits)} A/As", None))
        # A few hundred runs cannot bring the limit under 6 %, whatever the truth.
        bars.append(at_most(f"{name}, upper limit, %", 100 * limit, 100 * MAX_FALSE, judged=mode is Mode.FULL))
        if mode is Mode.QUICK:
            bars.append(at_most(f"{name}, %, of few", 100 * share, 100 * (MAX_FALSE + 0.02)))
    return bars


def _power(machine: Machine, mode: Mode, effect: float) -> list[Bar]:
    hits = _seen(machine, NUM_POWER_RUNS[mode], effect, "A/B")["alone"]
    name = f"{machine.name}: a change of {100 * effect:g} % found in {NUM_PAIRS} pairs, share"
    if machine.name == "quiet":
        return [at_least(name, sum(hits) / len(hits), MIN_POWER)]
    return [Bar(name, sum(hits) / len(hits), "shown", None)]


def _seen(machine: Machine, count: int, effect: float, name: str) -> dict[str, list[bool]]:
    """Whether a difference is seen, experiment by experiment; made in batches that fit into memory."""
    rng = stats.named_rng(SEED, f"{name}/{machine.name}/{effect}")
    found: dict[str, list[bool]] = {"alone": [], "together": []}
    for start in range(0, count, 100):
        for speeds in figures(experiments(machine, min(100, count - start), rng)):
            for kind, seen in false_alarm(speeds, effect, rng, machine.run_spread).items():
                found[kind].append(seen)
    return found


def upper_limit(num_hits: int, num_trials: int, confidence: float = 0.95) -> float:
    """One-sided upper limit of a share (Clopper and Pearson 1934)."""
    if num_hits == num_trials:
        return 1.0
    return float(beta.ppf(confidence, num_hits + 1, num_trials - num_hits))


def _remembering(rng: np.random.Generator, rows: int, size: int, memory: float) -> Floats:
    """AR(1) noise of deviation 1, begun in its own distribution."""
    noise = rng.normal(size=(rows, size)) * np.sqrt(1.0 - memory**2)
    noise[:, 0] /= np.sqrt(1.0 - memory**2)
    series: Floats = lfilter([1.0], [1.0, -memory], noise, axis=1)
    return series


def _bursts(machine: Machine, rng: np.random.Generator, rows: int, size: int) -> Floats:
    """1 while the neighbour is there: stays and absences are exponential, their means as the machine has them."""
    there = np.zeros((rows, size))
    if machine.burst_share == 0.0:
        return there
    absence_s = machine.burst_s * (1.0 / machine.burst_share - 1.0)
    for row in there:
        at_s = rng.exponential(absence_s)
        while at_s < size:
            end_s = at_s + rng.exponential(machine.burst_s)
            row[int(at_s) : int(end_s) + 1] = 1.0
            at_s = end_s + rng.exponential(absence_s)
    return there


def main(argv: Sequence[str] | None = None) -> int:
    """The benchmark."""
    return run("aa_simulation", measure, argv)


if __name__ == "__main__":
    sys.exit(main())
