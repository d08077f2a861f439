"""One replica as its scheduler sees it: continuous batching with chunked prefill, after vLLM's V1 scheduler.

    a step     every decoding sequence one token, then prompts in order of arrival, until the step's tokens are spent
    KV cache   room is taken as tokens are computed; without room the sequence that came last is preempted and
               computed again later; what cached blocks nobody holds are evicted first
    time       step_time.py; steps in which nothing but decoding happens are taken in one go up to the next event

A sequence's last block is taken to be half full.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from workbench.sim.fleet import EngineSpec
from workbench.sim.kernel import Kernel
from workbench.sim.prefix_cache import Block, PrefixCache
from workbench.sim.step_time import StepTime


@dataclass(frozen=True, slots=True)
class Work:
    """A request as the engine gets it, and how much it will say. `blocks` are ids of the prompt's full blocks.

    A lower `priority` is served first.
    """

    request_id: str
    num_prompt_tokens: int
    num_output_tokens: int
    blocks: Sequence[Block] = ()
    priority: int = 0


@dataclass(slots=True, eq=False)
class Running:
    """A request on a replica: where it stands.

    Attributes:
        target: tokens to compute before its next token comes.
        num_done: output tokens that it has said.
        private_tokens: of the KV cache, held by it alone; while it decodes, as of `joined_step`.
        num_held: of its blocks that it holds in the prefix cache.
        num_cached_tokens: that its first prefill found there.
    """

    work: Work
    order: int
    target: int
    computed: int = 0
    num_done: int = 0
    private_tokens: int = 0
    num_held: int = 0
    joined_step: int = 0
    finish_step: int = -1
    num_cached_tokens: int = 0
    num_preemptions: int = 0
    first_token_at_s: float = math.nan

    def __lt__(self, other: Running) -> bool:
        return (self.work.priority, self.order) < (other.work.priority, other.order)


@dataclass(slots=True)
class _Step:
    """What runs now. `chunks` are (sequence, prompt tokens); without any it is `num_steps` of decoding."""

    start_s: float
    num_steps: int
    num_decoding: int
    decoding_kv: int
    chunks: list[tuple[Running, int]] = field(default_factory=list)


class ReplicaModel:
    """One simulated engine. `on_first_token` and `on_finished` are called at their time with the sequence."""

    def __init__(
        self,
        kernel: Kernel,
        step_time: StepTime,
        engine: EngineSpec,
        *,
        block_tokens: int,
        on_first_token: Callable[[Running], None],
        on_finished: Callable[[Running], None],
    ) -> None:
        self.step_time = step_time
        self.num_preemptions = 0
        self.num_prompt_tokens = 0
        self.num_hit_tokens = 0
        self._kernel, self._engine = kernel, engine
        self._on_first_token, self._on_finished = on_first_token, on_finished
        self._cache = PrefixCache(block_tokens)
        self._order = itertools.count()
        self._waiting: list[Running] = []
        self._prefilling: list[Running] = []
        self._decoding: set[Running] = set()
        self._finishing: list[tuple[int, Running]] = []  # those preempted since are passed over
        self._decoding_kv = 0
        self._private_tokens = 0
        self._steps_done = 0
        self._step: _Step | None = None
        self._version = 0
        self._busy_s, self._busy_since_s = 0.0, 0.0

    @property
    def num_running(self) -> int:
        """Sequences in the batch."""
        return len(self._prefilling) + len(self._decoding)

    @property
    def num_waiting(self) -> int:
        """Sequences outside of it."""
        return len(self._waiting)

    @property
    def busy_s(self) -> float:
        """Time with a request on the replica, so far."""
        return self._busy_s + (self._kernel.now_s - self._busy_since_s if self._step is not None else 0.0)

    @property
    def kv_cache_usage_frac(self) -> float:
        """Share of the KV cache that requests hold; what is only kept for later is free."""
        step, grown = self._step, 0.0
        if step is not None and not step.chunks:
            grown = step.num_decoding * self._steps_in(step)
        return min((self._held_tokens + grown) / self.step_time.kv_capacity_tokens, 1.0)

    @property
    def waiting(self) -> Sequence[Running]:
        """The queue, in no order; for who knows everything."""
        return self._waiting

    @property
    def prefilling(self) -> Sequence[Running]:
        """Sequences whose prompts are being computed; for who knows everything."""
        return self._prefilling

    def submit(self, work: Work) -> None:
        """A request arrives.

        Raises:
            ValueError: it would not fit an empty KV cache.
        """
        most = work.num_prompt_tokens + work.num_output_tokens + self._engine.block_size
        if most > self.step_time.kv_capacity_tokens:
            raise ValueError(f"{most} tokens do not fit a KV cache of {self.step_time.kv_capacity_tokens}")
        heapq.heappush(self._waiting, Running(work, next(self._order), target=work.num_prompt_tokens))
        if self._step is None:
            self._busy_since_s = self._kernel.now_s
            self._begin()
        elif not self._step.chunks and self.num_running < self._engine.max_num_seqs:
            self._shorten(self._step)

    @property
    def _held_tokens(self) -> int:
        half_blocks = self.num_running * (self._engine.block_size // 2)
        return self._private_tokens + self._cache.used_tokens + half_blocks

    @property
    def _room(self) -> int:
        return self.step_time.kv_capacity_tokens - self._held_tokens

    def _begin(self) -> None:
        """Plans the next step; with nothing to do the replica is idle."""
        num_preemptions = self.num_preemptions
        while len(self._decoding) > self._room:
            self._preempt()
        budget = self._engine.max_num_batched_tokens - len(self._decoding)
        chunks = self._continue_prompts(budget)
        if self.num_preemptions == num_preemptions:
            self._admit(budget - sum(tokens for _, tokens in chunks), chunks)
        num_decoding = len(self._decoding)
        if not chunks and not num_decoding:
            self._step = None
            self._busy_s += self._kernel.now_s - self._busy_since_s
            return
        step = self._step = _Step(self._kernel.now_s, 1, num_decoding, self._decoding_kv, chunks)
        if chunks:
            length_s = self._mixed_step_s(step)
        else:
            step.num_steps = max(min(self._next_finish() - self._steps_done, self._room // num_decoding), 1)
            length_s = self.step_time.decode_s(step.num_steps, num_decoding, self._decoding_kv)
        self._cache.evict(self._cache.idle_tokens - self._room + num_decoding * step.num_steps)
        self._end_at(step.start_s + length_s)

    def _continue_prompts(self, budget: int) -> list[tuple[Running, int]]:
        """Chunks of prompts that have begun, and room for them; what came last makes room."""
        chunks: list[tuple[Running, int]] = []
        for running in list(self._prefilling):
            if running.target == 0 or budget <= 0:  # preempted just now, or no tokens left in this step
                continue
            tokens = min(running.target - running.computed, budget)
            while tokens > self._room - len(self._decoding):
                if self._preempt() is running:
                    break
            else:
                budget -= tokens
                self._take(running, tokens)
                chunks.append((running, tokens))
        return [(running, tokens) for running, tokens in chunks if running in self._prefilling]

    def _admit(self, budget: int, chunks: list[tuple[Running, int]]) -> None:
        """Takes requests out of the queue while the step has tokens left and the cache has room."""
        while self._waiting and budget > 0 and self.num_running < self._engine.max_num_seqs:
            running = self._waiting[0]
            blocks = running.work.blocks[: (running.target - 1) // self._cache.block_tokens]
            hit = blocks[: self._cache.num_cached(blocks)] if self._engine.prefix_caching else ()
            num_hit_tokens = len(hit) * self._cache.block_tokens
            tokens = min(running.target - num_hit_tokens, budget)
            if tokens > self._room - len(self._decoding) - self._cache.idle_among(hit):
                return
            heapq.heappop(self._waiting)
            self._cache.hold(hit)
            running.computed, running.num_held = num_hit_tokens, len(hit)
            if running.num_preemptions == 0:
                running.num_cached_tokens = num_hit_tokens
            self.num_prompt_tokens += running.target
            self.num_hit_tokens += num_hit_tokens
            self._prefilling.append(running)
            self._take(running, tokens)
            chunks.append((running, tokens))
            budget -= tokens

    def _take(self, running: Running, tokens: int) -> None:
        running.private_tokens += tokens
        self._private_tokens += tokens

    def _preempt(self) -> Running:
        """Puts what came last back into the queue; its keys and values are gone, but for its prompt's cached blocks."""
        running = max(itertools.chain(self._decoding, self._prefilling))
        self._leave(running)
        running.num_preemptions += 1
        self.num_preemptions += 1
        running.target, running.computed = running.work.num_prompt_tokens + running.num_done, 0
        heapq.heappush(self._waiting, running)
        return running

    def _leave(self, running: Running) -> None:
        """Takes a sequence off the batch and gives back what it holds."""
        if running in self._decoding:
            self._decoding.remove(running)
            said = self._steps_done - running.joined_step
            running.num_done += said
            running.private_tokens += said
            self._decoding_kv -= running.target + said
        else:
            self._prefilling.remove(running)
        self._private_tokens -= running.private_tokens
        self._cache.release(running.work.blocks[: running.num_held])
        running.private_tokens = running.num_held = 0
        running.finish_step = -1

    def _mixed_step_s(self, step: _Step) -> float:
        num_tokens, attention = 0, 0.0
        for running, tokens in step.chunks:
            num_tokens += tokens
            attention += tokens * (running.computed + tokens / 2.0)
        return self.step_time.step_s(step.num_decoding, step.decoding_kv, num_tokens, attention, len(step.chunks))

    def _next_finish(self) -> int:
        finishing = self._finishing
        while finishing[0][1].finish_step != finishing[0][0]:
            heapq.heappop(finishing)
        return finishing[0][0]

    def _end_at(self, at_s: float) -> None:
        self._version = version = self._version + 1
        self._kernel.at(max(at_s, self._kernel.now_s), lambda: self._end(version))

    def _steps_in(self, step: _Step) -> float:
        length_s = self._kernel.now_s - step.start_s
        return self.step_time.decode_steps_in(length_s, step.num_decoding, step.decoding_kv)

    def _shorten(self, step: _Step) -> None:
        """Ends a run of decoding with the step that runs now, for a request has come."""
        num_steps = max(math.ceil(self._steps_in(step) - 1e-9), 1)
        if num_steps < step.num_steps:
            step.num_steps = num_steps
            self._end_at(step.start_s + self.step_time.decode_s(num_steps, step.num_decoding, step.decoding_kv))

    def _end(self, version: int) -> None:
        step = self._step
        if version != self._version or step is None:
            return
        self._steps_done += step.num_steps
        grown = step.num_decoding * step.num_steps
        self._private_tokens += grown
        self._decoding_kv += grown
        while self._decoding and self._next_finish() <= self._steps_done:
            self._finish(heapq.heappop(self._finishing)[1])
        for running, tokens in step.chunks:
            running.computed += tokens
            self._share_blocks(running)
            if running.computed == running.target:
                self._say_first(running)
        self._begin()

    def _share_blocks(self, running: Running) -> None:
        """Blocks that are full now can be found by others."""
        blocks, block_tokens = running.work.blocks, self._cache.block_tokens
        num_full = min(running.computed // block_tokens, len(blocks))
        if num_full <= running.num_held or not self._engine.prefix_caching:
            return
        self._cache.hold(blocks[running.num_held : num_full])
        self._take(running, -(num_full - running.num_held) * block_tokens)
        running.num_held = num_full

    def _say_first(self, running: Running) -> None:
        """A prompt is computed: its next token is said, and it decodes from the next step on."""
        running.num_done += 1
        if math.isnan(running.first_token_at_s):
            running.first_token_at_s = self._kernel.now_s
            self._on_first_token(running)
        left = running.work.num_output_tokens - running.num_done
        if left <= 0:
            self._finish(running)
            return
        self._prefilling.remove(running)
        self._decoding.add(running)
        self._decoding_kv += running.target
        running.joined_step = self._steps_done
        running.finish_step = self._steps_done + left
        heapq.heappush(self._finishing, (running.finish_step, running))

    def _finish(self, running: Running) -> None:
        self._leave(running)
        self._on_finished(running)
