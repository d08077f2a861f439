"""The fake model's language: one word a token, and a text that follows from what was said before."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.engine.fake.language import VOCABULARY_SIZE, block_hashes, next_tokens, token_of, word_of

WORDS = st.lists(st.text(st.characters(categories=["Ll"]), min_size=1, max_size=4), max_size=20)


@given(st.integers(0, VOCABULARY_SIZE - 1))
def test_words_and_tokens_are_one_to_one(token_id: int) -> None:
    assert token_of(word_of(token_id)) == token_id


@given(words=WORDS, cut=st.integers(0, 12), seed=st.integers(0, 1000), form=st.sampled_from(["", "user@0"]))
def test_an_answer_goes_on_after_its_own_beginning(words: list[str], cut: int, seed: int, form: str) -> None:
    whole = next_tokens(words, 12, seed=seed, form=form)
    said = [word_of(token_id) for token_id in whole[:cut]]
    assert next_tokens([*words, *said], 12 - cut, seed=seed, form=form) == whole[cut:]


@given(words=WORDS, other=WORDS)
def test_block_hashes_agree_exactly_on_the_common_prefix(words: list[str], other: list[str]) -> None:
    num_common = next(
        (n for n, (a, b) in enumerate(zip(words, other, strict=False)) if a != b), min(len(words), len(other))
    )
    ours, theirs = block_hashes(words, 4, "s"), block_hashes(other, 4, "s")
    num_equal = sum(a == b for a, b in zip(ours, theirs, strict=False))
    assert (len(ours), num_equal) == (len(words) // 4, num_common // 4)
    assert not set(ours) & set(block_hashes(words, 4, "another"))
