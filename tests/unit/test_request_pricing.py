"""What requests cost by the rows of their pool, and that the bound before dispatch is one."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serving.core.policies.cost import CostEstimate, RowState, estimate
from serving.core.policies.pricing import PriceList, Prices, Tokens
from serving.core.state import CostRow, PoolView, Task
from tests.unit.core_examples import NOW_S, a_pool, a_request, a_row

prices = st.floats(0, 1e4)
rows_of_a_pool = st.lists(
    st.builds(
        lambda prompt, output, concurrency, usd_in, usd_cached, usd_out: a_row(
            num_prompt_tokens=prompt,
            num_output_tokens=output,
            concurrency=concurrency,
            usd_per_million_input_tokens=usd_in,
            usd_per_million_cached_input_tokens=usd_cached,
            usd_per_million_output_tokens=usd_out,
        ),
        st.sampled_from([16, 256, 4096]),
        st.sampled_from([1, 64]),
        st.sampled_from([1, 2, 8, 32]),
        prices,
        st.none() | prices,
        prices,
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda row: (row.num_prompt_tokens, row.num_output_tokens, row.concurrency),
)


def a_view(*rows: CostRow, **pool: object) -> PoolView:
    return PoolView(a_pool(str(pool.pop("pool_id", "p")), **pool), (), cost_rows=rows)


def test_new_cached_and_output_tokens_have_prices_of_their_own() -> None:
    usd = Prices().usd(a_view(a_row()), Tokens(100, 60, 10), num_requests=0, now_s=NOW_S)
    assert usd == CostEstimate(RowState.FRESH, pytest.approx((40 * 1.0 + 60 * 0.1 + 10 * 10.0) / 1e6))


def test_cached_tokens_without_a_measured_price_cost_what_new_ones_do() -> None:
    view = a_view(a_row(usd_per_million_cached_input_tokens=None))
    assert Prices().usd(view, Tokens(100, 60), num_requests=0, now_s=NOW_S).usd == pytest.approx(100 / 1e6)


def test_more_cached_tokens_than_the_prompt_has_cost_no_more_than_all_of_it() -> None:
    assert PriceList.of([a_row()], NOW_S).usd(Tokens(10, 99), 0) == pytest.approx(10 * 0.1 / 1e6)


@given(rows_of_a_pool, st.integers(0, 5000), st.integers(0, 500), st.integers(0, 64))
def test_without_a_cache_it_is_what_the_router_expected(
    rows: list[CostRow], num_prompt: int, num_output: int, num_requests: int
) -> None:
    request = a_request(num_prompt_tokens=num_prompt, expected_output_tokens=num_output)
    expected = estimate(request, rows, num_requests, NOW_S)
    used = Tokens(num_prompt, 0, num_output)
    found = Prices().usd(a_view(*rows), used, num_requests=num_requests, now_s=NOW_S)
    assert found.state is expected.state
    assert found.usd == pytest.approx(expected.usd, rel=1e-9)


@given(rows_of_a_pool, rows_of_a_pool, st.data())
def test_nothing_costs_more_than_the_bound_before_it_ran(
    rows: list[CostRow], others: list[CostRow], data: st.DataObject
) -> None:
    pools = [a_view(*rows), a_view(*others, pool_id="q")]
    max_prompt, max_output = data.draw(st.integers(0, 5000)), data.draw(st.integers(0, 2000))
    request = a_request(num_prompt_tokens=max_prompt)
    bound = Prices().most_usd(request, pools, max_output_tokens=max_output, num_choices=2, now_s=NOW_S)
    prompt, output = data.draw(st.integers(0, max_prompt)), data.draw(st.integers(0, 2 * max_output))
    used = Tokens(prompt, data.draw(st.integers(0, prompt)), output)
    for pool in pools:
        usd = Prices().usd(pool, used, num_requests=data.draw(st.integers(0, 64)), now_s=NOW_S).usd
        assert usd is not None
        assert bound is not None
        assert usd <= bound * (1 + 1e-9)


def test_the_bound_is_over_the_measured_pools_that_the_request_may_run_in() -> None:
    cheap, dear = a_row(), a_row(usd_per_million_output_tokens=1000.0)
    pools = [a_view(cheap), a_view(dear, pool_id="q", region="far"), a_view(pool_id="unmeasured")]

    def most(**changes: object) -> float | None:
        request = replace(a_request(num_prompt_tokens=0), **changes)  # type: ignore[arg-type]
        return Prices().most_usd(request, pools, max_output_tokens=100, now_s=NOW_S)

    assert most() == pytest.approx(100 * 1000.0 / 1e6)
    assert most(regions=("local",)) == pytest.approx(100 * 10.0 / 1e6)
    assert most(regions=("nowhere",)) is None


def test_without_a_limit_of_tokens_the_model_s_length_is_the_bound() -> None:
    request, pools = a_request(num_prompt_tokens=0), [a_view(a_row(), max_model_len=2048)]
    for given_limit in (None, 10**9):
        most = Prices().most_usd(request, pools, max_output_tokens=given_limit, num_choices=3, now_s=NOW_S)
        assert most == pytest.approx(3 * 2048 * 10.0 / 1e6)


def test_an_embedding_has_no_output_to_pay_for() -> None:
    request = replace(a_request(num_prompt_tokens=50), task=Task.EMBED)
    most = Prices().most_usd(request, [a_view(a_row())], max_output_tokens=None, now_s=NOW_S)
    assert most == pytest.approx(50 / 1e6)


def test_rows_that_expire_while_the_list_is_in_use_stop_counting() -> None:
    view = a_view(a_row(expires_at_s=NOW_S + 10), a_row(concurrency=8, expires_at_s=NOW_S + 20))
    kept, used = Prices(), Tokens(0, 0, 100)
    assert kept.usd(view, used, num_requests=0, now_s=NOW_S).state is RowState.FRESH
    assert kept.usd(view, used, num_requests=0, now_s=NOW_S + 10).state is RowState.FRESH
    assert kept.usd(view, used, num_requests=0, now_s=NOW_S + 20) == CostEstimate(RowState.EXPIRED)
    assert kept.most_usd(a_request(), [view], max_output_tokens=1, now_s=NOW_S + 20) is None


def test_a_new_table_brings_new_prices() -> None:
    kept, used = Prices(), Tokens(0, 0, 100)
    usd = [
        kept.usd(a_view(a_row(usd_per_million_output_tokens=price)), used, num_requests=0, now_s=NOW_S).usd
        for price in (10.0, 20.0)
    ]
    assert usd == pytest.approx([100 * 10.0 / 1e6, 100 * 20.0 / 1e6])


def test_an_unmeasured_pool_has_no_price_and_neither_has_one_that_is_no_number() -> None:
    unmeasured = CostEstimate(RowState.UNMEASURED)
    assert Prices().usd(a_view(), Tokens(1), num_requests=0, now_s=NOW_S) == unmeasured
    no_number = a_view(a_row(usd_per_million_output_tokens=float("nan")))
    assert Prices().usd(no_number, Tokens(1, 0, 1), num_requests=0, now_s=NOW_S) == unmeasured
    assert Prices().most_usd(a_request(), [no_number], max_output_tokens=1, now_s=NOW_S) is None
