"""What a run's timeline tells beside its figures: the steady part, a queue that only grew, levels that moved.

records → timeline → judge → Findings: figures for MLflow, sentences for people. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from workbench import stats
from workbench.loadgen.records import RequestRecord
from workbench.measurement.timeline import Judged, Timeline, judge, timeline

MAX_NAMED_CHANGES = 3


@dataclass(frozen=True, slots=True)
class Findings:
    """What was found; without a served request nothing is.

    Attributes:
        steady: the steady part, or why none is known, in words.
        metrics: `steady_from_s` and `steady_to_s` since the run's start, `num_level_changes`, and of an open loop
            `queue_growth_rps`; all finite.
        notes: what a reader of the figures must know.
        is_saturated: whether requests piled up as long as they were sent; None where that is not known.
    """

    steady: str = "no request was served"
    metrics: dict[str, float] = field(default_factory=dict)
    intervals: dict[str, stats.Interval] = field(default_factory=dict)
    notes: tuple[str, ...] = ()
    is_saturated: bool | None = None
    line: Timeline | None = None
    judged: Judged | None = None

    @property
    def steady_from_s(self) -> float | None:
        """When the steady part began, in seconds since the run's start; None where there is none."""
        return self.metrics.get("steady_from_s")


def find(records: Sequence[RequestRecord], *, is_closed: bool) -> Findings:
    """Looks at a run.

    Args:
        records: of one run.
        is_closed: whether users waited for their answers: then no queue can grow, whatever the server does.
    """
    if not any(record.ok for record in records):
        return Findings()
    line = timeline(records)
    judged = judge(line)
    metrics: dict[str, float] = {"num_level_changes": float(len(judged.changes))}
    intervals: dict[str, stats.Interval] = {}
    notes = []
    steady = judged.steady
    if isinstance(steady, stats.Steady):
        metrics |= {"steady_from_s": line.at_s(steady.first), "steady_to_s": line.at_s(steady.end)}
        cut = f" ({', '.join(steady.cuts)} cut)" if steady.cuts else ""
        text = f"steady from {line.at_s(steady.first):.1f} to {line.at_s(steady.end):.1f} s{cut}"
    else:
        text = f"no steady part: {steady}"
        notes += [text] if steady.reason is stats.Reason.NOT_SETTLED else []
    queue = None if is_closed or isinstance(judged.saturation, stats.Refusal) else judged.saturation
    if queue is not None:
        metrics["queue_growth_rps"] = queue.growth_rps
        if math.isfinite(queue.low_rps) and math.isfinite(queue.high_rps):
            intervals["queue_growth_rps"] = (queue.low_rps, queue.high_rps)
        notes += [_saturated(queue)] if queue.is_saturated else []
    notes += _changes(line, judged)
    is_saturated = None if queue is None else queue.is_saturated
    return Findings(text, metrics, intervals, tuple(notes), is_saturated, line, judged)


def num_unsteady(records: Sequence[RequestRecord], found: Findings) -> int:
    """How many requests were sent before the steady part began: the warm-up, as far as it can be seen."""
    from_s = found.steady_from_s
    return 0 if from_s is None else sum(record.sent_at_s < from_s for record in records)


def _saturated(queue: stats.Saturation) -> str:
    return (
        f"saturated: {queue.growth_rps:.2g} requests a second piled up ({queue.low_rps:.2g} to {queue.high_rps:.2g}), "
        f"{queue.growth_frac:.0%} of what was sent: latencies only say how long the run went on"
    )


def _changes(line: Timeline, judged: Judged) -> list[str]:
    shown = [
        f"the level changed at {line.at_s(one.index):.1f} s from {one.before:.4g} to {one.after:.4g} tokens/s "
        f"(p {one.p:.2g})"
        for one in judged.changes[:MAX_NAMED_CHANGES]
    ]
    num_more = len(judged.changes) - len(shown)
    return shown + ([f"{num_more} more changes of level"] if num_more else [])
