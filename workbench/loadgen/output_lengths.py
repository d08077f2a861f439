"""Whether answers were about as long as asked for, and if not, why."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from serving.core.state import Task
from workbench.loadgen.client import Target
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.records import FailureKind, RequestRecord

LEAST_FRAC, MOST_FRAC = 0.9, 1.1


def output_frac(records: Sequence[RequestRecord]) -> float | None:
    """Output tokens over those asked for, of all answers that ended; None when there are none."""
    ended = _ended(records)
    asked = sum(record.num_output_tokens_asked for record in ended)
    return sum(record.num_output_tokens for record in ended) / asked if asked else None


def _ended(records: Sequence[RequestRecord]) -> list[RequestRecord]:
    """Answers of the length that the server chose, whether or not that was a failure."""
    return [r for r in records if r.task is Task.GENERATE and r.failure in (None, FailureKind.WRONG_LENGTH)]


def output_note(records: Sequence[RequestRecord], target: Target, prompt: Prompt) -> str | None:
    """Why outputs lie outside 90 to 110 % of the asked length; None when they lie inside.

    Args:
        records: of one run.
        target: who answered.
        prompt: one of the run's: how the server was asked.
    """
    frac = output_frac(records)
    if frac is None or LEAST_FRAC <= frac <= MOST_FRAC:
        return None
    reasons = Counter(record.finish_reason or "none" for record in _ended(records))
    seen = ", ".join(f"{name} {number}" for name, number in reasons.most_common())
    if prompt.may_stop:
        why = "the workload lets answers end by themselves (exact=yes asks the server to go on)"
    elif not target.has_extras:
        why = "a target without vLLM's extras cannot be told to ignore its end of text (ignore_eos): measure the engine"
    else:
        why = "the server was told to ignore its end of text (ignore_eos) and did not"
    return f"outputs have {frac:.0%} of the asked length: {why}; finish reasons: {seen}"


def repeats_note(num_repeated: int, num_requests: int) -> str | None:
    """That prompts came again; None when each was its own."""
    if not num_repeated:
        return None
    return (
        f"{num_repeated} of {num_requests} prompts were sent in this run before: an engine answers them from its cache"
    )
