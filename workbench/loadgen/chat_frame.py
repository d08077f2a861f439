"""What a server's chat template adds to the texts of a chat, asked from the server itself.

A template differs by model and server version, and with a system message or tools; the server's `/tokenize`
(vLLM's) knows. Without that route no exact chat length can be promised.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from workbench.loadgen.vocabulary import Vocabulary, WorkloadError


class Asks(Protocol):
    """The part of an engine client that is needed here."""

    async def post_json(self, path: str, obj: Any) -> Any:
        """The answer to a JSON body."""
        ...


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Tokens beside the messages' own texts.

    Attributes:
        first: in a chat of one user message (and a system message, where the workload has one).
        each_turn: more for each answer and question that follow.
    """

    first: int
    each_turn: int = 0

    def at_turn(self, turn: int) -> int:
        """Tokens of the frame in turn `turn`, counted from 0."""
        return self.first + turn * self.each_turn


@dataclass(frozen=True, slots=True)
class FrameNeed:
    """What kind of chat the frame is asked for."""

    has_system: bool = False
    has_turns: bool = False
    extra: Mapping[str, Any] | None = None


async def ask_chat_frame(client: Asks, model: str, vocabulary: Vocabulary, need: FrameNeed) -> ChatFrame:
    """The frame of such chats, by the server's `/tokenize`.

    Raises:
        WorkloadError: the frame depends on the text, so that no exact length can be promised.
        UpstreamError: the server has no `/tokenize` or no chat template.
    """

    async def frame(num_turns: int, num_words: int) -> int:
        text = vocabulary.text(vocabulary.words[-num_words:])
        messages = [{"role": "system", "content": text}] if need.has_system else []
        messages += [
            {"role": role, "content": text}
            for turn in range(num_turns)
            for role in (["assistant"] * bool(turn) + ["user"])
        ]
        body = {"model": model, "messages": messages, "add_generation_prompt": True, **_tools(need.extra)}
        answer = await client.post_json("/tokenize", body)
        return int(answer["count"]) - len(messages) * vocabulary.count(text)

    first = _same([await frame(1, num_words) for num_words in (8, 24)], model)
    if not need.has_turns:
        return ChatFrame(first)
    second, third = await frame(2, 8), await frame(3, 24)
    return ChatFrame(first, _same([second - first, third - second], model))


def _tools(extra: Mapping[str, Any] | None) -> dict[str, Any]:
    return {"tools": extra["tools"]} if extra and "tools" in extra else {}


def _same(overheads: Sequence[int], model: str) -> int:
    if len(set(overheads)) != 1:
        raise WorkloadError(f"the chat template of {model} adds {sorted(set(overheads))} tokens, depending on the text")
    return overheads[0]
