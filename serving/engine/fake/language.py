"""The fake model's language: a token is a word, and the next word follows from all words before.

The text is therefore a function of prompt and seed alone, and the prompt continued by the beginning of its answer
is continued by the rest of that answer: a failover that resumes a stream can be checked word by word.
"""

from __future__ import annotations

import hashlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any

_SYLLABLES = [consonant + vowel for consonant in "bdfghjklmnprstvz" for vowel in "aeiou"]
VOCABULARY_SIZE = len(_SYLLABLES) ** 2


def word_of(token_id: int) -> str:
    """The word of a token; ids beyond the vocabulary wrap around."""
    first, second = divmod(token_id % VOCABULARY_SIZE, len(_SYLLABLES))
    return _SYLLABLES[first] + _SYLLABLES[second]


def token_of(word: str) -> int:
    """The token of a word: the inverse of `word_of` for its words, a hash for all others."""
    return _TOKENS.get(word, zlib.crc32(word.encode()) % VOCABULARY_SIZE)


_TOKENS = {word_of(token_id): token_id for token_id in range(VOCABULARY_SIZE)}


def words_of_prompt(prompt: str | Sequence[int]) -> list[str]:
    """The words of a completion's prompt, given as text or as token ids."""
    return prompt.split() if isinstance(prompt, str) else [word_of(token_id) for token_id in prompt]


def words_of_chat(messages: Sequence[Mapping[str, Any]], *, adds_turn: bool) -> tuple[list[str], str]:
    """The words of all messages, and the form of the chat: who speaks from which word on.

    Roles decide what is said but are not counted as tokens.

    Args:
        messages: in OpenAI's shape; of content parts, the texts.
        adds_turn: whether the answer is a new turn, or goes on with the last message.
    """
    words: list[str] = []
    turns = []
    for message in messages:
        content = message.get("content") or ""
        if not isinstance(content, str):
            content = " ".join(part.get("text", "") for part in content)
        turns.append(f"{message.get('role')}@{len(words)}")
        words += content.split()
    if adds_turn:
        turns.append(f"assistant@{len(words)}")
    return words, "|".join(turns)


def next_tokens(words: Sequence[str], num_tokens: int, *, seed: int, form: str = "") -> list[int]:
    """The tokens that follow `words`.

    Args:
        words: all words so far.
        num_tokens: how many to say.
        seed: of the model and the request.
        form: further context, constant over a conversation's turn.
    """
    state = zlib.crc32(" ".join([form, *words]).encode())
    tokens = []
    for _ in range(num_tokens):
        token_id = ((state ^ (seed * 0x9E3779B1)) & 0xFFFFFFFF) % VOCABULARY_SIZE
        tokens.append(token_id)
        state = zlib.crc32(b" " + word_of(token_id).encode(), state)
    return tokens


def block_hashes(words: Sequence[str], block_size: int, salt: str) -> list[int]:
    """A hash for each full block of `words`, which covers all words before it and the salt."""
    hashes = []
    chained = hash(salt)
    for begin in range(0, len(words) - block_size + 1, block_size):
        chained = hash((chained, tuple(words[begin : begin + block_size])))
        hashes.append(chained)
    return hashes


def embedding(text: str, num_dimensions: int) -> list[float]:
    """A vector of length 1 that depends on the text alone."""
    raw = [byte - 127.5 for byte in hashlib.shake_256(text.encode()).digest(num_dimensions)]
    norm = sum(value * value for value in raw) ** 0.5
    return [value / norm for value in raw]
