"""Engines whose capacity under an SLO is known in closed form, and noisy cells drawn from them.

QueueEngine   open loop. M/M/k: requests wait for one of k slots (the KV limit). Erlang: P(W > t) = C e^{-(k mu - l) t}
BatchEngine   closed loop. A step takes a + b x running; beyond the KV limit requests wait for a place
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from workbench.slo.readings import p99_reading, share_reading
from workbench.slo.search import Probe

Z_99 = 2.3263


@dataclass(frozen=True)
class QueueEngine:
    """`slots` running requests at once, exponential service of mean `service_s`; the SLO is on P99 of TTFT.

    A cell lasts `cell_services` mean services: a queue near its capacity needs that long to show its tail.
    """

    slots: int
    service_s: float
    prefill_s: float
    ttft_limit_s: float
    cell_services: int = 400

    def p99_wait_s(self, rate_rps: float) -> float:
        """The P99 of the wait for a slot (Erlang C); infinite where the queue grows without end."""
        offered = rate_rps * self.service_s
        if offered >= self.slots:
            return math.inf
        inverse = 1.0  # Erlang B, by its recursion
        for servers in range(1, self.slots + 1):
            inverse = 1 + servers / offered * inverse
        blocked = 1 / inverse
        waits = blocked / (1 - offered / self.slots * (1 - blocked))
        return max(0.0, math.log(waits / 0.01) * self.service_s / (self.slots - offered))

    def capacity(self) -> float:
        """The highest load that keeps the SLO."""
        return root(
            lambda rate: self.prefill_s + self.p99_wait_s(rate) <= self.ttft_limit_s, self.slots / self.service_s
        )

    def probe(self, rate_rps: float, rng: np.random.Generator, effort: int = 1) -> Probe:
        """A cell at this rate, simulated request by request after a warm-up."""
        num_measured = max(1000, round(effort * self.cell_services * self.service_s * rate_rps))
        warm_up = num_measured // 5
        count = num_measured + warm_up
        arrivals = np.cumsum(rng.exponential(1 / rate_rps, count)).tolist()
        services = rng.exponential(self.service_s, count).tolist()
        free = [0.0] * self.slots
        ttft = []
        for arrival, service in zip(arrivals, services, strict=True):
            begun = max(arrival, free[0])
            heapq.heapreplace(free, begun + service)
            ttft.append(begun - arrival + self.prefill_s)
        measured = ttft[warm_up:]
        reading = p99_reading("ttft_s/p99", measured, self.ttft_limit_s)
        assert reading is not None
        good = share_reading("slo_good_frac", [value <= self.ttft_limit_s for value in measured], 0.99)
        return Probe(rate_rps, (reading, good))


@dataclass(frozen=True)
class BatchEngine:
    """`base_s + per_seq_s x running` a step, at most `kv_places` running; log-normal noise a request and a cell."""

    base_s: float
    per_seq_s: float
    kv_places: int
    output_tokens: int
    tpot_limit_s: float
    ttft_limit_s: float
    noise: float = 0.05
    cell_noise: float = 0.01
    num_requests: int = 400

    def tpot_s(self, concurrency: float) -> float:
        """The time of a step."""
        return self.base_s + self.per_seq_s * min(concurrency, self.kv_places)

    def ttft_s(self, concurrency: float) -> float:
        """Four steps of prefill, and the wait for a place in the KV cache."""
        waiting = max(0.0, concurrency - self.kv_places) / self.kv_places
        return 4 * self.tpot_s(concurrency) + waiting * self.output_tokens * self.tpot_s(concurrency)

    def is_kept(self, concurrency: float) -> bool:
        """Whether both limits hold at P99, in truth."""
        tail = math.exp(Z_99 * self.noise)
        in_tpot = self.tpot_s(concurrency) * tail <= self.tpot_limit_s
        return in_tpot and self.ttft_s(concurrency) * tail <= self.ttft_limit_s

    def capacity(self) -> float:
        """The highest load that keeps the SLO."""
        return float(math.floor(root(self.is_kept, 4096.0) + 1e-9))

    def probe(self, concurrency: float, rng: np.random.Generator, effort: int = 1) -> Probe:
        """A cell at this concurrency, with the noise of its requests and of the cell."""
        drift = math.exp(rng.normal(0, self.cell_noise))
        tpot = self.tpot_s(concurrency) * drift * np.exp(rng.normal(0, self.noise, effort * self.num_requests))
        ttft = self.ttft_s(concurrency) * drift * np.exp(rng.normal(0, self.noise, effort * self.num_requests))
        readings = [
            p99_reading("tpot_s/p99", tpot.tolist(), self.tpot_limit_s),
            p99_reading("ttft_s/p99", ttft.tolist(), self.ttft_limit_s),
        ]
        return Probe(concurrency, tuple(reading for reading in readings if reading is not None))


def root(is_kept: Callable[[float], bool], highest: float) -> float:
    """The highest load that is kept, by bisection."""
    low, high = 0.0, highest
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if is_kept(middle) else (low, middle)
    return low


def random_queue(rng: np.random.Generator) -> QueueEngine:
    """A queue of 8 to 64 slots."""
    slots = int(rng.integers(8, 65))
    service_s = float(rng.uniform(0.5, 4.0))
    prefill_s = float(rng.uniform(0.05, 0.2))
    return QueueEngine(slots, service_s, prefill_s, prefill_s + float(rng.uniform(0.1, 0.5)) * service_s)


def random_batch(rng: np.random.Generator) -> BatchEngine:
    """Half break by step time, half by the KV limit, whose waiting begins at a knee."""
    base_s, per_seq_s = float(rng.uniform(0.01, 0.03)), float(rng.uniform(0.0003, 0.002))
    wanted = float(np.exp(rng.uniform(math.log(20), math.log(300))))
    by_step = rng.random() < 0.5
    kv_places = round(wanted * (2.0 if by_step else 0.9))
    at = (base_s + per_seq_s * wanted) * math.exp(Z_99 * 0.05)
    tpot_limit_s = at if by_step else at * 2
    ttft_limit_s = 1e3 if by_step else 4 * at + at * 0.11 * 64
    return BatchEngine(base_s, per_seq_s, kv_places, 64, tpot_limit_s, ttft_limit_s)
