from __future__ import annotations

import re
from dataclasses import replace

import pytest

from serving.core.state import Task
from workbench.loadgen import FailureKind, Prompt, RequestRecord, Target, TargetKind
from workbench.loadgen.client_error import client_error
from workbench.loadgen.output_lengths import output_frac, output_note, repeats_note

ENGINE, GATEWAY = Target("http://x", "m"), Target("http://x", "m", kind=TargetKind.GATEWAY)
ASKED, FREE = Prompt(8, 10, text="a"), Prompt(8, 10, text="a", may_stop=True)


def records(*num_output_tokens: int, **changes: object) -> list[RequestRecord]:
    record = RequestRecord("r", 0, Task.GENERATE, 8, 10, 0.0, 0.0, finish_reason="stop")
    return [replace(record, num_output_tokens=number, **changes) for number in num_output_tokens]


@pytest.mark.parametrize(
    ("target", "prompt", "why"),
    [
        (ENGINE, FREE, "the workload lets answers end by themselves"),
        (GATEWAY, ASKED, "cannot be told to ignore its end of text"),
        (ENGINE, ASKED, "was told to ignore its end of text .* and did not"),
    ],
)
def test_short_outputs_are_explained(target, prompt, why):
    note = output_note(records(3, 7), target, prompt)
    assert re.search(f"outputs have 50% of the asked length: .*{why}.*stop 2", note)


def test_outputs_within_a_tenth_need_no_word():
    assert output_note(records(10, 8), ENGINE, FREE) is None
    assert output_note(records(8, 8), ENGINE, FREE) is not None
    assert output_note([], ENGINE, FREE) is None


def test_what_broke_off_says_nothing_about_the_length_that_a_server_chose():
    lost = records(1, failure=FailureKind.LOST)
    wrong = records(5, failure=FailureKind.WRONG_LENGTH)
    assert output_frac([*records(10), *lost]) == 1.0
    assert output_frac([*records(10), *wrong]) == 0.75
    assert output_frac(records(0, task=Task.EMBED)) is None


def test_repeats():
    assert repeats_note(0, 3) is None
    assert "2 of 3 prompts" in repeats_note(2, 3)


def late(lag_s: float, **changes: object) -> list[RequestRecord]:
    return records(10, 10, intended_at_s=1.0, sent_at_s=1.0 + lag_s, **changes)


def test_an_open_loop_is_held_to_its_schedule_whether_or_not_an_answer_came():
    for status in (200, None):
        found = client_error(late(0.2, http_status=status), None, [0.001], True, 0)
        assert "fell behind" in found.invalid
        assert found.send_lag_p99_s == pytest.approx(0.2)
    assert client_error(late(0.01, http_status=200), None, [], True, 0).invalid is None
    assert "3 requests came due" in client_error(late(0.0), None, [], True, 3).invalid


def test_a_closed_loops_first_wave_opens_connections_and_does_not_count():
    first = late(0.2, http_status=200)
    rest = late(0.001, http_status=200) * 5
    assert client_error([*first, *rest], 2, [0.001], True, 0).invalid is None
    assert "too slow" in client_error(rest, 2, [0.1], True, 0).invalid
