"""Evaluation tasks: items made from a seed. `make_items(task, num, seed)` is the way in."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping

from evals.tasks.formats import formats
from evals.tasks.generated import arithmetic, copying, last_word
from evals.tasks.items import Item, Scoring, item_id
from evals.tasks.knowledge import cloze, pairs

__all__ = ["TASKS", "Item", "Scoring", "item_id", "make_items"]

TASKS: Mapping[str, Callable[[random.Random, int], list[Item]]] = {
    "cloze": cloze,
    "arithmetic": arithmetic,
    "copying": copying,
    "last_word": last_word,
    "pairs": pairs,
    "format": formats,
}


def make_items(task: str, num: int, seed: int) -> list[Item]:
    """The items of one task: the same for the same seed, none twice.

    Raises:
        ValueError: no such task, or it cannot make so many.
    """
    if task not in TASKS:
        raise ValueError(f"no task {task!r}; there are {', '.join(TASKS)}")
    if num < 1:
        raise ValueError(f"a task has at least one item; got {num}")
    # A text as seed is hashed the same in every process.
    items = TASKS[task](random.Random(f"{task}:{seed}"), num)
    if len(items) < num:
        raise ValueError(f"task {task!r} has {len(items)} items; {num} were asked for")
    return items
