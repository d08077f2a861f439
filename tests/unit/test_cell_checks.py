from __future__ import annotations

from dataclasses import replace

import pytest

from serving.core.state import ReplicaSnapshot, Task
from workbench.loadgen import ClientError, FailureKind, LoadResult, RequestRecord, Summary
from workbench.measurement.cell_checks import Counters, client_error_frac, decode_tokens_per_s, invalid_because
from workbench.sweeps.cells import CellKind, CellSpec, Shape

SPEC = CellSpec(CellKind.MIXED, Shape(64, 32), 4, 10)
SUMMARY = Summary({"ttft_s/p50": 0.1}, {}, 10, 0)


def records(count: int = 10, *, num_failed: int = 0) -> list[RequestRecord]:
    chunks = tuple(0.1 + 0.03 * step for step in range(32))
    served = RequestRecord("r", 0, Task.GENERATE, 64, 32, 0.0, 0.0, chunk_at_s=chunks, chunk_tokens=(1,) * 32,
                           num_output_tokens=32)  # fmt: skip
    failed = replace(served, failure=FailureKind.LOST, num_output_tokens=5, chunk_at_s=(), chunk_tokens=())
    return [served] * (count - num_failed) + [failed] * num_failed


def counted(prompt: int = 640, output: int = 320, queried: int = 640, hit: int = 0) -> Counters:
    return Counters(prompt, output, queried, hit)


def test_counters_are_what_grew() -> None:
    before = ReplicaSnapshot("r", 0.0, 0, 0, 0.0, None, 100, 10, 0, 50, 5)
    after = ReplicaSnapshot("r", 1.0, 0, 0, 0.0, None, 740, 330, 0, 690, 37)
    assert Counters.between(before, after) == Counters(640, 320, 640, 32)
    assert Counters.between(before, after).hit_frac == pytest.approx(0.05)
    assert Counters.between(before, before).hit_frac == 0.0


@pytest.mark.parametrize("counters", [counted(), counted(prompt=646), counted(output=317)])
def test_counters_within_one_percent_agree(counters: Counters) -> None:
    assert invalid_because(SPEC, Task.GENERATE, SUMMARY, counters, records()) is None


@pytest.mark.parametrize("counters", [counted(prompt=704), counted(output=324), counted(prompt=0, output=0)])
def test_company_is_seen(counters: Counters) -> None:
    reason = invalid_because(SPEC, Task.GENERATE, SUMMARY, counters, records())
    assert reason is not None
    assert reason.startswith("somebody else used the replica")


def test_behind_the_gateway_work_may_have_gone_elsewhere() -> None:
    spec = replace(SPEC, kind=CellKind.GATEWAY)
    reason = invalid_because(spec, Task.GENERATE, SUMMARY, counted(prompt=320, output=160), records())
    assert reason is not None
    assert "another replica served too" in reason


def test_a_failed_request_may_have_been_worked_on_or_not() -> None:
    one_failed = records(num_failed=1)
    assert counted(prompt=576, output=288).gap(one_failed, Task.GENERATE) is None
    assert counted(prompt=640, output=320).gap(one_failed, Task.GENERATE) is None
    assert counted(prompt=720, output=320).gap(one_failed, Task.GENERATE) is not None


def test_an_embedding_has_no_output_to_compare() -> None:
    assert counted(output=0).gap(records(), Task.EMBED) is None


def test_a_warm_cell_is_refused() -> None:
    reason = invalid_because(SPEC, Task.GENERATE, SUMMARY, counted(hit=64), records())
    assert reason == "warm: 10.0% of the prompt tokens came from the prefix cache"


def test_a_cached_cell_must_be_warm() -> None:
    spec = replace(SPEC, kind=CellKind.CACHED)
    assert invalid_because(spec, Task.GENERATE, SUMMARY, counted(hit=630), records()) is None
    reason = invalid_because(spec, Task.GENERATE, SUMMARY, counted(hit=64), records())
    assert reason is not None
    assert reason.startswith("not cached")


def test_a_summary_that_does_not_count_speaks_first() -> None:
    summary = replace(SUMMARY, invalid="7 of 10 requests failed")
    assert invalid_because(SPEC, Task.GENERATE, summary, counted(), records()) == "7 of 10 requests failed"


def test_the_decode_rate_is_that_of_all_streams() -> None:
    assert decode_tokens_per_s(records(), 4) == pytest.approx(4 / 0.03)
    assert decode_tokens_per_s([], 4) is None
    assert decode_tokens_per_s(records(2, num_failed=2), 4) is None


def test_the_clients_error_is_a_share_of_the_first_tokens_wait() -> None:
    load = LoadResult([], 0.0, 0.0, 1.0, ClientError(0.001, 0.002))
    assert client_error_frac(load, SUMMARY) == pytest.approx(0.03)
    assert client_error_frac(load, replace(SUMMARY, metrics={})) == 0.0
