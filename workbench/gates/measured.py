"""How much worse is the candidate, from what was measured on each side: performance, failures, cost.

Two figures with an interval each become one of their ratio or difference by the method of variance estimates
recovery (Donner and Zou, "Closed-form confidence intervals for functions of the normal mean and standard deviation",
Statistical Methods in Medical Research 2012): what is worse takes its reach from the ends that lie that way. Ratios are
taken as logarithms.

The champion's own rows are those of the same cell on the same hardware. The intervals hold what varies inside a run,
not what the machine does between two: measure both on one day, with nothing else running.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import NormalDist, geometric_mean

from evals.suite_compare import holm
from serving.core.policies.gate import FAILURES, Figure, GateEvidence, GatePolicy, Part, Scale
from serving.core.state import Task
from workbench import stats
from workbench.comparison.cells import DEFAULT_METRICS, is_higher_better
from workbench.costs.table import MeasuredCell, PricedHardware, build
from workbench.sweeps.cells import CellResult, TargetKind
from workbench.sweeps.frames import LOAD_KINDS

_Z95 = NormalDist().inv_cdf(0.975)
_NO_CHANCE = 1e-12  # of a half-width that is 0: nothing varied
LABELS = {
    "output_tokens_per_s_per_gpu": "output tokens/s per GPU or core",
    "prompt_tokens_per_s_per_gpu": "input tokens/s per GPU or core",
    "usd_per_million_output_tokens": "USD a million output tokens",
    "usd_per_million_input_tokens": "USD a million input tokens",
    "usd_per_million_cached_input_tokens": "USD a million cached input tokens",
}
Measured = tuple[float, float, float]
"""A value and the ends of its 95 % interval."""


def metrics_of(policy: GatePolicy, task: Task) -> GatePolicy:
    """The policy for a model's task: metrics that nobody chose are those of generation."""
    chosen = policy
    if task is Task.EMBED and policy.metrics == GatePolicy().metrics:
        chosen = replace(chosen, metrics=DEFAULT_METRICS[Task.EMBED])
    if task is Task.EMBED and policy.cost_metrics == GatePolicy().cost_metrics:
        chosen = replace(chosen, cost_metrics=("usd_per_million_input_tokens",))
    return chosen


def performance(
    champion: Sequence[CellResult], candidate: Sequence[CellResult], policy: GatePolicy, now_s: float
) -> GateEvidence:
    """Each metric in each cell that both have, and the share of requests that failed.

    Args:
        champion: its newest cells, one of each kind, of one engine and one machine.
        candidate: likewise.
        policy: which metrics, and how much worse they may be.
        now_s: Unix seconds.
    """
    pairs = _pairs(champion, candidate)
    if not pairs:
        return GateEvidence(doubts=(_nothing(champion, candidate),))
    loads = {name: [_metric(name, *pair, policy.performance_tolerance) for pair in pairs] for name in policy.metrics}
    failures = _failures([mine for mine, _ in pairs], [theirs for _, theirs in pairs], policy.failures_tolerance)
    oldest_s = min(cell.ended_at_s for pair in pairs for cell in pair)
    figures = _over_loads(loads, policy.performance_tolerance)
    return GateEvidence((*figures, failures), age_s=max(0.0, now_s - oldest_s))


def cost(
    champion: Sequence[MeasuredCell],
    candidate: Sequence[MeasuredCell],
    hardware: Mapping[str, PricedHardware],
    policy: GatePolicy,
    now_s: float,
) -> GateEvidence:
    """The price in each cell that both have a row of; its interval is that of the throughput, carried over.

    Args:
        champion: cells with the MLflow runs that hold them.
        candidate: likewise.
        hardware: what classes cost.
        policy: which prices, and how much higher they may be.
        now_s: Unix seconds.
    """
    tables = [build(cells, hardware) for cells in (champion, candidate)]
    sides = [
        {
            (row.hardware_class, row.target, row.num_prompt_tokens, row.num_output_tokens, row.concurrency): row
            for row in table.rows
        }
        for table in tables
    ]
    both = sorted(sides[0].keys() & sides[1].keys())
    if not both:
        why = sorted({f"{skipped.cell_id}: {skipped.reason}" for table in tables for skipped in table.skipped})
        return GateEvidence(doubts=(f"no cell has a price on both sides ({'; '.join(why[:3]) or 'none measured'})",))
    loads: dict[str, list[Figure]] = {metric: [] for metric in policy.cost_metrics}
    for key in both:
        mine, theirs = sides[0][key], sides[1][key]
        load = _load(key[2], key[3], key[4], through_gateway=key[1] == TargetKind.GATEWAY)
        for metric in policy.cost_metrics:
            prices = [_price(getattr(row, metric), row.output_tokens_per_s_per_gpu or row.prefill_tokens_per_s_per_gpu,
                             row.ci_low, row.ci_high) for row in (mine, theirs)]  # fmt: skip
            name = f"{LABELS[metric]}, {load}"
            loads[metric].append(
                ratio(metric, name, "USD", prices[0], prices[1], policy.cost_tolerance, lower_is_better=True)
            )
    oldest_s = min(sides[side][key].measured_at.timestamp() for key in both for side in (0, 1))
    return GateEvidence(_over_loads(loads, policy.cost_tolerance), age_s=max(0.0, now_s - oldest_s))


