"""A run, slot of time by slot: what was served and how much was in flight; and what the slots say about the run.

records → timeline() → judge(): the steady part, whether the queue only grew, where the level changed
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from serving.core.state import Task
from workbench import stats
from workbench.loadgen.records import RequestRecord
from workbench.loadgen.window import Work, left_at_s, output_work, prompt_work, spread_work

NUM_SLOTS = 240
MIN_SLOT_S = 0.05


@dataclass(frozen=True, slots=True)
class Timeline:
    """Slots of `slot_s` from `start_s` on: tokens a second of served requests, and requests in flight on average.

    Tokens are those of outputs, of embeddings those of prompts. `sent_for_s` is the time from first to last send.
    """

    start_s: float
    slot_s: float
    tokens_per_s: tuple[float, ...]
    in_flight: tuple[float, ...]
    sent_for_s: float
    offered_rps: float

    def at_s(self, slot: int) -> float:
        """When the slot begins, in seconds since the run's start."""
        return self.start_s + slot * self.slot_s


@dataclass(frozen=True, slots=True)
class Judged:
    """What the timeline says; change points are by the timeline's slots, between the ramps."""

    steady: stats.Steady | stats.Refusal
    saturation: stats.Saturation | stats.Refusal
    changes: tuple[stats.ChangePoint, ...]


def timeline(records: Sequence[RequestRecord], *, slot_s: float | None = None) -> Timeline:
    """The run's timeline, from the first send to the last end.

    Args:
        records: of one run.
        slot_s: length of a slot; by default so that there are 240, but no less than 50 ms.

    Raises:
        ValueError: no records, or a slot that is not above 0.
    """
    if not records:
        raise ValueError("no records: there is no timeline of a run that sent nothing")
    start_s = min(record.sent_at_s for record in records)
    end_s = max(left_at_s(record) for record in records)
    slot_s = max(MIN_SLOT_S, (end_s - start_s) / NUM_SLOTS) if slot_s is None else slot_s
    if slot_s <= 0.0:
        raise ValueError(f"slot_s is {slot_s}; it must be above 0")
    served = [record for record in records if record.ok]
    generates = any(record.task is Task.GENERATE for record in served)
    tokens = output_work(served) if generates else prompt_work(served)
    num_slots = max(1, int((end_s - start_s) / slot_s))
    last_sent_s = max(record.sent_at_s for record in records)
    stays = spread_work((left_at_s(one) - one.sent_at_s, one.sent_at_s, left_at_s(one)) for one in records)
    return Timeline(
        start_s=start_s,
        slot_s=slot_s,
        tokens_per_s=tuple((_binned(tokens, start_s, slot_s, num_slots) / slot_s).tolist()),
        in_flight=tuple((_binned(stays, start_s, slot_s, num_slots) / slot_s).tolist()),
        sent_for_s=last_sent_s - start_s,
        offered_rps=len(records) / max(last_sent_s - start_s, slot_s),
    )


def judge(line: Timeline) -> Judged:
    """Looks for the steady part, a queue that only grows (until sending ended), and changes of level."""
    steady = stats.steady(line.tokens_per_s, line.in_flight)
    # A level that changes late is no cool-down: what the steady part leaves out is looked at, ramps aside.
    first, end = stats.ramps(line.in_flight)
    sending = line.in_flight[: int(line.sent_for_s / line.slot_s)]
    saturation = stats.saturation(sending or line.in_flight, line.slot_s, line.offered_rps)
    changes = stats.change_points(line.tokens_per_s[first:end])
    moved = tuple(stats.ChangePoint(one.index + first, one.before, one.after, one.p) for one in changes)
    return Judged(steady, saturation, moved)


def _binned(work: Work, start_s: float, slot_s: float, num_slots: int) -> npt.NDArray[np.float64]:
    """How much of the work lies in each slot, from how much lies before each edge: a sort, not slots × pieces."""
    edges_s = start_s + slot_s * np.arange(num_slots + 1)
    lengths_s = np.maximum(work.end_s - work.start_s, 1e-9)
    rates = work.amount / lengths_s
    at_s = np.concatenate([work.start_s, work.start_s + lengths_s])
    steps = np.concatenate([rates, -rates])
    order = np.argsort(at_s, kind="stable")
    at_s, rate = at_s[order], np.cumsum(steps[order])
    done = np.concatenate([[0.0], np.cumsum(rate[:-1] * np.diff(at_s))])
    return np.maximum(np.diff(np.interp(edges_s, at_s, done)), 0.0)
