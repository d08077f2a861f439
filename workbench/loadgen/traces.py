"""Recorded traffic as a load: when each request came, how long it was, and what its prompt shared with others.

    trace = read_trace(Path("requests.jsonl"))       trace_files.py says which files
    trace.part(0, 500).shortened(1 / 16)             a part of it, and shorter
    trace.arrival(scale=10)                          its times, ten times as fast
    trace_prompts(trace, vocabulary, seed=1)         its lengths and shared blocks (trace_prompts.py)

A trace holds no text. Prompts share text exactly where their block ids are equal, so an engine's prefix cache finds
what it would have found; what the text means is lost, and with it anything that depends on meaning.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate

from workbench.loadgen.arrivals import MAX_IN_FLIGHT, Replay

BlockId = int | str


class TraceError(ValueError):
    """A trace cannot be read; the message names file, line and field."""


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One request of a trace.

    Attributes:
        at_s: arrival, counted from the trace's first.
        block_ids: of the prompt's blocks from its start, each of the trace's `block_tokens`, the last perhaps
            shorter. What they don't cover is the request's own.
        tier: of the request, where the trace tells.
        adapter: likewise.
    """

    at_s: float
    num_prompt_tokens: int
    num_output_tokens: int
    block_ids: tuple[BlockId, ...] = ()
    tier: str | None = None
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in the order of their arrival.

    Attributes:
        name: of the file or the sample.
        block_tokens: tokens of a block.
        skipped: why requests of the file are not here, and how many.
    """

    name: str
    requests: tuple[TracedRequest, ...]
    block_tokens: int = 512
    skipped: Mapping[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.requests:
            raise TraceError(f"{self.name} holds no request" + (f"; left out: {self.why_skipped}" * bool(self.skipped)))

    @property
    def length_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s

    @property
    def shared_frac(self) -> float:
        """Share of the prompt tokens that stand in blocks which an earlier request had from its start on too."""
        seen: set[int] = set()
        num_shared = 0
        for request in self.requests:
            prefixes = list(accumulate(request.block_ids, lambda before, block: hash((before, block)), initial=0))[1:]
            num_blocks = next((n for n, prefix in enumerate(prefixes) if prefix not in seen), len(prefixes))
            num_shared += min(num_blocks * self.block_tokens, request.num_prompt_tokens)
            seen.update(prefixes)
        return num_shared / sum(request.num_prompt_tokens for request in self.requests)

    @property
    def why_skipped(self) -> str:
        """`skipped` in words; empty when all are here."""
        return ", ".join(f"{number} {reason}" for reason, number in self.skipped.items())

    def arrival(self, *, scale: float = 1.0, max_in_flight: int = MAX_IN_FLIGHT) -> Replay:
        """The trace's times, `scale` times as fast."""
        return Replay(tuple(request.at_s for request in self.requests), scale, max_in_flight)

    def part(self, start: int, num_requests: int) -> Trace:
        """So many requests from the one numbered `start`, the times counted from that one.

        Raises:
            TraceError: there are none.
        """
        taken = self.requests[start : start + num_requests]
        if not taken:
            raise TraceError(f"{self.name} has {len(self.requests)} requests, none from number {start}")
        return replace(self, requests=tuple(replace(r, at_s=r.at_s - taken[0].at_s) for r in taken))

    def shortened(self, factor: float) -> Trace:
        """Prompts, outputs and blocks `factor` times as long, at least a token each, for a model with less context.

        Which requests share how much of their prompts stays as it was, up to the rounding of a block.

        Raises:
            TraceError: `factor` is not above 0, or a block would be shorter than a token.
        """
        if not (factor > 0 and math.isfinite(factor)):
            raise TraceError(f"lengths are made {factor} times as long; that must be above 0")
        block_tokens = round(self.block_tokens * factor)
        has_blocks = any(request.block_ids for request in self.requests)
        if has_blocks and block_tokens < 1:
            raise TraceError(f"blocks of {self.block_tokens} tokens have none left at {factor:g} times their length")
        # By the rounded block, or a prompt of whole blocks would be longer or shorter than they are.
        exact = block_tokens / self.block_tokens if has_blocks else factor
        shorter = tuple(
            replace(
                request,
                num_prompt_tokens=max(1, round(request.num_prompt_tokens * exact)),
                num_output_tokens=min(request.num_output_tokens, 1)
                and max(1, round(request.num_output_tokens * factor)),
            )
            for request in self.requests
        )
        return replace(self, requests=shorter, block_tokens=max(1, block_tokens))
