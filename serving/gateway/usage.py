"""Tokens of an answer: the engine's own count when it came, else what was seen of it.

When the client leaves or the engine dies, the count is the estimated prompt and what the chunks carried.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Usage:
    """Tokens of one answer so far. `exact` once the engine has reported the whole."""

    num_prompt_tokens: int
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    exact: bool = False

    def take_report(self, usage: dict[str, Any]) -> None:
        """Takes the engine's `usage` object, in the words of either API; a later one replaces an earlier one."""
        self.num_prompt_tokens = int(usage.get("prompt_tokens") or usage.get("input_tokens") or 0)
        self.num_output_tokens = int(usage.get("completion_tokens") or usage.get("output_tokens") or 0)
        details = usage.get("prompt_tokens_details") or usage.get("input_tokens_details") or {}
        self.num_cached_tokens = int(details.get("cached_tokens") or 0)
        self.exact = True

    def take_chunk(self, choices: list[dict[str, Any]]) -> int:
        """Counts the tokens that a chunk's choices carry; returns how many."""
        num_tokens = sum(tokens_in(choice) for choice in choices)
        self.take_tokens(num_tokens)
        return num_tokens

    def take_tokens(self, num_tokens: int) -> None:
        """Counts tokens seen, until the engine has reported the whole."""
        if not self.exact:
            self.num_output_tokens += num_tokens


def tokens_in(choice: dict[str, Any]) -> int:
    """Tokens of one choice of a chunk: its token ids when they are there, else one for any text it carries."""
    token_ids = choice.get("token_ids")
    if token_ids:
        return len(token_ids)
    delta = choice.get("delta")
    if delta is None:
        return 1 if choice.get("text") else 0
    carries = (
        delta.get("content") or delta.get("reasoning") or delta.get("reasoning_content") or delta.get("tool_calls")
    )
    return 1 if carries else 0
