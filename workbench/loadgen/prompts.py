"""One request's input, before it becomes a body."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from workbench.loadgen.vocabulary import WorkloadError

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Prompt:
    """One request's input: token ids (exact by construction), chat messages or text, and the output to ask for.

    Attributes:
        num_prompt_tokens: all that the model sees, special tokens and template included.
        num_output_tokens: to ask for; 0 for an embedding.
        is_estimated: `num_prompt_tokens` is a guess (a text of the user's own): the server's usage replaces it.
        may_stop: the answer may end by itself before `num_output_tokens`.
        extra: further fields of the body, such as `tools`.
        tier: service tier to ask for.
        adapter: to answer with, of the target's model.
        session_id: requests of one session are sent one after the other, each when the one before has ended.
        turn: its place in the session, from 0.
        think_s: pause after the end of the turn before.
    """

    num_prompt_tokens: int
    num_output_tokens: int
    token_ids: tuple[int, ...] | None = None
    messages: tuple[Message, ...] | None = None
    text: str | None = None
    is_estimated: bool = False
    may_stop: bool = False
    extra: Mapping[str, Any] = field(default_factory=dict)
    tier: str | None = None
    adapter: str | None = None
    session_id: str | None = None
    turn: int = 0
    think_s: float = 0.0

    @property
    def content(self) -> object:
        """What is equal for two prompts that an engine would find in its cache."""
        return self.token_ids or self.text or repr(self.messages)


def each_once(prompts: Iterator[Prompt]) -> Iterator[Prompt]:
    """The prompts as they come, as long as no two are equal.

    Raises:
        WorkloadError: one comes again; an engine would answer it from its cache.
    """
    seen: set[int] = set()
    for number, prompt in enumerate(prompts):
        key = hash((prompt.content, prompt.adapter))
        if key in seen:
            raise WorkloadError(f"prompt {number} was there before: every prompt of this workload must be its own")
        seen.add(key)
        yield prompt
