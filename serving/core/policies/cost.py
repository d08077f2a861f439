"""Cost to serve: what a request is expected to cost on a pool, read from the pool's own measured rows.

A row counts for a pool when model, version, hardware class and both fingerprints are equal, its provenance is
one that the policy accepts, and it has not expired. Without such a row the pool is unmeasured: it is then
routed by load alone, and `RowState` says why.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any

from serving.core.state import CostRow, Pool, RequestView
from serving.core.values import value

Shape = tuple[int, int]
"""Prompt and output tokens of a measured cell."""


class RowState(StrEnum):
    """Whether a pool's cost rows count now, and if not, why."""

    FRESH = "fresh"
    EXPIRED = "expired"
    MISMATCH = "mismatch"
    UNMEASURED = "unmeasured"


@value
class CostEstimate:
    """Expected usd of one request on one pool; None unless `state` is `FRESH`."""

    state: RowState
    usd: float | None = None


ALL_EXPIRED = CostEstimate(RowState.EXPIRED)
NOT_MEASURED = CostEstimate(RowState.UNMEASURED)


def matches(row: CostRow, pool: Pool, provenances: Sequence[str]) -> bool:
    """Whether `row` was measured on what `pool` runs now."""
    return (
        _same_pool(row, pool)
        and row.engine_fingerprint == pool.engine_fingerprint
        and row.hardware_fingerprint == pool.hardware_fingerprint
        and row.provenance in provenances
    )


def state_of(rows: Sequence[CostRow], pool: Pool, provenances: Sequence[str], now_s: float) -> RowState:
    """The state of a pool's rows among all `rows` of the table."""
    own = [row for row in rows if _same_pool(row, pool)]
    fitting = [row for row in own if matches(row, pool, provenances)]
    if any(row.expires_at_s > now_s for row in fitting):
        return RowState.FRESH
    if fitting:
        return RowState.EXPIRED
    return RowState.MISMATCH if own else RowState.UNMEASURED


def estimate(request: RequestView, rows: Sequence[CostRow], num_requests: int, now_s: float) -> CostEstimate:
    """Expected usd of `request` on a replica that holds `num_requests` others.

    `rows` are those that match the pool. Prices come from the nearest measured shape, interpolated over the
    logarithm of concurrency and held constant outside the measured range.
    """
    curve = curve_for(request, rows, now_s)
    if curve is None:
        return ALL_EXPIRED if rows else NOT_MEASURED
    usd_input, _, usd_output = curve.prices_at(num_requests + 1)
    usd = (request.num_prompt_tokens * usd_input + request.expected_output_tokens * usd_output) / 1e6
    # A price that is no number says nothing: the pool is routed by load alone.
    return CostEstimate(RowState.FRESH, usd) if math.isfinite(usd) else NOT_MEASURED


def curve_for(request: RequestView, rows: Sequence[CostRow], now_s: float) -> Curve | None:
    """What prices `request` on any replica of a pool; None when no row counts."""
    curves = curves_of(rows, now_s)
    return curves.nearest(request.num_prompt_tokens, request.expected_output_tokens) if curves.by_shape else None


def _same_pool(row: CostRow, pool: Pool) -> bool:
    return (
        row.model == pool.model
        and row.version == pool.version
        and row.task == pool.task
        and row.hardware_class == pool.hardware_class
    )


Prices = tuple[float, float, float]
"""Usd per million input, cached input and output tokens; cached ones without a price of their own cost as others do."""
MAX_KEPT_PRICES = 1024


@dataclass(frozen=True, slots=True)
class Curve:
    """The rows of one shape, by concurrency. `points` is where quote.py keeps what it has read from them."""

    rows: tuple[CostRow, ...]
    concurrencies: tuple[int, ...]
    points: dict[tuple[int, float], Any] = field(default_factory=dict, compare=False)
    _known: dict[int, Prices] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, rows: Sequence[CostRow]) -> Curve:
        """`rows` are sorted."""
        return cls(tuple(rows), tuple(row.concurrency for row in rows))

    def around(self, concurrency: int) -> tuple[CostRow, CostRow]:
        """The rows between which `concurrency` lies; the end's row twice beyond it."""
        rows = self.rows
        above = bisect_left(self.concurrencies, concurrency)
        return rows[above - 1 if above else 0], rows[above] if above < len(rows) else rows[-1]

    def prices_at(self, concurrency: int) -> Prices:
        """What tokens cost at `concurrency`; kept, for loads come again and again."""
        found = self._known.get(concurrency)
        if found is None:
            if len(self._known) >= MAX_KEPT_PRICES:
                self._known.clear()
            found = self._known[concurrency] = self._interpolated(concurrency)
        return found

    def _interpolated(self, concurrency: int) -> Prices:
        low, high = self.around(concurrency)
        share = log_share(low.concurrency, high.concurrency, concurrency)
        usd_input = between(low.usd_per_million_input_tokens, high.usd_per_million_input_tokens, share)
        usd_cached = usd_input
        if low.usd_per_million_cached_input_tokens is not None and high.usd_per_million_cached_input_tokens is not None:
            usd_cached = between(
                low.usd_per_million_cached_input_tokens, high.usd_per_million_cached_input_tokens, share
            )
        return (
            usd_input,
            usd_cached,
            between(low.usd_per_million_output_tokens, high.usd_per_million_output_tokens, share),
        )


