"""What a pool's measured rows say of a request at a replica's present load: its money, and its time with an interval.

    usd     tokens that must be computed at the price of input, those in the cache at theirs, expected output at its own
    ttft    the row's at that concurrency, longer or shorter by the prompt tokens that are ahead or the row's own
            prompt had more, at the measured prefill rate
    tpot    the row's at that concurrency

Rows are read as for prices (cost.py): the nearest shape, between concurrencies by their logarithm. An interval goes
from the median to the quantile that the policy names, between the measured p50 and p99 as a log-normal would lie.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from statistics import NormalDist

from serving.core.policies.cost import Curve, RowState, between, log_share
from serving.core.state import RequestView
from serving.core.values import value

Z_99 = NormalDist().inv_cdf(0.99)
MAX_KEPT_POINTS = 4096


@value
class Quote:
    """Expected usd, TTFT and TPOT of one request on one replica; None where nothing measured tells.

    `ttft_high_s` and `tpot_high_s` are those at the policy's quantile, the others medians.
    """

    state: RowState
    usd: float | None = None
    ttft_s: float | None = None
    ttft_high_s: float | None = None
    tpot_s: float | None = None
    tpot_high_s: float | None = None


ALL_EXPIRED = Quote(RowState.EXPIRED)
NOT_MEASURED = Quote(RowState.UNMEASURED)


@dataclass(frozen=True, slots=True)
class Point:
    """A curve at one concurrency. Prices are usd a token; the rate is of one device."""

    usd_input: float
    usd_cached: float
    usd_output: float
    num_prompt_tokens: int
    prefill_tokens_per_s: float | None
    ttft_s: float | None
    ttft_high_s: float | None
    tpot_s: float | None
    tpot_high_s: float | None


@lru_cache(maxsize=8)
def z_share(quantile: float) -> float:
    """Where a quantile lies between the median (0) and p99 (1) of a normal."""
    return NormalDist().inv_cdf(quantile) / Z_99


def quote(
    request: RequestView,
    point: Point,
    *,
    queued_prompt_tokens: int,
    num_cached_tokens: int,
    num_devices: int,
) -> Quote:
    """What `point` says of `request` behind so many prompt tokens that are not computed yet."""
    num_new = max(request.num_prompt_tokens - num_cached_tokens, 1)
    usd = (
        num_new * point.usd_input
        + (request.num_prompt_tokens - num_new) * point.usd_cached
        + request.expected_output_tokens * point.usd_output
    )
    if not usd < math.inf:  # a price that is no number says nothing, nor do its row's times
        return NOT_MEASURED
    ttft_s, high_s = point.ttft_s, point.ttft_high_s
    if ttft_s is not None and high_s is not None and point.prefill_tokens_per_s:
        later_s = (queued_prompt_tokens + num_new - point.num_prompt_tokens) / (
            point.prefill_tokens_per_s * num_devices
        )
        least_s = point.tpot_s or 0.0
        ttft_s = max(ttft_s + later_s, least_s)
        high_s = max(high_s + later_s, ttft_s)
    return Quote(RowState.FRESH, usd, ttft_s, high_s, point.tpot_s, point.tpot_high_s)


def point_at(curve: Curve, concurrency: int, quantile: float) -> Point:
    """The curve at a concurrency; kept, for loads come again and again."""
    kept = curve.points
    found = kept.get((concurrency, quantile))
    if found is None:
        if len(kept) >= MAX_KEPT_POINTS:
            kept.clear()
        found = kept[concurrency, quantile] = _point(curve, concurrency, quantile)
    return found


def _point(curve: Curve, concurrency: int, quantile: float) -> Point:
    low, high = curve.around(concurrency)
    share = log_share(low.concurrency, high.concurrency, concurrency)

    def at(name: str) -> float | None:
        below, above = getattr(low, name), getattr(high, name)
        if below is None or above is None:
            return None
        found = between(below, above, share)
        return found if 0.0 < found < math.inf else None

    usd_input, usd_cached, usd_output = (price / 1e6 for price in curve.prices_at(concurrency))
    ttft_s, tpot_s = at("ttft_p50_s"), at("tpot_p50_s")
    return Point(
        usd_input,
        usd_cached,
        usd_output,
        low.num_prompt_tokens,
        at("prefill_tokens_per_s_per_gpu"),
        ttft_s,
        _high(ttft_s, at("ttft_p99_s"), quantile),
        tpot_s,
        _high(tpot_s, at("tpot_p99_s"), quantile),
    )


def _high(median: float | None, p99: float | None, quantile: float) -> float | None:
    if median is None or p99 is None:
        return None
    return float(median * max(p99 / median, 1.0) ** z_share(quantile))
