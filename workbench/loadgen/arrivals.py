"""When requests are sent. A closed loop follows the server; an open loop follows its own schedule.

    ClosedLoop   so many users, each waiting for its answer before it asks again
    Constant     evenly spaced
    Poisson      independent users
    Gamma        as Poisson, but more (cv > 1) or less (cv < 1) bursty at the same rate
    Diurnal      Poisson with a rate that rises and falls as over a day
    Profile      Poisson with a rate that goes from point to point: ramps and steps
    Replay       the times of a trace

A schedule is a function of its parameters and the generator of chance that it is given. Its times don't depend on
what the server does, nor on each other's rounding: a late send moves no later one.
"""

from __future__ import annotations

import math
import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, count, pairwise

MAX_IN_FLIGHT = 4096


def _check_above_0(**values: float) -> None:
    for name, value in values.items():
        if not (value > 0 and math.isfinite(value)):
            raise ValueError(f"{name} is {value}; it must be above 0")


def _check_max_in_flight(value: int) -> None:
    if value < 1:
        raise ValueError(f"max_in_flight is {value}; it must be at least 1")


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """`concurrency` users, each sending its next request when its last one has ended."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; a closed loop needs at least 1")


@dataclass(frozen=True, slots=True)
class Constant:
    """One request each 1 / `rate_rps` seconds; `max_in_flight` as `Poisson`."""

    rate_rps: float
    max_in_flight: int = MAX_IN_FLIGHT

    def __post_init__(self) -> None:
        _check_above_0(rate_rps=self.rate_rps)
        _check_max_in_flight(self.max_in_flight)

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send; without end. The first is at 0."""
        return (number / self.rate_rps for number in count())


@dataclass(frozen=True, slots=True)
class Poisson:
    """Independent users: exponential gaps with mean 1 / `rate_rps`, whatever the server does.

    `max_in_flight` protects the client; a request that waits for it is sent late, and that counts
    against the server's latency and the client's send lag both.
    """

    rate_rps: float
    max_in_flight: int = MAX_IN_FLIGHT

    def __post_init__(self) -> None:
        _check_above_0(rate_rps=self.rate_rps)
        _check_max_in_flight(self.max_in_flight)

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send; without end. The first is at 0."""
        at_s = 0.0
        while True:
            yield at_s
            at_s += rng.expovariate(self.rate_rps)


@dataclass(frozen=True, slots=True)
class Gamma:
    """Gaps of mean 1 / `rate_rps` whose standard deviation is `cv` times that.

    `cv` 1 is Poisson, below it requests come more evenly, above it in bursts. Other tools call 1 / cv² burstiness.
    """

    rate_rps: float
    cv: float
    max_in_flight: int = MAX_IN_FLIGHT

    def __post_init__(self) -> None:
        _check_above_0(rate_rps=self.rate_rps, cv=self.cv)
        _check_max_in_flight(self.max_in_flight)

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send; without end. The first is at 0."""
        shape = 1 / self.cv**2
        at_s = 0.0
        while True:
            yield at_s
            at_s += rng.gammavariate(shape, 1 / (self.rate_rps * shape))