def ratio(
    of: str,
    name: str,
    unit: str,
    champion: Measured | None,
    candidate: Measured | None,
    tolerance: float,
    *,
    lower_is_better: bool,
) -> Figure:
    """The share by which the candidate is worse. Without two positive figures with intervals there is none."""
    if champion is None or candidate is None:
        side = "the champion" if champion is None else "the candidate"
        return Figure(of, name, unit, missing=f"{side} has no figure with an interval", scale=Scale.RATIO)
    if min(*champion, *candidate) <= 0.0:
        return Figure(of, name, unit, missing="a figure that is not above 0 has no ratio", scale=Scale.RATIO)
    logs = [tuple(math.log(end) for end in side) for side in (champion, candidate)]
    moved, low, high = _difference(logs[0], logs[1])
    sign = 1.0 if lower_is_better else -1.0
    if not lower_is_better:
        moved, low, high = -moved, -high, -low
    share: Callable[[float], float] = lambda log: sign * math.expm1(sign * log)  # noqa: E731
    figure = _tested(Figure(of, name, unit, scale=Scale.RATIO), moved, low, high, sign * math.log1p(sign * tolerance))
    return replace(
        figure,
        champion=champion[0],
        candidate=candidate[0],
        worse=share(moved),
        interval=(share(low), share(high)),
        tolerance=tolerance,
    )


def pooled(loads: Sequence[Figure], tolerance: float, *, lower_is_better: bool) -> Figure:
    """The geometric mean of the ratios of one metric over all loads; none where a load has none."""
    of, unit = loads[0].of, loads[0].unit
    name = f"{_label(of)}, {len(loads)} loads together"
    shares = [(one.worse, *one.interval) for one in loads if one.worse is not None and one.interval is not None]
    if len(shares) < len(loads):
        why = next(one.missing for one in loads if one.missing)
        return Figure(
            of, name, unit, missing=f"{len(loads) - len(shares)} loads have no figure: {why}", scale=Scale.RATIO
        )
    sign = 1.0 if lower_is_better else -1.0
    logs = [[sign * math.log1p(sign * share) for share in one] for one in shares]
    moved = math.fsum(one[0] for one in logs) / len(logs)
    low = moved - math.hypot(*(one[0] - one[1] for one in logs)) / len(logs)
    high = moved + math.hypot(*(one[2] - one[0] for one in logs)) / len(logs)
    figure = _tested(Figure(of, name, unit, scale=Scale.RATIO), moved, low, high, sign * math.log1p(sign * tolerance))
    return replace(
        figure,
        champion=geometric_mean(one.champion or 0.0 for one in loads),
        candidate=geometric_mean(one.candidate or 0.0 for one in loads),
        worse=sign * math.expm1(sign * moved),
        interval=(sign * math.expm1(sign * low), sign * math.expm1(sign * high)),
        tolerance=tolerance,
    )


def _over_loads(loads: Mapping[str, Sequence[Figure]], tolerance: float) -> tuple[Figure, ...]:
    """All loads of a metric together decide; each of several may object, as tasks do in a suite."""
    together = [
        found[0] if len(found) == 1 else pooled(found, tolerance, lower_is_better=not is_higher_better(of))
        for of, found in loads.items()
    ]
    alone = [replace(one, part=Part.OBJECTS) for found in loads.values() if len(found) > 1 for one in found]
    return (*corrected(together), *corrected(alone))


def corrected(figures: Sequence[Figure]) -> tuple[Figure, ...]:
    """The figures with `p_worse` by Holm: of all alarms among them, any is false with the chance of one."""
    adjusted = holm({one.name: one.p_worse for one in figures if one.p_worse is not None})
    return tuple(replace(one, p_worse=adjusted.get(one.name)) for one in figures)


