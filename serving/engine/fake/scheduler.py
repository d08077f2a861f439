"""Who runs and who waits in the fake engine, what the KV cache holds, and what has been counted.

A request is let in when a place is free and the KV cache has room for its prompt and whole output, so nothing is
ever preempted; the usage shown is what is held by then.
"""

from __future__ import annotations

import bisect
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from serving.engine.fake.settings import FakeSettings, QueuePolicy


@dataclass(eq=False, slots=True)
class ScheduledRequest:
    """A request as the scheduler sees it; `start` is called when it may run."""

    num_prompt_tokens: int
    num_output_tokens: int
    start: Callable[[], None]
    priority: int = 0
    blocks: Sequence[int] = ()
    num_cached_tokens: int = 0
    num_generated: int = 0
    order: tuple[int, int] = field(default=(0, 0))


class Scheduler:
    """Places, KV cache, prefix cache and counters of one engine."""

    def __init__(self, settings: FakeSettings) -> None:
        self.num_prompt_tokens_total = 0
        self.num_output_tokens_total = 0
        self.prefix_cache_queried_tokens_total = 0
        self.prefix_cache_hit_tokens_total = 0
        self.num_rejected_total = 0
        self.num_finished_total: Counter[str] = Counter()
        self._settings = settings
        self._running: set[ScheduledRequest] = set()
        self._waiting: list[ScheduledRequest] = []
        self._cached_blocks: OrderedDict[int, None] = OrderedDict()
        self._num_reserved_tokens = 0
        self._num_held_tokens = 0
        self._num_submitted = 0

    @property
    def num_running(self) -> int:
        """Requests that run."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Requests that wait for a place or for KV cache."""
        return len(self._waiting)

    @property
    def kv_cache_usage_frac(self) -> float:
        """Share of the KV cache held by running requests."""
        return self._num_held_tokens / self._settings.kv_cache_capacity_tokens

    @property
    def step_s(self) -> float:
        """Seconds that a decoding step takes with what runs now."""
        return (self._settings.itl_ms + self._settings.itl_ms_per_seq * len(self._running)) / 1000

    def submit(self, request: ScheduledRequest) -> bool:
        """Starts the request or lets it wait; False when too many wait already."""
        limit = self._settings.max_num_queued_reqs
        waits = bool(self._waiting) or not self._fits(request)
        if waits and limit is not None and len(self._waiting) >= limit:
            self.num_rejected_total += 1
            return False
        self._num_submitted += 1
        by_priority = self._settings.scheduling_policy is QueuePolicy.PRIORITY
        request.order = (request.priority if by_priority else 0, self._num_submitted)
        bisect.insort(self._waiting, request, key=lambda waiting: waiting.order)
        self._start_those_that_fit()
        return True

    def grow(self, request: ScheduledRequest, num_tokens: int) -> None:
        """Counts newly decoded tokens; with the first of them, the prompt."""
        if request.num_generated == 0:
            self.num_prompt_tokens_total += request.num_prompt_tokens
        request.num_generated += num_tokens
        self._num_held_tokens += num_tokens
        self.num_output_tokens_total += num_tokens

    def release(self, request: ScheduledRequest, finish_reason: str) -> None:
        """The request is over, whether it ran or still waited; the next may start."""
        self.num_finished_total[finish_reason] += 1
        if request in self._running:
            self._running.remove(request)
            self._num_reserved_tokens -= request.num_prompt_tokens + request.num_output_tokens
            self._num_held_tokens -= request.num_prompt_tokens + request.num_generated
        else:
            self._waiting.remove(request)
        self._start_those_that_fit()

    def _fits(self, request: ScheduledRequest) -> bool:
        needed = self._num_reserved_tokens + request.num_prompt_tokens + request.num_output_tokens
        return len(self._running) < self._settings.max_num_seqs and needed <= self._settings.kv_cache_capacity_tokens

    def _start_those_that_fit(self) -> None:
        while self._waiting and self._fits(self._waiting[0]):
            request = self._waiting.pop(0)
            self._running.add(request)
            self._num_reserved_tokens += request.num_prompt_tokens + request.num_output_tokens
            self._num_held_tokens += request.num_prompt_tokens
            request.num_cached_tokens = self._look_up(request)
            request.start()

    def _look_up(self, request: ScheduledRequest) -> int:
        """Tokens of the prompt found in the prefix cache, into which all its full blocks then go."""
        if not self._settings.enable_prefix_caching:
            return 0
        cached = self._cached_blocks
        num_hits = 0
        for block in request.blocks:
            if block not in cached:
                break
            num_hits += 1
        for block in request.blocks:
            cached[block] = None
            cached.move_to_end(block)
        while len(cached) > self._settings.num_gpu_blocks:
            cached.popitem(last=False)
        size = self._settings.block_size
        # As in vLLM the last token is computed in any case: there would be nothing to sample from.
        num_tokens = min(num_hits * size, (request.num_prompt_tokens - 1) // size * size)
        self.prefix_cache_queried_tokens_total += request.num_prompt_tokens
        self.prefix_cache_hit_tokens_total += max(num_tokens, 0)
        return max(num_tokens, 0)
