"""Several signals of one canary, tested together: worse by any of them, or within every tolerance, at any time.

    alarm   the closure of averaged e-values (`sequential.alarms`): whatever number of signals and looks, the chance
            that any signal without a drop ever alarms is at most alpha
    pass    every signal rejects "a drop of the tolerance or more" at alpha. All must, so that a candidate with even one
            such drop passes with chance alpha at most: passing needs no correction

A value is candidate less stable of one pair, in [-1, 1], and negative is worse. A two-sided signal (how long answers
are) bets half on each side: drift in either direction alarms, and passing needs both sides within the tolerance.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serving.core.sequential import Capital, ClusteredMean, Verdict, alarms


@dataclass(frozen=True, slots=True)
class Signal:
    """One stream of pairs.

    Attributes:
        name: what people call it.
        tolerance: the drop of the mean that is not to pass, in (0, 1).
        two_sided: whether a rise is as bad as a drop.
    """

    name: str
    tolerance: float = 0.02
    two_sided: bool = False


@dataclass(frozen=True, slots=True)
class SignalReport:
    """Where a signal stands; `mean` is candidate less stable, None before the first pair, evidence in nats."""

    verdict: Verdict
    mean: float | None
    interval: tuple[float, float]
    log_e_worse: float
    log_e_within: float
    num_pairs: int


class _Stream:
    """A signal's evidence so far."""

    def __init__(self, signal: Signal, max_cluster_size: int) -> None:
        if not 0.0 < signal.tolerance < 1.0:
            raise ValueError(f"{signal.name}: a tolerance lies between 0 and 1; got {signal.tolerance}")
        self.seen = ClusteredMean(-1.0, 1.0, max_cluster_size)
        self._two_sided = signal.two_sided
        self._worse = [Capital(0.0, -1.0, max_cluster_size) for _ in range(2 if signal.two_sided else 1)]
        self._within = [Capital(-signal.tolerance, -1.0, max_cluster_size) for _ in self._worse]

    def add(self, values: Sequence[float]) -> None:
        """Closes a cluster of pairs; nothing is added when one is refused."""
        total, num_items = self.seen.add(values)
        for sign, worse, within in zip((1.0, -1.0), self._worse, self._within, strict=False):
            worse.add(-sign * total, num_items)
            within.add(sign * total, num_items)

    @property
    def log_e_worse(self) -> float:
        """Against "no worse"; the mean of two e-values is one."""
        found = [capital.log_e for capital in self._worse]
        top = max(found)
        return top + math.log(math.fsum(math.exp(one - top) for one in found) / len(found))

    @property
    def log_e_within(self) -> float:
        """Against "worse by the tolerance or more": each side must be rejected."""
        return min(capital.log_e for capital in self._within)


class Family:
    """The signals of one canary. A verdict that was reached stays.

    Args:
        signals: with names of their own.
        alpha: the chance of any false alarm, and that of a false pass.
        max_cluster_size: the most pairs of one source.

    Raises:
        ValueError: no signal, two of one name, or bounds that cannot be.
    """

    def __init__(self, signals: Sequence[Signal], alpha: float = 0.05, *, max_cluster_size: int = 1) -> None:
        names = [signal.name for signal in signals]
        if not names or len(set(names)) != len(names):
            raise ValueError(f"a family needs signals, each with a name of its own; got {names}")
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is a chance between 0 and 1; got {alpha}")
        self.alpha = alpha
        self.alarmed: frozenset[str] = frozenset()
        self.passed: frozenset[str] = frozenset()
        self._streams = {signal.name: _Stream(signal, max_cluster_size) for signal in signals}

    def add(self, values: Mapping[str, Sequence[float]]) -> Verdict:
        """Closes a cluster: its pairs by signal. A signal that it says nothing of is left as it was.

        Raises:
            KeyError: no signal of that name.
            ValueError: too many pairs, or a value outside [-1, 1].
        """
        for name, pairs in values.items():
            self._streams[name].add(pairs)
        self.alarmed |= alarms({name: stream.log_e_worse for name, stream in self._streams.items()}, self.alpha)
        enough = -math.log(self.alpha)
        self.passed |= {name for name in values if self._streams[name].log_e_within >= enough}
        return self.verdict

    @property
    def verdict(self) -> Verdict:
        """Fail once any signal alarmed, pass once all have passed."""
        if self.alarmed:
            return Verdict.FAIL
        return Verdict.PASS if len(self.passed) == len(self._streams) else Verdict.INCONCLUSIVE

    def report(self) -> dict[str, SignalReport]:
        """Each signal, with an interval that holds at every moment at once with chance 1 - alpha."""
        return {name: self._report(name, stream) for name, stream in self._streams.items()}

    def _report(self, name: str, stream: _Stream) -> SignalReport:
        verdict = Verdict.FAIL if name in self.alarmed else Verdict.INCONCLUSIVE
        if verdict is Verdict.INCONCLUSIVE and name in self.passed:
            verdict = Verdict.PASS
        seen = stream.seen
        return SignalReport(
            verdict, seen.mean, seen.interval(self.alpha), stream.log_e_worse, stream.log_e_within, seen.num_items
        )
