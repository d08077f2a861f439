"""Whether a router that knows cost serves a mixed fleet better: the core's policy against the rules of others.

Simulated: the fleet, its prices, SLOs, loads, traces and seeds stand in `workbench/data/fleet.yaml`; every figure is
predicted. Each router gets the same requests at the same times; none sheds, which is held. Load 1 is the highest rate
at which a split that knows everything keeps 99 % of requests within their SLO. Figures of a load are over all its
seeds; a ratio's interval is over blocks of 200 consecutive requests, paired between the two routers.

Also here: what one decision costs in CPU, beside a reference that is timed in the same run.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from rich.console import Console

from benchmarks.decision_cost import decision_bars
from benchmarks.harness import Bar, Mode, at_least, at_most, equal_to, run
from benchmarks.routing_runs import CAPACITY_RPS, OURS, SPLIT, Case, Served, serve
from workbench import stats
from workbench.sim.fleet import load_fleet

BLOCK = 200
AZURE, MOONCAKE, NO_SHARING, ONE_CLASS = "azure_conversation", "mooncake", "no_sharing", "one_class"
GOAL_LOAD = 0.7
TTFT_GOAL, USD_GOAL = 1.41, 0.67
QUICK_REQUESTS = {AZURE: 6000, MOONCAKE: 1500, NO_SHARING: 3000, ONE_CLASS: 4000}


@dataclass(frozen=True, slots=True)
class Pooled:
    """What one router did at one load of one trace, over all seeds."""

    runs: Sequence[Served]

    @property
    def ttft_s(self) -> list[float]:
        """Of all requests."""
        return [value for one in self.runs for value in one.ttft_s]

    @property
    def tpot_s(self) -> list[float]:
        """Likewise."""
        return [value for one in self.runs for value in one.tpot_s]

    @property
    def good_frac(self) -> float:
        """Share of all requests within their SLO."""
        return sum(one.num_good for one in self.runs) / sum(one.num_requests for one in self.runs)

    @property
    def usd_busy(self) -> float:
        """A million good tokens, by the time that replicas were busy."""
        return 1e6 * sum(one.busy_usd for one in self.runs) / sum(one.good_tokens for one in self.runs)

    @property
    def usd_provisioned(self) -> float:
        """The same by the wall clock."""
        return 1e6 * sum(one.provisioned_usd for one in self.runs) / sum(one.good_tokens for one in self.runs)

    @property
    def num_shed(self) -> int:
        """Requests that the router refused."""
        return sum(one.num_shed for one in self.runs)

    @property
    def line(self) -> str:
        """All of it for the table."""
        ttft_s, tpot_s = self.ttft_s, self.tpot_s
        low, high = stats.mean_interval(ttft_s) or (0.0, 0.0)
        p99 = stats.quantile_interval(ttft_s, 0.99) or (0.0, 0.0)
        hit = sum(one.cached_tokens for one in self.runs) / sum(one.prompt_tokens for one in self.runs)
        mean = sum(ttft_s) / len(ttft_s)
        return (
            f"good {self.good_frac:.4f}, TTFT mean {mean:.3f} s ({low:.3f} to {high:.3f}), "
            f"P90 {stats.quantile(ttft_s, 0.9):.3f}, "
            f"P99 {stats.quantile(ttft_s, 0.99):.2f} ({p99[0]:.2f} to {p99[1]:.2f}), "
            f"TPOT P99 {1e3 * stats.quantile(tpot_s, 0.99):.0f} ms, usd a million good tokens "
            f"{self.usd_busy:.3f} busy, {self.usd_provisioned:.3f} provisioned, cached {hit:.0%}, shed {self.num_shed}"
        )


def measure(mode: Mode, console: Console) -> list[Bar]:
    """The core's policy against others on the frozen fleet; every figure predicted."""
    spec = load_fleet()
    loads, seeds = (spec.loads, spec.seeds) if mode is Mode.FULL else ((GOAL_LOAD,), spec.seeds[:1])
    traces = (*CAPACITY_RPS,) if mode is Mode.FULL else (AZURE, MOONCAKE, NO_SHARING, ONE_CLASS)
    cases = [
        Case(trace, load, seed, None if mode is Mode.FULL else QUICK_REQUESTS[trace])
        for trace in traces
        for load in loads
        for seed in seeds
    ]
    found: dict[tuple[str, float], dict[str, list[Served]]] = {}
    with ProcessPoolExecutor(max_workers=min(os.cpu_count() or 1, 2)) as workers:
        for case, served in zip(cases, workers.map(serve, cases), strict=True):
            console.print(f"[dim]{case.trace} at load {case.load:g}, seed {case.seed}: done")
            for router, one in served.items():
                found.setdefault((case.trace, case.load), {}).setdefault(router, []).append(one)
    pooled = {key: {router: Pooled(runs) for router, runs in routers.items()} for key, routers in found.items()}
    bars = [bar for key, routers in pooled.items() for bar in _lines(*key, routers)]
    for key, routers in pooled.items():
        bars += _goals(*key, routers)
    return [*bars, *decision_bars()]


