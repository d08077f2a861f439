"""Timelines of runs: work falls into its slots, and growing queues, ramps and throttling are seen in them."""

from __future__ import annotations

import numpy as np
import pytest

from serving.core.state import Task
from workbench.loadgen.records import RequestRecord
from workbench.loadgen.window import output_work
from workbench.measurement.timeline import judge, timeline
from workbench.stats import Saturation, Steady, named_rng


def record(index: int, sent_at_s: float, ttft_s: float, itl_s: float, num_tokens: int = 20) -> RequestRecord:
    first_s = sent_at_s + ttft_s
    return RequestRecord(
        request_id=f"r-{index}",
        index=index,
        task=Task.GENERATE,
        num_prompt_tokens=10,
        num_output_tokens_asked=num_tokens,
        intended_at_s=sent_at_s,
        sent_at_s=sent_at_s,
        chunk_at_s=tuple(first_s + itl_s * number for number in range(num_tokens)),
        chunk_tokens=(1,) * num_tokens,
        num_output_tokens=num_tokens,
    )


def closed_loop(num_users: int, length_s: float, slow_after_s: float = 1e9) -> list[RequestRecord]:
    rng = named_rng(1, "loop")
    records, free_at_s = [], list(np.linspace(0.0, 0.3, num_users))
    while min(free_at_s) < length_s:
        user = int(np.argmin(free_at_s))
        itl_s = float(rng.normal(0.02, 0.002)) * (1.5 if free_at_s[user] > slow_after_s else 1.0)
        records.append(record(len(records), free_at_s[user], 0.1, itl_s))
        free_at_s[user] = records[-1].chunk_at_s[-1]
    return records


def test_slots_hold_the_work_that_lies_in_them():
    records = closed_loop(4, 10.0)
    line = timeline(records, slot_s=0.25)
    work = output_work(records)
    for slot in (0, 3, 17, 30):
        expected = work.between(line.at_s(slot), line.at_s(slot + 1)) / 0.25
        assert line.tokens_per_s[slot] == pytest.approx(expected)
    assert line.in_flight[20] == pytest.approx(4.0)
    assert line.offered_rps == pytest.approx(len(records) / 10.0, rel=0.05)


def test_a_steady_closed_loop_is_cut_at_both_ends_and_neither_saturated_nor_changed():
    judged = judge(timeline(closed_loop(8, 40.0)))
    assert isinstance(judged.steady, Steady)
    assert judged.steady.first <= 15 and judged.steady.end >= 220
    assert isinstance(judged.saturation, Saturation) and not judged.saturation.is_saturated
    assert judged.changes == ()


def test_throttling_in_the_middle_is_a_change_where_it_came():
    line = timeline(closed_loop(8, 60.0, slow_after_s=36.0))
    judged = judge(line)
    assert any(abs(line.at_s(change.index) - 36.0) < 2.0 and change.after < change.before for change in judged.changes)


def test_more_than_is_served_is_saturation():
    records = [record(index, 0.1 * index, 0.05 * index + 0.1, 0.001) for index in range(300)]
    judged = judge(timeline(records))
    assert isinstance(judged.saturation, Saturation) and judged.saturation.is_saturated


def test_nothing_sent_is_no_timeline():
    with pytest.raises(ValueError, match="sent nothing"):
        timeline([])
    with pytest.raises(ValueError, match="above 0"):
        timeline(closed_loop(1, 1.0), slot_s=0.0)