@dataclass(frozen=True, slots=True)
class Curves:
    """Rows that have not expired, by shape.

    Attributes:
        by_shape: the rows; empty when all have expired.
        since_s, until_s: the last time at which a row expired, the next at which one will. This holds in between.
    """

    by_shape: Mapping[Shape, Curve]
    since_s: float
    until_s: float
    _logs: tuple[tuple[float, float, Shape], ...]
    _known: dict[tuple[int, int], Curve] = field(default_factory=dict, compare=False)

    @classmethod
    def of(cls, rows: Sequence[CostRow], now_s: float) -> Curves:
        """The curves at `now_s`."""
        fresh = sorted((row for row in rows if row.expires_at_s > now_s), key=lambda row: row.concurrency)
        by_shape: dict[Shape, list[CostRow]] = {}
        for row in fresh:
            by_shape.setdefault((row.num_prompt_tokens, row.num_output_tokens), []).append(row)
        return cls(
            {shape: Curve.of(curve) for shape, curve in by_shape.items()},
            max((row.expires_at_s for row in rows if row.expires_at_s <= now_s), default=-math.inf),
            min((row.expires_at_s for row in fresh), default=math.inf),
            tuple((math.log(shape[0] + 1), math.log(shape[1] + 1), shape) for shape in by_shape),
        )

    def nearest(self, num_prompt_tokens: int, num_output_tokens: int) -> Curve:
        """The curve of the shape nearest in log tokens; the shape breaks ties, so that no order of rows does.

        Both numbers are taken to the nearest sixteenth of an octave: near ones are then looked up, not compared again.
        """
        if len(self._logs) == 1:
            return self.by_shape[self._logs[0][2]]
        key = (
            round(math.log(num_prompt_tokens + 1) * STEPS_PER_LOG),
            round(math.log(num_output_tokens + 1) * STEPS_PER_LOG),
        )
        found = self._known.get(key)
        if found is None:
            log_prompt, log_output = key[0] / STEPS_PER_LOG, key[1] / STEPS_PER_LOG
            _, shape = min([(abs(p - log_prompt) + abs(o - log_output), shape) for p, o, shape in self._logs])
            found = self._known[key] = self.by_shape[shape]
        return found


STEPS_PER_LOG = 16 / math.log(2)
MAX_KEPT_CURVES = 1024
_kept: dict[int, tuple[Sequence[CostRow], Curves]] = {}


def curves_of(rows: Sequence[CostRow], now_s: float) -> Curves:
    """`Curves.of`, remembered: a request's rows are those of the last one, in the same tuple.

    The rows are kept beside their curves, so that no other tuple can have their identity.
    """
    kept = _kept.get(id(rows))
    if kept is not None and kept[1].since_s <= now_s < kept[1].until_s:
        return kept[1]
    curves = Curves.of(rows, now_s)
    if isinstance(rows, tuple):
        if len(_kept) >= MAX_KEPT_CURVES:
            _kept.clear()
        _kept[id(rows)] = rows, curves
    return curves


def log_share(low: int, high: int, concurrency: int) -> float:
    """How far `concurrency` is on the way from `low` to `high` in logarithms, from 0 to 1; 1 where they are one."""
    if low == high:
        return 1.0
    return min(max(math.log(concurrency / low) / math.log(high / low), 0.0), 1.0)


def between(low: float, high: float, share: float) -> float:
    """The price that lies `share` of the way from one to the other."""
    return low + (high - low) * share


def most_tokens_done(request: RequestView, rows: Sequence[CostRow], running_s: float, num_choices: int) -> int:
    """The most tokens that an engine can have worked on for a request whose end nobody reported.

    All of the prompt, and what the fastest measured decoding brings in that time, each choice by itself; where nothing
    was measured, all that the request was expected to come to.

    Args:
        request: as it was dispatched.
        rows: of its pool, expired ones too: an engine is not slower for it.
        running_s: since it was dispatched.
        num_choices: answers that it asked for.
    """
    tpots_s = [row.tpot_p50_s for row in rows if row.tpot_p50_s is not None and row.tpot_p50_s > 0.0]
    if not tpots_s:
        return request.num_tokens
    num_output_tokens = num_choices * math.ceil(1 + max(running_s, 0.0) / min(tpots_s))
    return request.num_prompt_tokens + min(num_output_tokens, request.expected_output_tokens)
