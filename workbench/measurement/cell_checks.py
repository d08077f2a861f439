"""What makes a cell count, and figures that its summary does not have. Pure.

A cell is invalid when the engine's own counters and the client's sums are over 1 % apart (somebody else used
the replica, or somebody else served), when prompts came from a warm cache (or, for a cached cell, did not), and
whenever its summary is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from serving.core.state import ReplicaSnapshot, Task
from workbench.loadgen import LoadResult, RequestRecord, Summary
from workbench.sweeps.cells import CellKind, CellSpec, TargetKind

MAX_COUNTER_GAP_FRAC = 0.01
MAX_WARM_HIT_FRAC = 0.02
MIN_CACHED_HIT_FRAC = 0.8


@dataclass(frozen=True, slots=True)
class Counters:
    """Growth of the engine's counters over a cell."""

    num_prompt_tokens: int
    num_output_tokens: int
    num_queried_tokens: int
    num_hit_tokens: int

    @classmethod
    def between(cls, before: ReplicaSnapshot, after: ReplicaSnapshot) -> Counters:
        """What was counted from `before` to `after`."""
        return cls(
            after.num_prompt_tokens_total - before.num_prompt_tokens_total,
            after.num_output_tokens_total - before.num_output_tokens_total,
            after.prefix_cache_queried_tokens_total - before.prefix_cache_queried_tokens_total,
            after.prefix_cache_hit_tokens_total - before.prefix_cache_hit_tokens_total,
        )

    @property
    def hit_frac(self) -> float:
        """Share of the queried prompt tokens that the prefix cache held."""
        return self.num_hit_tokens / self.num_queried_tokens if self.num_queried_tokens > 0 else 0.0

    def gap(self, records: Sequence[RequestRecord], task: Task) -> str | None:
        """How the counters differ from the client's sums by more than 1 %, or None.

        A failed request may or may not have been worked on, so the engine may count up to all of it more.
        """
        served = [record for record in records if record.ok]
        failed = [record for record in records if not record.ok]
        pairs = [("prompt", self.num_prompt_tokens, *_sums(served, failed, "num_prompt_tokens", "num_prompt_tokens"))]
        if task is Task.GENERATE:
            sums = _sums(served, failed, "num_output_tokens", "num_output_tokens_asked")
            pairs.append(("output", self.num_output_tokens, *sums))
        for name, counted, expected, slack in pairs:
            tolerance = MAX_COUNTER_GAP_FRAC * expected
            if not expected - tolerance <= counted <= expected + slack + tolerance:
                return f"the engine counted {counted} {name} tokens and the client {expected}"
        return None


def _sums(served: Sequence[RequestRecord], failed: Sequence[RequestRecord], own: str, asked: str) -> tuple[int, int]:
    return sum(getattr(r, own) for r in served), sum(getattr(r, asked) for r in failed)


def invalid_because(
    spec: CellSpec, task: Task, summary: Summary, counters: Counters, records: Sequence[RequestRecord]
) -> str | None:
    """Why the cell does not count, the first reason found; None when it does."""
    if summary.invalid is not None:
        return summary.invalid
    gap = counters.gap(records, task)
    if gap is not None and spec.target is TargetKind.GATEWAY:
        return f"another replica served too, or somebody else used this one: {gap}"
    if gap is not None:
        return f"somebody else used the replica: {gap}"
    if spec.kind is CellKind.CACHED:
        if counters.hit_frac < MIN_CACHED_HIT_FRAC:
            return f"not cached: only {counters.hit_frac:.1%} of the repeated prompts came from the prefix cache"
    elif counters.hit_frac > MAX_WARM_HIT_FRAC:
        return f"warm: {counters.hit_frac:.1%} of the prompt tokens came from the prefix cache"
    return None


def decode_tokens_per_s(records: Sequence[RequestRecord], concurrency: int) -> float | None:
    """Output tokens a second of `concurrency` streams that all decode: concurrency / mean TPOT by token."""
    served = [record for record in records if record.ok and len(record.chunk_at_s) > 1]
    num_tokens = sum(sum(record.chunk_tokens[1:]) for record in served)
    decoding_s = sum(record.chunk_at_s[-1] - record.chunk_at_s[0] for record in served)
    return concurrency * num_tokens / decoding_s if num_tokens and decoding_s > 0 else None


def client_error_frac(load: LoadResult, summary: Summary) -> float:
    """What the client itself can have added to a first token at P99, as a share of the median."""
    median_s = summary.metrics.get("ttft_s/p50", summary.metrics.get("e2e_s/p50"))
    if not median_s:
        return 0.0
    return (load.client_error.send_lag_p99_s + load.client_error.stamp_lag_s) / median_s
