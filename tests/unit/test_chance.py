"""The routing decisions' own stream of chance."""

from __future__ import annotations

from collections import Counter

from hypothesis import given
from hypothesis import strategies as st

from serving.core.chance import Chance


def test_the_stream_is_splitmix64() -> None:
    """Reference values of the algorithm's published C code for the seed 1234567."""
    chance = Chance(1234567)
    assert [chance.bits() for _ in range(3)] == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@given(st.integers(0, 2**64 - 1), st.integers(1, 40), st.data())
def test_a_sample_holds_different_items(seed: int, size: int, data: st.DataObject) -> None:
    num = data.draw(st.integers(0, size))
    sample = Chance(seed).sample(range(size), num)
    assert len(set(sample)) == num == len(sample)
    assert set(sample) <= set(range(size))


def test_every_pair_is_drawn_about_as_often() -> None:
    pairs = Counter(frozenset(Chance(seed).sample(range(5), 2)) for seed in range(10_000))
    assert len(pairs) == 10
    assert all(850 < number < 1150 for number in pairs.values())
