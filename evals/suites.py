"""Suites: how many items of which task. The make-up of a suite and a seed decide every item."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass

from evals.tasks import Item, make_items


@dataclass(frozen=True, slots=True)
class Suite:
    """A named list of (task, number of items)."""

    name: str
    parts: tuple[tuple[str, int], ...]

    def items(self, seed: int) -> list[Item]:
        """Every item, task by task."""
        return [item for task, num in self.parts for item in make_items(task, num, seed)]


SUITES: Mapping[str, Suite] = {
    suite.name: suite
    for suite in (
        Suite(
            "smoke",
            (("cloze", 60), ("arithmetic", 40), ("copying", 30), ("last_word", 50), ("pairs", 20), ("format", 20)),
        ),
        Suite(
            "gate",
            (
                ("cloze", 450),
                ("arithmetic", 350),
                ("copying", 350),
                ("last_word", 500),
                ("pairs", 250),
                ("format", 250),
            ),
        ),
        Suite(
            "nightly",
            (
                ("cloze", 450),
                ("arithmetic", 1500),
                ("copying", 1500),
                ("last_word", 1500),
                ("pairs", 1000),
                ("format", 1000),
            ),
        ),
    )
}


def suite_of(name: str) -> Suite:
    """A suite by name.

    Raises:
        ValueError: there is none of that name.
    """
    if name not in SUITES:
        raise ValueError(f"no suite {name!r}; there are {', '.join(SUITES)}")
    return SUITES[name]


def items_digest(items: list[Item]) -> str:
    """Sixteen hex digits of which items, in which order, under which scoring: equal digests were asked the same."""
    named = [[item.id, item.source, item.scoring.value, item.other] for item in items]
    return hashlib.sha256(json.dumps(named).encode()).hexdigest()[:16]
