"""What one evaluation item is."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from importlib import resources
from typing import Any

# Draws before a generator gives up finding an item that is not there yet, per item wanted.
TRIES_PER_ITEM = 50


class Scoring(StrEnum):
    """How an answer becomes a score.

    GOLD: the gold's tokens are each the most likely one, all in one forward pass.
    CHOICE: the gold is more likely than the other ending.
    GENERATE: the greedy continuation begins with the gold.
    CHECK: a check on a greedy chat answer holds.
    """

    GOLD = "gold"
    CHOICE = "choice"
    GENERATE = "generate"
    CHECK = "check"

    @property
    def by_likelihood(self) -> bool:
        """Scored without generating text."""
        return self in (Scoring.GOLD, Scoring.CHOICE)


@dataclass(frozen=True, slots=True)
class Item:
    """One question.

    Attributes:
        id: digest of task, prompt and gold: the same text has the same id, whatever the seed.
        source: what it was made from; items of one source speak for one another.
        gold: the right continuation without its leading space; for CHECK the check's name and argument.
        other: the wrong ending of a CHOICE, else empty.
    """

    id: str
    task: str
    source: str
    scoring: Scoring
    prompt: str
    gold: str
    other: str = ""


def item_id(task: str, prompt: str, gold: str) -> str:
    """Sixteen hex digits."""
    return hashlib.sha256(json.dumps([task, prompt, gold]).encode()).hexdigest()[:16]


def an_item(task: str, source: str, scoring: Scoring, prompt: str, gold: str, other: str = "") -> Item:
    """An item with its id."""
    return Item(item_id(task, prompt, gold), task, source, scoring, prompt, gold, other)


def drawn(num: int, draw: Callable[[], Item]) -> list[Item]:
    """Draws until there are `num` different items; fewer when there are no more to find."""
    found: dict[str, Item] = {}
    for _ in range(num * TRIES_PER_ITEM):
        item = draw()
        found.setdefault(item.id, item)
        if len(found) == num:
            break
    return list(found.values())


def sampled(rng: random.Random, items: list[Item], num: int) -> list[Item]:
    """`num` of all there are, or all, in an order of the seed's."""
    return rng.sample(items, min(num, len(items)))


@cache
def data(name: str) -> Any:
    """A file of `evals/data`."""
    return json.loads(resources.files("evals").joinpath("data", f"{name}.json").read_text("utf-8"))