@dataclass(frozen=True, slots=True)
class Diurnal:
    """Poisson arrivals whose rate swings around `mean_rps` up to `peak_rps` once each `period_s`.

    The rate is a cosine; it begins at its lowest, at `start_frac` 0.5 of a period it is at its peak.
    """

    mean_rps: float
    peak_rps: float
    period_s: float
    start_frac: float = 0.0
    max_in_flight: int = MAX_IN_FLIGHT

    def __post_init__(self) -> None:
        _check_above_0(mean_rps=self.mean_rps, peak_rps=self.peak_rps, period_s=self.period_s)
        _check_max_in_flight(self.max_in_flight)
        if not self.mean_rps <= self.peak_rps <= 2 * self.mean_rps:
            raise ValueError(
                f"peak_rps is {self.peak_rps:g}; around a mean of {self.mean_rps:g} it must lie between that and "
                f"{2 * self.mean_rps:g}, for the rate falls as far below the mean as it rises above"
            )
        if not 0 <= self.start_frac < 1:
            raise ValueError(f"start_frac is {self.start_frac}; it must be a share of the period, 0 up to 1")

    def rate_at(self, at_s: float) -> float:
        """Requests a second at a time of the run."""
        swing = math.cos(2 * math.pi * (at_s / self.period_s + self.start_frac))
        return self.mean_rps - (self.peak_rps - self.mean_rps) * swing

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send; without end.

        By thinning (Lewis and Shedler 1979): candidates at the peak's rate, each kept with probability rate / peak.
        """
        at_s = 0.0
        while True:
            at_s += rng.expovariate(self.peak_rps)
            if rng.random() * self.peak_rps < self.rate_at(at_s):
                yield at_s


@dataclass(frozen=True, slots=True)
class Profile:
    """Poisson arrivals whose rate goes straight from point to point; the run's load ends with the last one.

    `points` are (seconds, requests a second), the first at 0. Two points at the same time are a step.
    """

    points: tuple[tuple[float, float], ...]
    max_in_flight: int = MAX_IN_FLIGHT
    _sums: tuple[float, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _check_max_in_flight(self.max_in_flight)
        if len(self.points) < 2 or self.points[0][0] != 0:
            raise ValueError("a profile has at least two points, the first at 0 s")
        for (earlier_s, _), (later_s, _) in pairwise(self.points):
            if not (later_s >= earlier_s and math.isfinite(later_s)):
                raise ValueError(f"the points' times go backwards, from {earlier_s:g} s to {later_s:g} s")
        if any(not (rate >= 0 and math.isfinite(rate)) for _, rate in self.points):
            raise ValueError("a rate of the profile is below 0")
        areas = ((end_s - start_s) * (low + high) / 2 for (start_s, low), (end_s, high) in pairwise(self.points))
        object.__setattr__(self, "_sums", tuple(accumulate(areas, initial=0.0)))
        _check_above_0(num_expected=self._sums[-1])

    @classmethod
    def ramp(cls, start_rps: float, end_rps: float, length_s: float, **options: int) -> Profile:
        """A rate that goes evenly from one value to another."""
        _check_above_0(length_s=length_s)
        return cls(((0.0, start_rps), (length_s, end_rps)), **options)

    @classmethod
    def steps(cls, rates_rps: Sequence[float], step_s: float, **options: int) -> Profile:
        """Rates one after the other, each for `step_s`."""
        _check_above_0(step_s=step_s)
        points = [(at * step_s, rate) for index, rate in enumerate(rates_rps) for at in (index, index + 1)]
        return cls(tuple(points), **options)

    @property
    def length_s(self) -> float:
        """When the load ends."""
        return self.points[-1][0]

    @property
    def num_expected(self) -> float:
        """Requests that the profile sends in the mean."""
        return self._sums[-1]

    def rate_at(self, at_s: float) -> float:
        """Requests a second at a time of the run; 0 after its end."""
        index = bisect_right(self.points, at_s, key=lambda point: point[0])
        if not 0 < index < len(self.points):
            return 0.0
        (start_s, low), (end_s, high) = self.points[index - 1], self.points[index]
        return low + (high - low) * (at_s - start_s) / (end_s - start_s)

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send, up to the last point.

        Arrivals of rate 1 on the scale of expected requests, taken back to time by the inverse of its integral.
        """
        expected = rng.expovariate(1.0)
        while expected < self.num_expected:
            yield self._at_s(expected)
            expected += rng.expovariate(1.0)

    def _at_s(self, expected: float) -> float:
        """When so many requests are expected to have come."""
        index = bisect_right(self._sums, expected) - 1
        (start_s, low), (end_s, high) = self.points[index], self.points[index + 1]
        rest, slope = expected - self._sums[index], (high - low) / (end_s - start_s)
        # The root of low t + slope t² / 2 = rest in a form that stays exact when the slope is 0.
        return start_s + (2 * rest / (low + math.sqrt(max(0.0, low**2 + 2 * slope * rest))) if rest > 0 else 0.0)


@dataclass(frozen=True, slots=True)
class Replay:
    """The times of a trace, `scale` times as fast; the first is at 0 and the load ends with the last."""

    times_s: tuple[float, ...]
    scale: float = 1.0
    max_in_flight: int = MAX_IN_FLIGHT

    def __post_init__(self) -> None:
        _check_above_0(scale=self.scale)
        _check_max_in_flight(self.max_in_flight)
        if not self.times_s:
            raise ValueError("a replay needs at least one time")
        for index, (earlier_s, later_s) in enumerate(pairwise(self.times_s)):
            if not (later_s >= earlier_s and math.isfinite(later_s)):
                raise ValueError(f"times_s[{index + 1}] is {later_s}, before times_s[{index}] ({earlier_s})")

    @property
    def mean_rps(self) -> float:
        """Requests a second over the whole replay; 0 when all come at once."""
        length_s = self.times_s[-1] - self.times_s[0]
        return self.scale * (len(self.times_s) - 1) / length_s if length_s > 0 else 0.0

    def send_times_s(self, rng: random.Random) -> Iterator[float]:
        """Seconds after the run's start at which to send."""
        return ((at_s - self.times_s[0]) / self.scale for at_s in self.times_s)


OpenLoop = Constant | Poisson | Gamma | Diurnal | Profile | Replay
Arrival = ClosedLoop | OpenLoop