def _lines(trace: str, load: float, routers: dict[str, Pooled]) -> Iterator[Bar]:
    for router, one in routers.items():
        yield Bar(f"{trace} at {load:g}: {router}", one.line, "shown", None)
    yield equal_to(f"{trace} at {load:g}: requests shed by any", sum(one.num_shed for one in routers.values()), 0)


def _goals(trace: str, load: float, routers: dict[str, Pooled]) -> list[Bar]:
    ours, name, at_goal = routers[OURS], f"{trace} at {load:g}", load == GOAL_LOAD
    if trace == AZURE:
        prefix_load, least = routers["prefix+load"], routers["least load"]
        ttft, usd = _ttft_ratio(prefix_load, ours), ours.usd_busy / least.usd_busy
        return [
            at_least(f"{name}: mean TTFT of prefix+load over ours", ttft.value, TTFT_GOAL, judged=at_goal),
            Bar(f"{name}: its interval", f"{ttft.low:.3f} to {ttft.high:.3f}", "shown", None),
            at_most(f"{name}: our usd_busy_per_good_token over load-only's", usd, USD_GOAL, judged=at_goal),
            Bar(f"{name}: the same, seed by seed", _by_seed(ours, least), "shown", None),
            Bar(
                f"{name}: the split that knows everything, over load-only's",
                routers[SPLIT].usd_busy / least.usd_busy,
                "shown",
                None,
            ),
            at_least(f"{name}: our share of good requests", ours.good_frac, least.good_frac, judged=at_goal),
            at_least(f"{name}: and against prefix+load", ours.good_frac, prefix_load.good_frac, judged=at_goal),
        ]
    if trace == MOONCAKE:
        best = min(stats.quantile(one.ttft_s, 0.9) for router, one in routers.items() if router not in (OURS, SPLIT))
        return [at_most(f"{name}: our P90 TTFT, s, against the best", stats.quantile(ours.ttft_s, 0.9), best)]
    against = {NO_SHARING: "least load", ONE_CLASS: "vllm-router power_of_two"}.get(trace)
    if against is None:
        return []
    ratio = _ttft_ratio(ours, routers[against])
    return [
        at_most(f"{name}: our mean TTFT over that of {against}", ratio.value, 1.0),
        Bar(f"{name}: its interval", f"{ratio.low:.3f} to {ratio.high:.3f}", "shown", None),
        at_least(f"{name}: our share of good requests", ours.good_frac, routers[against].good_frac),
    ]


def _ttft_ratio(over: Pooled, under: Pooled) -> stats.Ratio:
    """Mean TTFT of one over the other's; blocks of the same requests."""
    return stats.ratio_of_sums(_blocks(over), _blocks(under))


def _blocks(pooled: Pooled) -> list[float]:
    blocks = []
    for one in pooled.runs:
        blocks += [sum(one.ttft_s[at : at + BLOCK]) for at in range(0, len(one.ttft_s) - BLOCK + 1, BLOCK)]
    return blocks


def _by_seed(ours: Pooled, least: Pooled) -> str:
    return ", ".join(
        f"{Pooled([mine]).usd_busy / Pooled([theirs]).usd_busy:.3f}"
        for mine, theirs in zip(ours.runs, least.runs, strict=True)
    )


if __name__ == "__main__":
    sys.exit(run("routing", measure))
