"""Evaluation items: the same from the same seed, none twice, sources that clusters can rest on."""

from __future__ import annotations

from collections import Counter

import pytest

from evals.suites import SUITES, items_digest, suite_of
from evals.tasks import TASKS, Scoring, make_items
from evals.tasks.formats import ASKS, holds


@pytest.mark.parametrize("task", TASKS)
def test_a_seed_decides_the_items_and_none_comes_twice(task: str):
    items = make_items(task, 100, seed=3)
    assert items == make_items(task, 100, seed=3)
    assert items != make_items(task, 100, seed=4)
    assert len({item.id for item in items}) == 100
    assert {item.task for item in items} == {task}
    assert all(item.prompt == item.prompt.rstrip() and item.gold and item.source for item in items)


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_can_be_made(name: str):
    suite = suite_of(name)
    items = suite.items(seed=0)
    assert Counter(item.task for item in items) == dict(suite.parts)
    assert items_digest(items) == items_digest(suite.items(seed=0))
    assert items_digest(items) != items_digest(suite.items(seed=1))


def test_more_items_than_there_are_is_refused():
    with pytest.raises(ValueError, match="has 455 items; 5000 were asked for"):
        make_items("cloze", 5000, seed=0)
    with pytest.raises(ValueError, match="no task 'nope'"):
        make_items("nope", 1, seed=0)


def test_items_about_one_country_share_a_source():
    sources = Counter(item.source for item in make_items("cloze", 455, seed=0))
    assert set(sources.values()) == {5}


def test_a_pair_has_a_right_and_a_wrong_ending():
    for item in make_items("pairs", 50, seed=0):
        assert item.scoring is Scoring.CHOICE
        assert item.other not in ("", item.gold)


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        ("one_word", "apple\n", "The longer is apple."),
        ("commas", "Apple, river, table", "apple river table"),
        ("numbered", "1. apple\n2. river\n3. table", "- apple\n- river\n- table"),
        ("json", '```json\n{"apple": "river"}\n```', '{"apple": river}'),
        ("ends_with", "I ate an apple.", "An apple is good."),
        ("contains", "An apple fell in the river.", "An apple fell."),
        ("upper", "APPLE RIVER", "apple river"),
    ],
)
def test_checks_of_form(kind: str, good: str, bad: str):
    gold = f"{kind} apple river table"
    assert kind in ASKS
    assert holds(gold, good)
    assert not holds(gold, bad)
    assert not holds(gold, "")
