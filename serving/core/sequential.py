"""Tests that may be looked at after every request: whether a version is worse, decided as soon as the data allow.

    bet       against "the mean is at most m" money is bet on each cluster of items; under that claim no strategy can
              expect to gain, so that the capital reaches 1 / alpha with chance alpha at most, whenever one looks
              (Ville's inequality; Waudby-Smith and Ramdas, "Estimating means of bounded random variables by betting",
              JRSS B 2024)
    mixture   the capital is spread over a grid of constant bets: nothing to tune to a stream, and the order of the
              clusters does not matter
    cluster   items of one source (a document, a session) speak for one another. One bet is made on the sum of a
              cluster, when it is closed; when it closes must not depend on its scores
    family    several metrics: alarms are adjusted so that the chance of any false one stays alpha (Vovk and Wang,
              "E-values: calibration, combination and applications", Annals of Statistics 2021)

The mean is over items: a cluster of three weighs three times one of one. Capital is kept as its logarithm.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

# Shares of the largest bet that cannot lose everything, half an octave apart.
BETS = tuple(0.9 * 2.0 ** (-step / 2.0) for step in range(18))
# What each bet is given: a bell over the bet's logarithm. The best bet is about mean / variance, which for drops that
# matter lies near a third (2 points at 6 % discordance) to two thirds (10 points at 14 %).
WEIGHTED_BET, WEIGHTED_SPREAD = 0.45, 1.2
_BELL = [math.exp(-(math.log(bet / WEIGHTED_BET) ** 2) / (2.0 * WEIGHTED_SPREAD**2)) for bet in BETS]
LOG_WEIGHTS = tuple(math.log(height / math.fsum(_BELL)) for height in _BELL)
INTERVAL_STEPS = 48


class Verdict(StrEnum):
    """What a sequential test says so far."""

    PASS = "pass"
    FAIL = "fail"
    INCONCLUSIVE = "inconclusive"


class Capital:
    """What betting against "the mean is at most `claim`" has made of 1.

    Args:
        claim: the largest mean that the claim allows, above `lowest`.
        lowest: the lowest value that an item can have.
        max_cluster_size: the most items of a cluster.
    """

    __slots__ = ("_claim", "_lowest", "_max_cluster_size", "_wealths")

    def __init__(self, claim: float, lowest: float, max_cluster_size: int) -> None:
        self._claim, self._lowest, self._max_cluster_size = claim, lowest, max_cluster_size
        self._wealths = list(LOG_WEIGHTS)

    def add(self, total: float, num_items: int, times: int = 1) -> None:
        """Bets on a cluster whose items sum to `total`; or on as many alike."""
        gain = (total - num_items * self._lowest) / (self._claim - self._lowest) - num_items
        share = gain / self._max_cluster_size
        self._wealths = [
            wealth + times * math.log1p(bet * share) for bet, wealth in zip(BETS, self._wealths, strict=True)
        ]

    @property
    def log_e(self) -> float:
        """The logarithm of the capital: an e-value, in nats."""
        top = max(self._wealths)
        return top + math.log(math.fsum(math.exp(wealth - top) for wealth in self._wealths))


class ClusteredMean:
    """The mean of bounded items that come in clusters, with an interval that holds at any time.

    Args:
        lowest: no item lies below.
        highest: no item lies above.
        max_cluster_size: no cluster holds more items. Much larger than the clusters are, it costs power.

    Raises:
        ValueError: bounds that hold nothing between them, or a cluster of no size.
    """

    __slots__ = ("_clusters", "_total", "highest", "lowest", "max_cluster_size", "num_items")

    def __init__(self, lowest: float, highest: float, max_cluster_size: int = 1) -> None:
        if not (math.isfinite(lowest) and math.isfinite(highest) and lowest < highest):
            raise ValueError(f"items need finite bounds, the lowest below the highest; got {lowest} and {highest}")
        if max_cluster_size < 1:
            raise ValueError(f"a cluster holds one item or more; got {max_cluster_size}")
        self.lowest, self.highest, self.max_cluster_size = lowest, highest, max_cluster_size
        self._clusters: Counter[tuple[float, int]] = Counter()
        self._total, self.num_items = 0.0, 0

    def add(self, values: Sequence[float]) -> tuple[float, int]:
        """Closes a cluster; its sum and size.

        Raises:
            ValueError: no item, too many, or one outside the bounds; nothing is added then.
        """
        if not 1 <= len(values) <= self.max_cluster_size:
            raise ValueError(f"a cluster holds 1 to {self.max_cluster_size} items; got {len(values)}")
        for item in values:
            if not self.lowest <= item <= self.highest:
                raise ValueError(f"an item lies from {self.lowest} to {self.highest}; got {item}")
        total = math.fsum(values)
        self._clusters[total, len(values)] += 1
        self._total += total
        self.num_items += len(values)
        return total, len(values)

    @property
    def num_clusters(self) -> int:
        """How many were closed."""
        return self._clusters.total()

    @property
    def mean(self) -> float | None:
        """Over all items; None before the first."""
        return self._total / self.num_items if self.num_items else None

    def log_e_above(self, claim: float) -> float:
        """Evidence against "the mean is at most `claim`", in nats."""
        capital = Capital(claim, self.lowest, self.max_cluster_size)
        for (total, num_items), times in self._clusters.items():
            capital.add(total, num_items, times)
        return capital.log_e

    def log_e_below(self, claim: float) -> float:
        """Evidence against "the mean is at least `claim`", in nats."""
        capital = Capital(-claim, -self.highest, self.max_cluster_size)
        for (total, num_items), times in self._clusters.items():
            capital.add(-total, num_items, times)
        return capital.log_e

    def interval(self, alpha: float = 0.05) -> tuple[float, float]:
        """Bounds that hold at every moment at once with chance 1 - alpha: each side spends half of it."""
        enough = math.log(2.0 / alpha)
        low = _last(self.lowest, self.highest, lambda claim: self.log_e_above(claim) >= enough)
        high = _last(self.highest, self.lowest, lambda claim: self.log_e_below(claim) >= enough)
        return min(low, high), max(low, high)


@dataclass(frozen=True, slots=True)
class PairedReport:
    """Where a paired test stands.

    Attributes:
        mean: challenger less champion, over items; negative is worse. None before the first.
        interval: holds at every moment at once with chance 1 - alpha.
        log_e_drop: evidence against "no drop", in nats; log(1 / alpha) raises the alarm.
        log_e_within: evidence against "a drop of the tolerance or more", in nats; log(1 / alpha) passes.
    """

    verdict: Verdict
    mean: float | None
    interval: tuple[float, float]
    log_e_drop: float
    log_e_within: float
    num_items: int
    num_clusters: int


class PairedTest:
    """Whether a challenger is worse than the champion on the same items, decided at the first look that can.

    A fail rejects "no drop"; a pass rejects "a drop of the tolerance or more"; whichever comes first stays. No
    difference seen is no pass. Each verdict is wrong with chance alpha at most, however often one looks.

    Args:
        tolerance: the drop of the mean difference that is not to pass, in the items' unit.
        alpha: the chance of each false verdict.
        lowest: the lowest difference that an item can show.
        highest: the highest.
        max_cluster_size: the most items of one source.
    """

    __slots__ = ("_drop", "_enough", "_within", "alpha", "differences", "tolerance", "verdict")

    def __init__(
        self, tolerance: float = 0.02, alpha: float = 0.05, *, lowest: float = -1.0, highest: float = 1.0,
        max_cluster_size: int = 1,
    ) -> None:  # fmt: skip
        if not (0.0 < tolerance < -lowest and highest > 0.0):
            raise ValueError(f"a tolerance lies between 0 and the largest drop, {-lowest}; got {tolerance}")
        if not 0.0 < alpha < 1.0:
            raise ValueError(f"alpha is a chance between 0 and 1; got {alpha}")
        self.tolerance, self.alpha = tolerance, alpha
        self.differences = ClusteredMean(lowest, highest, max_cluster_size)
        self.verdict = Verdict.INCONCLUSIVE
        self._enough = -math.log(alpha)
        self._drop = Capital(0.0, -highest, max_cluster_size)
        self._within = Capital(-tolerance, lowest, max_cluster_size)

    def add(self, differences: Sequence[float]) -> Verdict:
        """Closes a cluster of challenger-less-champion differences.

        Raises:
            ValueError: as `ClusteredMean.add`.
        """
        total, num_items = self.differences.add(differences)
        self._drop.add(-total, num_items)
        self._within.add(total, num_items)
        if self.verdict is Verdict.INCONCLUSIVE:
            if self._drop.log_e >= self._enough:
                self.verdict = Verdict.FAIL
            elif self._within.log_e >= self._enough:
                self.verdict = Verdict.PASS
        return self.verdict

    def report(self) -> PairedReport:
        """Verdict and figures."""
        seen = self.differences
        return PairedReport(
            self.verdict, seen.mean, seen.interval(self.alpha), self._drop.log_e, self._within.log_e,
            seen.num_items, seen.num_clusters,
        )  # fmt: skip


def detectable_effect(num_clusters: int, sd: float, alpha: float = 0.05) -> float:
    """The mean difference that a test of so many clusters is about as likely as not to have found, in the unit of `sd`.

    Capital under the best bet grows by mean^2 / (2 sd^2) a cluster; the mixture gives that bet about one part
    in as many as there are bets.

    Args:
        num_clusters: how many clusters of like size.
        sd: the standard deviation of a cluster's mean.
        alpha: the chance of a false alarm.
    """
    if num_clusters < 1:
        return math.inf
    return sd * math.sqrt(2.0 * math.log(len(BETS) / alpha) / num_clusters)


def alarms(log_es: Mapping[str, float], alpha: float = 0.05) -> frozenset[str]:
    """Which metrics alarm, so that the chance that any false one does is at most alpha, at any time.

    A metric alarms when the average of e-values over every set of metrics that holds it reaches 1 / alpha.

    Args:
        log_es: evidence of each metric, in nats.
        alpha: the chance for the whole family.
    """
    ordered = sorted(log_es.items(), key=lambda entry: entry[1])
    enough = -math.log(alpha)
    # Capped, so that sums stay finite: what lies above needs no more evidence.
    values = [math.exp(min(log_e, enough + 100.0)) for _, log_e in ordered]
    found = set()
    for rank, (name, _) in enumerate(ordered):
        total = least = values[rank]
        for size, other in enumerate(values[:rank], start=2):
            total += other
            least = min(least, total / size)
        if least >= 1.0 / alpha:
            found.add(name)
    return frozenset(found)


def _last(start: float, end: float, is_excluded: Callable[[float], bool]) -> float:
    """The last claim from `start` towards `end` that the data exclude; `start` when they exclude none."""
    excluded, open_ = start, end
    for _ in range(INTERVAL_STEPS):
        middle = (excluded + open_) / 2.0
        if middle in (start, end):
            break
        if is_excluded(middle):
            excluded = middle
        else:
            open_ = middle
    return excluded
