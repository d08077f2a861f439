from __future__ import annotations

import math
import random
from dataclasses import replace

from serving.core.state import Task
from tests.cells import make_cell
from workbench import run_fields
from workbench.loadgen import FailureKind, RequestRecord
from workbench.measurement.findings import Findings, find, num_unsteady
from workbench.sweeps.cells import CellResult


def served(index: int, sent_at_s: float, takes_s: float, num_tokens: int = 10) -> RequestRecord:
    step_s = takes_s / num_tokens
    return RequestRecord(
        request_id=str(index),
        index=index,
        task=Task.GENERATE,
        num_prompt_tokens=8,
        num_output_tokens_asked=num_tokens,
        intended_at_s=sent_at_s,
        sent_at_s=sent_at_s,
        stream_end_at_s=sent_at_s + takes_s,
        chunk_at_s=tuple(sent_at_s + step_s * (number + 1) for number in range(num_tokens)),
        chunk_tokens=(1,) * num_tokens,
        num_output_tokens=num_tokens,
        http_status=200,
    )


def open_run(growth: float, seconds: float = 60.0, rate: float = 10.0) -> list[RequestRecord]:
    """Requests whose time grows by `growth` seconds a second."""
    rng = random.Random(1)
    times_s = [number / rate for number in range(int(seconds * rate))]
    return [served(index, at_s, 1.0 + growth * at_s + 0.05 * rng.random()) for index, at_s in enumerate(times_s)]


def test_a_quiet_open_run_is_steady_and_not_saturated() -> None:
    found = find(open_run(0.0), is_closed=False)
    assert found.is_saturated is False
    assert found.notes == ()
    assert found.steady.startswith("steady from ")
    assert 0.0 <= found.metrics["steady_from_s"] < 3.0 and found.metrics["steady_to_s"] > 50.0
    low, high = found.intervals["queue_growth_rps"]
    assert low <= found.metrics["queue_growth_rps"] <= high


def test_a_queue_that_only_grows_is_said_in_words_and_figures() -> None:
    found = find(open_run(0.5), is_closed=False)
    assert found.is_saturated is True
    assert any(note.startswith("saturated: ") and "latencies only say" in note for note in found.notes)
    assert all(math.isfinite(value) for pair in found.intervals.values() for value in pair)


def test_users_who_wait_make_no_queue() -> None:
    found = find(open_run(0.5), is_closed=True)
    assert found.is_saturated is None
    assert "queue_growth_rps" not in found.metrics


def test_a_change_of_level_is_dated() -> None:
    fast = open_run(0.0, 30.0)
    slow = [served(len(fast) + n, 30.0 + n * 0.3, 3.0) for n in range(100)]
    found = find([*fast, *slow], is_closed=True)
    assert found.metrics["num_level_changes"] >= 1
    assert any("the level changed at 3" in note for note in found.notes)


def test_nothing_served_has_no_findings() -> None:
    failed = [replace(record, failure=FailureKind.LOST) for record in open_run(0.0, 1.0)]
    assert find(failed, is_closed=False) == find([], is_closed=False) == Findings()


def test_the_warm_up_is_what_was_sent_before_the_steady_part() -> None:
    records = open_run(0.0)
    found = replace(Findings(), metrics={"steady_from_s": 2.05})
    assert num_unsteady(records, found) == 21
    assert num_unsteady(records, Findings()) == 0


def test_cells_keep_notes_and_those_from_before_are_still_read() -> None:
    cell = make_cell(notes=("one", "two"), num_unsent=3)
    again = CellResult.from_json(cell.to_json())
    assert (again.notes, again.num_unsent) == (("one", "two"), 3)
    older = {name: value for name, value in cell.to_json().items() if name not in ("notes", "num_unsent")}
    assert CellResult.from_json(older).notes == ()
    assert run_fields.cell_tags(cell, "parent")["notes"] == "one\ntwo"
    assert run_fields.cell_metrics(cell)["num_unsent"] == 3.0
    assert "notes" not in run_fields.cell_tags(make_cell(), "parent")
