"""What prompts are made of: whole words of the model's own vocabulary, and the special tokens around a text.

A weights folder needs only its `tokenizer.json`; torch and transformers are not involved.
"""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

FIRST_BLOCK_TOKENS = 16  # the smallest block that engines cache
MIN_WORDS = 100
MAX_DRAWS = 1000
_WORD = re.compile(r"[a-z]{3,12}")
_SPACE_MARKS = ("\u0120", "\u2581")  # how byte-level and SentencePiece vocabularies write a word's leading space


class WorkloadError(ValueError):
    """The prompts that were asked for cannot be made; the message says why."""


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What prompts are made of: ids of whole words, and the special tokens around a text."""

    tokenizer: Tokenizer
    words: tuple[int, ...]
    prefix: tuple[int, ...]
    suffix: tuple[int, ...]

    @classmethod
    def load(cls, weights_dir: Path) -> Vocabulary:
        """Reads `tokenizer.json` of a weights folder.

        Raises:
            WorkloadError: it is missing or unreadable, or has too few whole words to make distinct prompts.
        """
        path = weights_dir / "tokenizer.json"
        if not path.is_file():
            raise WorkloadError(f"{path} is missing: exact prompt lengths need the model's own tokenizer")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as error:
            raise WorkloadError(f"{path} cannot be read as a tokenizer: {error}") from error
        tokenizer.no_truncation()  # MiniLM's file pads and cuts to 128
        tokenizer.no_padding()
        words = _whole_words(tokenizer)
        if len(words) < MIN_WORDS:
            raise WorkloadError(f"{path} has {len(words)} whole lower-case words; prompts need {MIN_WORDS}")
        prefix, suffix = _special_tokens(tokenizer)
        return cls(tokenizer, words, prefix, suffix)

    def text(self, word_ids: Sequence[int]) -> str:
        """The words as text."""
        tokens = (self.tokenizer.id_to_token(word_id) or "" for word_id in word_ids)
        return " ".join(token.lstrip("".join(_SPACE_MARKS)) for token in tokens)

    def count(self, text: str) -> int:
        """Tokens of a text without special tokens."""
        return len(self.tokenizer.encode(text, add_special_tokens=False).ids)

    def draw(self, num_words: int, rng: random.Random) -> list[int]:
        """So many words, by chance."""
        return rng.choices(self.words, k=num_words)

    def exact_text(self, words: Sequence[int], rng: random.Random) -> str:
        """A text of exactly `len(words)` tokens: the words, the first exchanged where it doesn't stand alone.

        The first word has no space before it and may then encode to more than one token.

        Raises:
            WorkloadError: no such text was found.
        """
        for first in [words[0], *self.draw(MAX_DRAWS, rng)]:
            if self.count(self.text([first])) == 1:
                text = self.text([first, *words[1:]])
                if self.count(text) == len(words):
                    return text
        raise WorkloadError(f"no text of exactly {len(words)} tokens found: the vocabulary's words don't stand alone")


class DistinctWords:
    """Draws sequences of words of which no two begin alike: they differ within the first block that engines cache.

    Args:
        vocabulary: whose words.
        rng: of the draws.
        num_before: special tokens that stand before them in that block.
    """

    def __init__(self, vocabulary: Vocabulary, rng: random.Random, num_before: int = 0) -> None:
        self._vocabulary = vocabulary
        self._rng = rng
        self._num_leading = max(1, FIRST_BLOCK_TOKENS - num_before)
        self._seen: set[tuple[int, ...]] = set()

    def draw(self, num_words: int) -> list[int]:
        """A sequence that begins as none before.

        Raises:
            WorkloadError: no room for a word, or no distinct sequence of that length is left.
        """
        if num_words < 1:
            raise WorkloadError("the prompt length leaves no room for a word beside the special tokens")
        for _ in range(MAX_DRAWS):
            words = self._vocabulary.draw(num_words, self._rng)
            leading = tuple(words[: self._num_leading])
            if leading not in self._seen:
                self._seen.add(leading)
                return words
        raise WorkloadError(f"no distinct prompt of {num_words} words is left after {len(self._seen)}")


def _whole_words(tokenizer: Tokenizer) -> tuple[int, ...]:
    """Ids of tokens that are a lower-case word with the space before it (without one, in WordPiece)."""
    vocabulary = tokenizer.get_vocab(with_added_tokens=False)
    marked = {token[1:]: token_id for token, token_id in vocabulary.items() if token.startswith(_SPACE_MARKS)}
    return tuple(sorted(token_id for word, token_id in (marked or vocabulary).items() if _WORD.fullmatch(word)))


def _special_tokens(tokenizer: Tokenizer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The ids that the tokenizer puts before and after a text."""
    plain = tokenizer.encode("word", add_special_tokens=False).ids
    full = tokenizer.encode("word", add_special_tokens=True).ids
    for start in range(len(full) - len(plain) + 1):
        if full[start : start + len(plain)] == plain:
            return tuple(full[:start]), tuple(full[start + len(plain) :])
    raise WorkloadError("the tokenizer changes a text's own tokens when it adds special ones")
