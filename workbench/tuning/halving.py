"""Tuning an engine by successive halving: many configurations measured shortly, the better ones again and longer. Pure.

    rung 0   every configuration        b requests
    rung 1   the better 1 / eta         b x eta
    ...      until one is left, or the longest rung has run

Jamieson and Talwalkar (2016). A configuration is judged by its goodput. At a rung's end the better share is promoted,
and as many as half of that again whose intervals overlap the last one promoted: a short cell must not throw the best
away. A configuration that failed to start or gave no valid cell is out; the one in use stays for comparison.

The state is the trials alone: what comes next follows from them, so that a tuning is resumed from its file.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

Value = str | int | float | bool | None
Flags = tuple[tuple[str, Value], ...]
"""Fields of the engine's configuration that differ, by name, sorted."""

TUNABLE = (
    "max_num_batched_tokens",
    "max_num_seqs",
    "enable_chunked_prefill",
    "enable_prefix_caching",
    "block_size",
    "quantization",
    "dtype",
    "kv_cache_memory_bytes",
    "enforce_eager",
)
"""What `workbench tune` knows to vary; a field that the engine's flags lack is refused when they are made."""


@dataclass(frozen=True, slots=True)
class TuningPlan:
    """What is tried.

    Attributes:
        configurations: to try; the first is the one in use, which stays to the last rung.
        min_requests: of a cell in the first rung.
        eta: requests grow and configurations shrink by this factor.
        num_rungs: at most.
    """

    configurations: tuple[Flags, ...]
    min_requests: int = 100
    eta: int = 3
    num_rungs: int = 3

    def __post_init__(self) -> None:
        if len(self.configurations) < 2 or len(set(self.configurations)) != len(self.configurations):
            raise ValueError("a tuning needs at least two configurations, and each once")
        if self.eta < 2 or self.num_rungs < 1 or self.min_requests < 1:
            raise ValueError("eta is at least 2, and there is at least one rung with at least one request")

    def num_requests(self, rung: int) -> int:
        """Of a cell of the rung."""
        return int(self.min_requests * self.eta**rung)

    @property
    def max_cells(self) -> int:
        """Cells of the whole tuning at most: the bracket without ties."""
        count, total = len(self.configurations), 0
        for _ in range(self.num_rungs):
            total += count
            if count == 1:
                break
            count = max(1, math.ceil(count / self.eta))
        return total


@dataclass(frozen=True, slots=True)
class Trial:
    """One cell of one configuration. `goodput_rps` is None where it gave none; `failure` says why."""

    flags: Flags
    rung: int
    goodput_rps: float | None
    low: float | None = None
    high: float | None = None
    failure: str | None = None

    def __post_init__(self) -> None:
        figures = [figure for figure in (self.goodput_rps, self.low, self.high) if figure is not None]
        if not all(math.isfinite(figure) and figure >= 0 for figure in figures):
            raise ValueError(f"goodput {self.goodput_rps} ({self.low} to {self.high}) is no figure to judge by")


@dataclass(frozen=True, slots=True)
class Try:
    """The tuning goes on: measure this configuration with so many requests."""

    flags: Flags
    rung: int
    num_requests: int


@dataclass(frozen=True, slots=True)
class Tuned:
    """The outcome: the best by value, and all that its last rung cannot tell from it (the best included)."""

    best: Trial | None
    ties: tuple[Trial, ...]
    reason: str


def grid(choices: Mapping[str, Sequence[Value]], base: Mapping[str, Value] | None = None) -> tuple[Flags, ...]:
    """Every combination of the choices, that of `base` first.

    Args:
        choices: values by field.
        base: what is in use now; its fields outside `choices` count for nothing. None takes each field's first.

    Raises:
        ValueError: a field that cannot be tuned, or one without values.
    """
    for name, values in choices.items():
        if name not in TUNABLE:
            raise ValueError(f"{name!r} cannot be tuned; what can: {', '.join(TUNABLE)}")
        if not values:
            raise ValueError(f"{name} has no values to try")
    names = sorted(choices)
    first = tuple((name, (base or {}).get(name, choices[name][0])) for name in names)
    found = [first]
    for values in itertools.product(*(choices[name] for name in names)):
        flags = tuple(zip(names, values, strict=True))
        if flags not in found:
            found.append(flags)
    return tuple(found)


def next_step(plan: TuningPlan, trials: Sequence[Trial]) -> Try | Tuned:
    """What to do after these trials, in any order."""
    alive = list(plan.configurations)
    last: list[Trial] = []
    for rung in range(plan.num_rungs):
        done = {trial.flags: trial for trial in trials if trial.rung == rung}
        for flags in alive:
            if flags not in done:
                return Try(flags, rung, plan.num_requests(rung))
        last = _ranked([done[flags] for flags in alive])
        if len(last) <= 1 or rung == plan.num_rungs - 1:
            break
        alive = _promoted(plan, last)
    return _tuned(plan, last)


def _ranked(trials: Sequence[Trial]) -> list[Trial]:
    """Those that count, best first; ties in the given order."""
    valid = [trial for trial in trials if trial.goodput_rps is not None]
    return sorted(valid, key=lambda trial: -(trial.goodput_rps or 0.0))


def _promoted(plan: TuningPlan, ranked: Sequence[Trial]) -> list[Flags]:
    """The better share, those that an interval leaves beside the last of them, and the one in use."""
    count = max(1, math.ceil(len(ranked) / plan.eta))
    border = ranked[count - 1]
    beside = [trial for trial in ranked[count:] if not _is_below(trial, border)]
    kept = [trial.flags for trial in [*ranked[:count], *beside[: math.ceil(count / 2)]]]
    in_use = plan.configurations[0]
    if in_use not in kept and any(trial.flags == in_use for trial in ranked):
        kept.append(in_use)
    return kept


def _is_below(trial: Trial, other: Trial) -> bool:
    """Whether the intervals say so; without intervals the values do."""
    if trial.high is None or other.low is None:
        return (trial.goodput_rps or 0.0) < (other.goodput_rps or 0.0)
    return trial.high < other.low


def _tuned(plan: TuningPlan, ranked: Sequence[Trial]) -> Tuned:
    if not ranked:
        return Tuned(None, (), "no configuration gave a cell that counts: see why each failed")
    best = ranked[0]
    ties = tuple(trial for trial in ranked if not _is_below(trial, best) or trial is best)
    in_use = next((trial for trial in ranked if trial.flags == plan.configurations[0]), None)
    text = f"best of {len(plan.configurations)}: {describe(best.flags)} with {best.goodput_rps:.3g} good requests/s"
    if in_use is best:
        return Tuned(best, ties, f"{text}; that is the one in use")
    if in_use is not None and in_use in ties:
        return Tuned(best, ties, f"{text}; no difference to the one in use ({describe(in_use.flags)}) is sure")
    if in_use is not None and in_use.goodput_rps:
        gain = (best.goodput_rps or 0.0) / in_use.goodput_rps - 1
        return Tuned(best, ties, f"{text}: {gain:+.1%} against the one in use ({describe(in_use.flags)})")
    return Tuned(best, ties, text)


def describe(flags: Flags) -> str:
    """`max_num_batched_tokens=512, enable_chunked_prefill=true`."""
    return ", ".join(f"{name}={str(value).lower() if isinstance(value, bool) else value}" for name, value in flags)


def flags_from_json(data: Mapping[str, Any]) -> Flags:
    """Flags from an object."""
    return tuple(sorted(data.items()))
