"""A tiny tokenizer for tests of prompts."""

from __future__ import annotations

import random
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

MARK = "\u2581"


def words(count: int) -> list[str]:
    rng = random.Random(1)
    return sorted({"".join(rng.choices("abcdefghij", k=5)) for _ in range(count * 2)})[:count]


def write_tokenizer(folder: Path, *, num_words: int = 300, special: str | None = None) -> None:
    """A vocabulary of words with their space, as SentencePiece writes them."""
    marked = [MARK + word for word in words(num_words)]
    vocabulary = {token: number for number, token in enumerate(["<unk>", "<bos>", "<eos>", *marked])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    if special is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=special, special_tokens=[("<bos>", 1), ("<eos>", 2)]
        )
    tokenizer.enable_truncation(4)  # as MiniLM's file does: it must not reach the prompts
    tokenizer.enable_padding(length=4)
    tokenizer.save(str(folder / "tokenizer.json"))
