"""Who likely holds the beginning of a prompt: the deepest match, bounded by capacity, forgotten by age of use."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from serving.core.prefix_index import MAX_HOLDERS, Holder, Prefix, PrefixIndex


def prefix(*blocks: int) -> Prefix:
    return Prefix(blocks, 100.0)


def test_the_deepest_match_comes_first_and_then_the_last_used():
    index = PrefixIndex()
    index.add("shallow", prefix(1, 7), None)
    index.add("deep", prefix(1, 2, 3), None)
    index.add("late", prefix(1, 2, 3), None)
    assert index.holders(prefix(1, 2, 3, 4)) == [Holder("late", 300), Holder("deep", 300), Holder("shallow", 100)]
    assert index.holders(prefix(9)) == []
    assert index.num_tokens("deep", prefix(1, 2, 8)) == 200


def test_a_replica_forgets_what_its_cache_cannot_hold_the_end_of_the_oldest_prompt_first():
    index = PrefixIndex()
    index.add("a", prefix(1, 2, 3), 400)
    index.add("a", prefix(1, 4), 400)
    index.add(
        "a",
        prefix(
            5,
        ),
        400,
    )
    assert index.num_blocks == 4
    assert index.holders(prefix(1, 2, 3)) == [Holder("a", 200)]
    index.forget("a")
    assert (index.num_blocks, index.holders(prefix(1))) == (0, [])


def test_a_hot_prefix_names_a_bounded_number():
    index = PrefixIndex()
    for number in range(50):
        index.add(str(number), prefix(1), None)
    assert len(index.holders(prefix(1, 2))) == MAX_HOLDERS


@given(st.lists(st.tuples(st.sampled_from("abc"), st.lists(st.integers(0, 3), min_size=1, max_size=6)), max_size=40))
def test_what_is_said_to_be_held_was_sent_and_capacity_holds(sent: list[tuple[str, list[int]]]):
    index, seen = PrefixIndex(), {}
    for replica_id, path in sent:
        chained = tuple(hash(tuple(path[: depth + 1])) for depth in range(len(path)))
        index.add(replica_id, Prefix(chained, 100.0), 800)
        seen.setdefault(replica_id, set()).update(chained)
    assert index.num_blocks <= 8 * 3
    for _, path in sent:
        chained = tuple(hash(tuple(path[: depth + 1])) for depth in range(len(path)))
        for holder in index.holders(Prefix(chained, 100.0)):
            assert chained[holder.num_tokens // 100 - 1] in seen[holder.replica_id]
            assert index.num_tokens(holder.replica_id, Prefix(chained, 100.0)) == holder.num_tokens
