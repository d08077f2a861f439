"""Prompts of exact length in the model's own tokens, no two alike.

Completions are sent as token ids, so their length is exact by construction: nothing is encoded again and no
special token added on the way. They are drawn from whole words of the model's vocabulary, begin as the
model's own tokenizer begins a text (BOS, [CLS]), and differ inside the first block that an engine caches,
so that no prompt finds another's prefix. Chat goes as text through the server's template: what it adds is
asked from the server (chat_frame.py), and the texts' length is checked by the model's tokenizer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from itertools import count
from typing import Any

from workbench.loadgen.chat_frame import ChatFrame, FrameNeed
from workbench.loadgen.lengths import Fixed, Independent, Lengths, Shapes
from workbench.loadgen.prompts import Message, Prompt, each_once
from workbench.loadgen.vocabulary import DistinctWords, Vocabulary, WorkloadError

_TOPICS = ("weather", "stock", "route", "calendar", "ticket", "recipe", "account", "sensor")


class Form(StrEnum):
    """How a prompt is sent."""

    IDS = "ids"  # token ids to /v1/completions
    CHAT = "chat"  # messages to /v1/chat/completions


@dataclass(frozen=True, slots=True)
class Synthetic:
    """Conversations of words: one turn or many, with or without a shared beginning.

    A turn's prompt is all that was said before, plus a new question: prompt t + 1 = prompt t + answer t + `growth`.
    The answers that stand in later prompts are words of the asked length, not the server's own: so each prompt
    has its exact length, and shares all of the prompt before it.

    Attributes:
        shapes: tokens of the first question (special tokens or the template's frame included) and of each answer.
        form: token ids or chat.
        num_prefix_tokens: of a beginning that many conversations share (in a chat the system message); it
            comes on top of the question's.
        num_prefixes: how many different ones there are.
        num_turns: of a conversation.
        growth: tokens of each later question; None as `shapes`.
        think_s: pause after an answer.
        num_tools: functions that a chat may call; 0 for none.
        tool_choice: `none` works with every server; `auto` and `required` need one that parses calls.
    """

    shapes: Shapes
    form: Form = Form.IDS
    num_prefix_tokens: int = 0
    num_prefixes: int = 1
    num_turns: int = 1
    growth: Lengths | None = None
    think_s: float = 0.0
    num_tools: int = 0
    tool_choice: str = "none"

    def __post_init__(self) -> None:
        if self.num_tools and self.form is not Form.CHAT:
            raise WorkloadError("tools exist in chats alone: ask for form=chat")

    @property
    def frame_need(self) -> FrameNeed | None:
        """What to ask the server first; None when nothing."""
        if self.form is not Form.CHAT:
            return None
        return FrameNeed(self.num_prefix_tokens > 0, self.num_turns > 1, self._extra)

    @property
    def _extra(self) -> Mapping[str, Any]:
        return {"tools": tools(self.num_tools), "tool_choice": self.tool_choice} if self.num_tools else {}

    def prompts(self, vocabulary: Vocabulary, *, seed: int, frame: ChatFrame | None = None) -> Iterator[Prompt]:
        """Turn after turn, conversation after conversation; without end.

        Args:
            vocabulary: of the model.
            seed: of words and lengths.
            frame: what the chat template adds; needed for chats alone.

        Raises:
            WorkloadError: a length leaves no room for a word, no distinct prompt is left, or the frame is missing.
        """
        if self.form is Form.CHAT and frame is None:
            raise WorkloadError("exact chat lengths need the server's chat frame: see ask_chat_frame")
        if self.form is Form.IDS or frame is None:
            frame = ChatFrame(len(vocabulary.prefix))
        maker = _Maker(self, vocabulary, seed, frame.first, frame.each_turn)
        return each_once(prompt for number in count() for prompt in maker.conversation(number))


@dataclass(slots=True)
class _Maker:
    """Draws conversations; `first` and `each_turn` are the tokens that are not words."""

    workload: Synthetic
    vocabulary: Vocabulary
    seed: int
    first: int
    each_turn: int
    rng: random.Random = field(init=False)
    distinct: DistinctWords = field(init=False)
    prefixes: dict[int, list[int]] = field(default_factory=dict)
    system_texts: dict[int, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rng = random.Random(f"{self.seed}/prompts")
        is_chat = self.workload.form is Form.CHAT
        num_before = 0 if is_chat or self.workload.num_prefix_tokens else len(self.vocabulary.prefix)
        self.distinct = DistinctWords(self.vocabulary, self.rng, num_before)

    def conversation(self, number: int) -> Iterator[Prompt]:
        workload, rng = self.workload, self.rng
        group = rng.randrange(workload.num_prefixes) if workload.num_prefix_tokens else 0
        asked, num_output_tokens = workload.shapes.draw(rng)
        said = [self.distinct.draw(asked - self.first)]
        texts: list[str] = []
        for turn in range(workload.num_turns):
            if turn:
                said.append(self.vocabulary.draw(num_output_tokens, rng))
                asked, num_output_tokens = workload.shapes.draw(rng)
                asked = workload.growth.draw(rng) if workload.growth else asked
                said.append(self._later(asked - self.each_turn))
            num_words = workload.num_prefix_tokens + sum(map(len, said))
            yield Prompt(
                self.first + turn * self.each_turn + num_words,
                num_output_tokens,
                extra=workload._extra,
                session_id=f"session-{number}" if workload.num_turns > 1 else None,
                turn=turn,
                think_s=workload.think_s if turn else 0.0,
                **self._content(group, said, texts),
            )

    def _later(self, num_words: int) -> list[int]:
        if num_words < 1:
            raise WorkloadError(f"a later question of {num_words + self.each_turn} tokens leaves no room for a word")
        return self.vocabulary.draw(num_words, self.rng)

    def _content(self, group: int, said: list[list[int]], texts: list[str]) -> dict[str, Any]:
        """The prompt as token ids or as messages; `texts` holds those of the turns before."""
        if self.workload.form is Form.IDS:
            words = [
                word for words in ([self._prefix(group)] if self.workload.num_prefix_tokens else []) for word in words
            ]
            return {"token_ids": (*self.vocabulary.prefix, *words, *(word for words in said for word in words))}
        texts += [self.vocabulary.exact_text(words, self.rng) for words in said[len(texts) :]]
        system: list[Message] = []
        if self.workload.num_prefix_tokens:
            system.append({"role": "system", "content": self._system_text(group)})
        spoken = [{"role": ("user", "assistant")[place % 2], "content": text} for place, text in enumerate(texts)]
        return {"messages": (*system, *spoken)}

    def _prefix(self, group: int) -> list[int]:
        if group not in self.prefixes:
            rng = random.Random(f"{self.seed}/prefixes/{group}")
            self.prefixes[group] = self.vocabulary.draw(self.workload.num_prefix_tokens, rng)
        return self.prefixes[group]

    def _system_text(self, group: int) -> str:
        if group not in self.system_texts:
            rng = random.Random(f"{self.seed}/prefixes/{group}/text")
            self.system_texts[group] = self.vocabulary.exact_text(self._prefix(group), rng)
        return self.system_texts[group]


@dataclass(frozen=True, slots=True)
class Embeddings:
    """Inputs to embed, with the special tokens that the model expects at both ends."""

    lengths: Lengths

    @property
    def frame_need(self) -> FrameNeed | None:
        """Nothing is asked from the server."""
        return None

    def prompts(self, vocabulary: Vocabulary, *, seed: int, frame: ChatFrame | None = None) -> Iterator[Prompt]:
        """Distinct inputs; without end.

        Raises:
            WorkloadError: a length leaves no room for a word, or no distinct input is left.
        """
        rng = random.Random(f"{seed}/embeddings")
        distinct = DistinctWords(vocabulary, rng, len(vocabulary.prefix))
        around = len(vocabulary.prefix) + len(vocabulary.suffix)
        while True:
            length = self.lengths.draw(rng)
            words = distinct.draw(length - around)
            yield Prompt(length, 0, token_ids=(*vocabulary.prefix, *words, *vocabulary.suffix))


def mixed(
    prompts: Iterator[Prompt], *, tiers: Mapping[str, float], adapters: Mapping[str, float], seed: int
) -> Iterator[Prompt]:
    """The prompts, each with a tier and an adapter by their shares; those of a session alike.

    An adapter called `base` is the model without one. An empty mix leaves the prompts as they are.
    """
    rng = random.Random(f"{seed}/mix")
    session: str | None = None
    drawn: dict[str, str] = {}
    for prompt in prompts:
        if prompt.session_id is None or prompt.session_id != session:
            session = prompt.session_id
            drawn = {name: _draw(mix, rng) for name, mix in (("tier", tiers), ("adapter", adapters)) if mix}
        adapter = drawn.get("adapter", prompt.adapter)
        yield replace(prompt, tier=drawn.get("tier", prompt.tier), adapter=None if adapter == "base" else adapter)


def _draw(mix: Mapping[str, float], rng: random.Random) -> str:
    return rng.choices(list(mix), weights=list(mix.values()))[0]


def tools(number: int) -> list[dict[str, Any]]:
    """So many function definitions in OpenAI's form, each with two parameters."""
    parameters = {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "What to look for."},
            "limit": {"type": "integer", "description": "Results at most."},
        },
        "required": ["query"],
    }
    found = []
    for index in range(number):
        topic, round_ = _TOPICS[index % len(_TOPICS)], index // len(_TOPICS)
        name = f"find_{topic}" + (f"_{round_}" if round_ else "")
        about = {"name": name, "description": f"Finds {topic} data by a query.", "parameters": parameters}
        found.append({"type": "function", "function": about})
    return found


def synthetic_prompts(
    vocabulary: Vocabulary, *, num_prompt_tokens: int, num_output_tokens: int, seed: int
) -> Iterator[Prompt]:
    """Distinct completion prompts of `num_prompt_tokens`, special tokens included; without end.

    Raises:
        WorkloadError: the length leaves no room for a word, or no distinct prompt is left.
    """
    shapes = Independent(Fixed(num_prompt_tokens), Fixed(num_output_tokens))
    return Synthetic(shapes).prompts(vocabulary, seed=seed)


def embedding_prompts(vocabulary: Vocabulary, *, num_prompt_tokens: int, seed: int) -> Iterator[Prompt]:
    """Distinct embedding inputs of `num_prompt_tokens`, with the special tokens that the model expects; without end.

    Raises:
        WorkloadError: as `synthetic_prompts`.
    """
    return Embeddings(Fixed(num_prompt_tokens)).prompts(vocabulary, seed=seed)
