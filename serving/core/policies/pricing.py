"""What a request costs by its pool's cost rows: the most that it can cost before it runs, and what it did after.

    most_usd   for the cost cap: the dearest of the pools that it may run in, all tokens that it may ask for
    usd        for its usage event: the pool that it ran in, its tokens, at the load in which it was dispatched

`most_usd` is never below what `usd` says later of the same tokens or fewer. Rows that expired, were never measured or
don't fit their pool price nothing (`core.policies.cost`): the answer is None then, never zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from serving.core.policies.cost import (
    ALL_EXPIRED,
    NOT_MEASURED,
    CostEstimate,
    Curves,
    RowState,
    curves_of,
)
from serving.core.state import CostRow, PoolView, RequestView, Task
from serving.core.values import value

TOKENS_PER_PRICE = 1e6


@value
class Tokens:
    """What a request used. Cached tokens are some of the prompt's."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0


@dataclass(frozen=True, slots=True)
class PriceList:
    """A pool's rows that count, set out once so that a request is priced in a few microseconds.

    Attributes:
        curves: rows by shape.
        dearest: pairs of usd per million input and output tokens; whatever the request, one of them is the dearest.
    """

    curves: Curves
    dearest: tuple[tuple[float, float], ...]

    @classmethod
    def of(cls, rows: Sequence[CostRow], now_s: float) -> PriceList:
        """The prices of the rows that have not expired."""
        curves = curves_of(rows, now_s)
        return cls(curves, _dearest(row for curve in curves.by_shape.values() for row in curve.rows))

    def usd(self, used: Tokens, num_requests: int) -> float | None:
        """What `used` costs on a replica that holds `num_requests` others; None without a row, or a price that is none.

        Cached tokens without a measured price cost what other prompt tokens do.
        """
        if not self.curves.by_shape:
            return None
        curve = self.curves.nearest(used.num_prompt_tokens, used.num_output_tokens)
        usd_input, usd_cached, usd_output = curve.prices_at(max(num_requests, 0) + 1)
        num_cached = min(used.num_cached_tokens, used.num_prompt_tokens)
        usd = (used.num_prompt_tokens - num_cached) * usd_input + num_cached * usd_cached
        usd = (usd + used.num_output_tokens * usd_output) / TOKENS_PER_PRICE
        return usd if math.isfinite(usd) else None

    def most_usd(self, num_prompt_tokens: int, num_output_tokens: int) -> float | None:
        """The most that so many tokens or fewer cost at any load, cached or not; None without a row."""
        most = [num_prompt_tokens * usd_in + num_output_tokens * usd_out for usd_in, usd_out in self.dearest]
        return max(most) / TOKENS_PER_PRICE if most else None


class Prices:
    """Price lists of pools, each made once for the rows that it rests on."""

    def __init__(self) -> None:
        self._lists: dict[str, tuple[tuple[CostRow, ...], PriceList]] = {}

    def usd(self, pool: PoolView, used: Tokens, *, num_requests: int, now_s: float) -> CostEstimate:
        """What a request has cost that ran in `pool`, dispatched to a replica with `num_requests` others."""
        prices = self._of(pool, now_s)
        usd = prices.usd(used, num_requests)
        if usd is not None:
            return CostEstimate(RowState.FRESH, usd)
        return ALL_EXPIRED if pool.cost_rows and not prices.curves.by_shape else NOT_MEASURED

    def most_usd(
        self,
        request: RequestView,
        pools: Sequence[PoolView],
        *,
        max_output_tokens: int | None,
        num_choices: int = 1,
        now_s: float,
    ) -> float | None:
        """The most that a request can cost; None when no pool that it may run in is measured.

        Args:
            request: its prompt's tokens (all prompts), and where it may run.
            pools: those of its model version.
            max_output_tokens: that the client allows for one choice; None leaves it to the model's length.
            num_choices: answers asked for, over all prompts.
            now_s: Unix seconds.
        """
        most: float | None = None
        for pool in pools:
            if "*" not in request.regions and pool.pool.region not in request.regions:
                continue
            longest = pool.pool.max_model_len
            one = longest if max_output_tokens is None else min(max_output_tokens, longest)
            num_output_tokens = 0 if request.task is Task.EMBED else num_choices * one
            usd = self._of(pool, now_s).most_usd(request.num_prompt_tokens, num_output_tokens)
            if usd is not None and (most is None or usd > most):
                most = usd
        return most

    def _of(self, pool: PoolView, now_s: float) -> PriceList:
        rows, found = self._lists.get(pool.pool.pool_id, (None, None))
        if found is None or rows is not pool.cost_rows or not found.curves.since_s <= now_s < found.curves.until_s:
            found = PriceList.of(pool.cost_rows, now_s)
            self._lists[pool.pool.pool_id] = (pool.cost_rows, found)
        return found


def _dearest(rows: Iterable[CostRow]) -> tuple[tuple[float, float], ...]:
    """The prices that no other row tops in both input and output. A prompt token costs the dearer of new and cached."""
    prices = set()
    for row in rows:
        usd_in = max(row.usd_per_million_input_tokens, row.usd_per_million_cached_input_tokens or 0.0)
        if math.isfinite(usd_in) and math.isfinite(row.usd_per_million_output_tokens):
            prices.add((usd_in, row.usd_per_million_output_tokens))
    found: list[tuple[float, float]] = []
    for usd_in, usd_out in sorted(prices, reverse=True):
        if not found or usd_out > found[-1][1]:
            found.append((usd_in, usd_out))
    return tuple(found)
