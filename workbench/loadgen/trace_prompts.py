"""Prompts with a trace's lengths and shared blocks: equal block ids give equal text.

A block's words are a function of the seed and its id alone. The special tokens of the model stand before the first
block and count as part of the prompt, so the last block is shorter by as many; what no block covers is words that
no other request has.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field

from workbench.loadgen.chat_frame import ChatFrame, FrameNeed
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.traces import BlockId, Trace, TracedRequest
from workbench.loadgen.vocabulary import DistinctWords, Vocabulary, WorkloadError
from workbench.loadgen.workloads import Form

_KEPT_WORDS = 2_000_000  # words of blocks kept in memory; beyond that a block is drawn again


@dataclass(frozen=True, slots=True)
class TraceWorkload:
    """The requests of a trace, in its order and at its lengths; ends with the trace.

    Token ids have the trace's lengths exactly; only a prompt with no room for a word beside the special tokens (or the
    chat's frame) gets one. In the form of chat, where words meet at a block's edge, a tokenizer
    may make a token more or less of them: the prompt then says its own length, not the trace's.
    """

    trace: Trace
    form: Form = Form.IDS

    @property
    def frame_need(self) -> FrameNeed | None:
        """What to ask the server first."""
        return FrameNeed() if self.form is Form.CHAT else None

    def prompts(self, vocabulary: Vocabulary, *, seed: int, frame: ChatFrame | None = None) -> Iterator[Prompt]:
        """One prompt a request.

        Raises:
            WorkloadError: no distinct prompt is left, or the chat frame is missing.
        """
        if self.form is Form.CHAT and frame is None:
            raise WorkloadError("chat lengths need the server's chat frame: see ask_chat_frame")
        frame = frame if self.form is Form.CHAT else None
        blocks = _Blocks(vocabulary, self.trace.block_tokens, seed)
        own = DistinctWords(vocabulary, random.Random(f"{seed}/trace"))
        for request in self.trace.requests:
            yield self._prompt(request, blocks, own, frame)

    def _prompt(self, request: TracedRequest, blocks: _Blocks, own: DistinctWords, frame: ChatFrame | None) -> Prompt:
        vocabulary = blocks.vocabulary
        num_words = max(1, request.num_prompt_tokens - (frame.first if frame else len(vocabulary.prefix)))
        words = blocks.words(request.block_ids, num_words)
        if len(words) < num_words:
            words += own.draw(num_words - len(words))
        if frame is None:
            ids = (*vocabulary.prefix, *words)
            return Prompt(
                len(ids), request.num_output_tokens, token_ids=ids, tier=request.tier, adapter=request.adapter
            )
        text = vocabulary.text(words)
        length = frame.first + vocabulary.count(text)
        return Prompt(
            length,
            request.num_output_tokens,
            messages=({"role": "user", "content": text},),
            tier=request.tier,
            adapter=request.adapter,
        )


@dataclass(slots=True)
class _Blocks:
    """Words of blocks by their id."""

    vocabulary: Vocabulary
    block_tokens: int
    seed: int
    kept: dict[BlockId, list[int]] = field(default_factory=dict)

    def words(self, block_ids: tuple[BlockId, ...], num_words: int) -> list[int]:
        """The first `num_words` of the blocks, or all there are."""
        words: list[int] = []
        for block_id in block_ids:
            if len(words) >= num_words:
                break
            words += self._of(block_id)
        return words[:num_words]

    def _of(self, block_id: BlockId) -> list[int]:
        found = self.kept.get(block_id)
        if found is None:
            rng = random.Random(f"{self.seed}/blocks/{type(block_id).__name__}/{block_id}")
            found = self.vocabulary.draw(self.block_tokens, rng)
            if len(self.kept) * self.block_tokens < _KEPT_WORDS:
                self.kept[block_id] = found
        return found


def trace_prompts(trace: Trace, vocabulary: Vocabulary, *, seed: int) -> Iterator[Prompt]:
    """One prompt of token ids for each request of the trace.

    Raises:
        WorkloadError: no distinct prompt is left.
    """
    return TraceWorkload(trace).prompts(vocabulary, seed=seed)