def _failures(champion: Sequence[CellResult], candidate: Sequence[CellResult], tolerance: float) -> Figure:
    sides = []
    for cells in (champion, candidate):
        failed, sent = sum(cell.num_failed for cell in cells), sum(cell.num_requests for cell in cells)
        if not sent:
            return Figure(FAILURES, "requests that failed", missing="no request was sent")
        low, high = stats.share_interval(failed, sent, method=stats.ShareMethod.EXACT)
        sides.append((failed / sent, low, high))
    moved, low, high = _difference(*sides)
    figure = _tested(Figure(FAILURES, "requests that failed", "share"), moved, low, high, tolerance)
    return replace(
        figure, champion=sides[0][0], candidate=sides[1][0], worse=moved, interval=(low, high), tolerance=tolerance
    )


def _difference(first: Sequence[float], second: Sequence[float]) -> tuple[float, float, float]:
    """Second less first with its interval, from (value, low, high) of each."""
    moved = second[0] - first[0]
    low = moved - math.hypot(second[0] - second[1], first[2] - first[0])
    return moved, low, moved + math.hypot(second[2] - second[0], first[0] - first[1])


def _tested(figure: Figure, moved: float, low: float, high: float, limit: float) -> Figure:
    """With the two chances, from how many half-widths of the side that counts lie between."""
    below, above = (max(end, _NO_CHANCE) / _Z95 for end in (moved - low, high - moved))
    normal = NormalDist()
    return replace(figure, p_worse=normal.cdf(-moved / below), p_within=normal.cdf((moved - limit) / above))


def _metric(name: str, mine: CellResult, theirs: CellResult, tolerance: float) -> Figure:
    lower_is_better = not is_higher_better(name)
    spec = mine.spec
    load = _load(
        spec.shape.num_prompt_tokens,
        spec.shape.num_output_tokens,
        spec.concurrency,
        through_gateway=spec.target is TargetKind.GATEWAY,
    )
    label = f"{_label(name)}, {load}"
    unit = "s" if name.partition("/")[0].endswith("_s") and lower_is_better else ""
    sides = [_measured(cell, name) for cell in (mine, theirs)]
    return ratio(name, label, unit, sides[0], sides[1], tolerance, lower_is_better=lower_is_better)


def _label(name: str) -> str:
    """`ttft_s/p50` as TTFT P50."""
    if name in LABELS:
        return LABELS[name]
    base, _, of = name.partition("/")
    plain = base.removesuffix("_s").upper() if base.endswith("_s") and "_per_" not in base else base.replace("_", " ")
    return f"{plain} {of.upper()}".strip()


def _load(num_prompt: int, num_output: int, concurrency: int, *, through_gateway: bool) -> str:
    return f"{num_prompt} in, {num_output} out, {concurrency} at once" + (", gateway" if through_gateway else "")


def _measured(cell: CellResult, name: str) -> Measured | None:
    if name in cell.weak or name not in cell.metrics or name not in cell.intervals:
        return None
    return (cell.metrics[name], *cell.intervals[name])


def _price(usd: float | None, rate: float | None, low: float | None, high: float | None) -> Measured | None:
    """A price goes as 1 over the rate, so that its interval is the rate's turned round."""
    if usd is None or rate is None or low is None or high is None or min(low, high, rate) <= 0.0:
        return None
    return usd, usd * rate / high, usd * rate / low


def _pairs(champion: Sequence[CellResult], candidate: Sequence[CellResult]) -> list[tuple[CellResult, CellResult]]:
    """Loads that both were measured under, on equal hardware."""
    sides = [
        {(cell.spec.cell_id, cell.hardware_fingerprint): cell for cell in cells if _is_load(cell)}
        for cells in (champion, candidate)
    ]
    return [(sides[0][key], sides[1][key]) for key in sorted(sides[0].keys() & sides[1].keys())]


def _is_load(cell: CellResult) -> bool:
    return cell.invalid is None and cell.spec.kind.value in LOAD_KINDS


def _nothing(champion: Sequence[CellResult], candidate: Sequence[CellResult]) -> str:
    for cells, side in ((champion, "the champion"), (candidate, "the candidate")):
        if not any(_is_load(cell) for cell in cells):
            return f"no valid cell of {side}: measure it with `workbench sweep`"
    return "no load that both were measured under on the same hardware"
