"""What the fake engine's log says of a run of a load generator."""

from __future__ import annotations

from typing import Any

import pytest

from benchmarks.cross_tool import NUM_OUTPUT_TOKENS, NUM_STREAMS, truth

STEP_S, WAIT_S = 0.02, 0.04


def row(arrived_s: float, num_tokens: int = NUM_OUTPUT_TOKENS) -> dict[str, Any]:
    writes = [{"at_s": arrived_s + WAIT_S + STEP_S * number, "num_tokens": 1} for number in range(num_tokens)]
    return {"received_at_s": arrived_s, "num_output_tokens": num_tokens, "writes": writes}


def test_the_engines_own_figures_and_the_users_turnaround() -> None:
    length_s = WAIT_S + STEP_S * (NUM_OUTPUT_TOKENS - 1)
    first = [row(10.0) for _ in range(NUM_STREAMS)]
    second = [row(10.0 + length_s + 0.003) for _ in range(NUM_STREAMS)]
    found = truth([row(5.0, 1), *first, *second])
    assert found["engine_ttft_ms"] == pytest.approx(40.0)
    assert found["engine_tpot_ms"] == pytest.approx(20.0)
    assert found["turnaround_ms"] == pytest.approx(3.0)
    tokens = 2 * NUM_STREAMS * NUM_OUTPUT_TOKENS
    assert found["engine_output_tokens_per_s"] == pytest.approx(tokens / (2 * length_s + 0.003))
