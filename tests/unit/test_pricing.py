from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from workbench.costs.pricing import MixedWindow, PricingError, embed_price, split_price

rates = st.floats(min_value=1e-2, max_value=1e6)
counts = st.floats(min_value=0, max_value=1e8)


@given(
    usd_per_s=st.floats(min_value=1e-7, max_value=10),
    num_prompt=counts,
    num_output=st.floats(min_value=1e-3, max_value=1e8),
    window_s=st.floats(min_value=1e-3, max_value=1e5),
    prefill=rates,
    decode=rates,
)
def test_the_cells_own_requests_sum_to_what_the_replica_cost(
    usd_per_s: float, num_prompt: float, num_output: float, window_s: float, prefill: float, decode: float
) -> None:
    prices = split_price(
        usd_per_s,
        MixedWindow(num_prompt, num_output, window_s),
        prefill_tokens_per_s=prefill,
        decode_tokens_per_s=decode,
    )
    usd = (num_prompt * prices.input + num_output * prices.output) / 1e6
    assert math.isclose(usd, usd_per_s * window_s, rel_tol=1e-9)
    assert math.isclose(prices.input * prefill, prices.output * decode, rel_tol=1e-9)


def test_a_perfectly_busy_replica_needs_no_scaling() -> None:
    # 600 prompt tokens at 600/s and 900 output tokens at 100/s fill exactly 10 s.
    prices = split_price(
        0.001, MixedWindow(600, 900, 10.0), prefill_tokens_per_s=600, decode_tokens_per_s=100, cached_tokens_per_s=5000
    )
    assert prices.input == pytest.approx(0.001 / 600 * 1e6)
    assert prices.output == pytest.approx(0.001 / 100 * 1e6)
    assert prices.cached_input == pytest.approx(0.001 / 5000 * 1e6)


def test_cached_input_has_no_price_when_it_was_not_measured() -> None:
    prices = split_price(1.0, MixedWindow(1, 1, 1.0), prefill_tokens_per_s=1, decode_tokens_per_s=1)
    assert prices.cached_input is None


@pytest.mark.parametrize("bad", [0.0, -1.0, math.nan, math.inf])
@pytest.mark.parametrize("name", ["usd_per_s", "prefill_tokens_per_s", "decode_tokens_per_s", "window_s"])
def test_a_figure_that_carries_no_price_is_named(name: str, bad: float) -> None:
    figures = {"usd_per_s": 1.0, "prefill_tokens_per_s": 1.0, "decode_tokens_per_s": 1.0, "window_s": 1.0} | {name: bad}
    usd_per_s, window_s = figures.pop("usd_per_s"), figures.pop("window_s")
    with pytest.raises(PricingError, match=name):
        split_price(usd_per_s, MixedWindow(1, 1, window_s), **figures)


def test_a_missing_rate_is_named() -> None:
    with pytest.raises(PricingError, match="decode_tokens_per_s is None"):
        split_price(1.0, MixedWindow(1, 1, 1.0), prefill_tokens_per_s=1.0, decode_tokens_per_s=None)


def test_an_embedding_costs_its_input_alone() -> None:
    prices = embed_price(0.01, 2000.0)
    assert prices.input == pytest.approx(5.0)
    assert prices.output == 0.0
