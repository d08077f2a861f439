"""Cost to serve: which rows count, and what they say of a request."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.policies.cost import CostEstimate, RowState, estimate, most_tokens_done, state_of
from tests.unit.core_examples import NOW_S, a_pool, a_request, a_row

MEASURED = ("measured",)


def test_price_is_tokens_times_rates() -> None:
    request = a_request(num_prompt_tokens=200, expected_output_tokens=50)
    assert estimate(request, [a_row()], 0, NOW_S) == CostEstimate(RowState.FRESH, (200 * 1.0 + 50 * 10.0) / 1e6)


def test_price_is_interpolated_over_log_concurrency() -> None:
    rows = [
        a_row(concurrency=1, usd_per_million_output_tokens=8.0),
        a_row(concurrency=16, usd_per_million_output_tokens=2.0),
    ]
    request = a_request(num_prompt_tokens=0, expected_output_tokens=1_000_000)
    prices = [estimate(request, rows, others, NOW_S).usd for others in (0, 3, 15, 99)]
    assert prices == pytest.approx([8.0, 5.0, 2.0, 2.0])


def test_the_nearest_measured_shape_prices_the_request() -> None:
    rows = [
        a_row(num_prompt_tokens=64, num_output_tokens=32, usd_per_million_output_tokens=1.0),
        a_row(num_prompt_tokens=2048, num_output_tokens=32, usd_per_million_output_tokens=9.0),
    ]
    request = a_request(num_prompt_tokens=1500, expected_output_tokens=32)
    usd = estimate(request, rows, 0, NOW_S).usd
    assert usd == pytest.approx((1500 * 1.0 + 32 * 9.0) / 1e6)


def test_expired_rows_do_not_count() -> None:
    assert estimate(a_request(), [a_row(expires_at_s=NOW_S)], 0, NOW_S) == CostEstimate(RowState.EXPIRED)
    assert estimate(a_request(), [], 0, NOW_S) == CostEstimate(RowState.UNMEASURED)


@pytest.mark.parametrize(
    ("row", "state"),
    [
        (a_row(), RowState.FRESH),
        (a_row(expires_at_s=NOW_S - 1), RowState.EXPIRED),
        (a_row(engine_fingerprint="another"), RowState.MISMATCH),
        (a_row(hardware_fingerprint="another"), RowState.MISMATCH),
        (a_row(provenance="predicted"), RowState.MISMATCH),
        (a_row(version="2"), RowState.UNMEASURED),
        (a_row(hardware_class="l4-24g"), RowState.UNMEASURED),
    ],
)
def test_state_says_why_rows_do_not_count(row: object, state: RowState) -> None:
    assert state_of([row], a_pool("p"), MEASURED, NOW_S) is state  # type: ignore[list-item]


@given(
    st.lists(st.tuples(st.integers(1, 512), st.floats(0.01, 100.0)), min_size=1, max_size=8, unique_by=lambda t: t[0]),
    st.integers(0, 2000),
)
def test_a_price_never_leaves_the_measured_range(cells: list[tuple[int, float]], others: int) -> None:
    rows = [a_row(concurrency=c, usd_per_million_output_tokens=p) for c, p in cells]
    usd = estimate(a_request(num_prompt_tokens=0, expected_output_tokens=1_000_000), rows, others, NOW_S).usd
    assert usd is not None
    assert min(p for _, p in cells) * (1 - 1e-9) <= usd <= max(p for _, p in cells) * (1 + 1e-9)


@given(st.permutations([(64, 32), (128, 16), (32, 64), (64, 64)]))
def test_the_order_of_rows_never_decides(shapes: list[tuple[int, int]]) -> None:
    rows = [
        a_row(num_prompt_tokens=p, num_output_tokens=o, usd_per_million_output_tokens=float(p + o)) for p, o in shapes
    ]
    request = a_request(num_prompt_tokens=64, expected_output_tokens=45)
    assert estimate(request, rows, 0, NOW_S) == estimate(request, sorted(rows, key=repr), 0, NOW_S)


@pytest.mark.parametrize(
    ("running_s", "num_choices", "num_tokens"),
    [(0.0, 1, 101), (0.999, 1, 151), (0.5, 3, 178), (-1.0, 1, 101), (1e6, 1, 1100), (1e6, 3, 1100)],
)
def test_what_nobody_reported_is_at_most_what_fits_into_its_time(
    running_s: float, num_choices: int, num_tokens: int
) -> None:
    rows = [a_row(tpot_p50_s=0.04, expires_at_s=NOW_S), a_row(tpot_p50_s=0.02), a_row(tpot_p50_s=None)]
    request = a_request(num_prompt_tokens=100, expected_output_tokens=1000)
    assert most_tokens_done(request, rows, running_s, num_choices) == num_tokens


@pytest.mark.parametrize("tpot_s", [None, 0.0, float("nan")])
def test_where_no_decoding_was_measured_all_that_was_expected_may_have_been_done(tpot_s: float | None) -> None:
    request = a_request(num_prompt_tokens=100, expected_output_tokens=1000)
    assert most_tokens_done(request, [a_row(tpot_p50_s=tpot_s)], 0.1, 1) == 1100
