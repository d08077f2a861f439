"""Checks on the form of a greedy chat answer: the one task that sees the template, sampling and stop strings."""

from __future__ import annotations

import json
import random
import re

from evals.tasks.items import Item, Scoring, an_item, data, drawn

ASKS = {
    "one_word": "Answer with one word only, without any punctuation. Which one is longer: {a} or {b}?",
    "commas": "Write these words in one line, with a comma between them, and nothing else: {a} {b} {c}",
    "numbered": "Write a numbered list of these three things and nothing else: {a}, {b}, {c}",
    "json": 'Write a JSON object with the key "{a}" and the value "{b}". Write nothing else.',
    "ends_with": "Write one short sentence that ends with the word {a}.",
    "contains": "Write one short sentence about a {a} and a {b}.",
    "upper": "Write this in capital letters and write nothing else: {a} {b}",
}


def formats(rng: random.Random, num: int) -> list[Item]:
    """Small orders; the order and its first word are a source."""
    words = data("words")["words"]

    def draw() -> Item:
        kind = rng.choice(list(ASKS))
        first, second, third = rng.sample(words, 3)
        prompt = ASKS[kind].format(a=first, b=second, c=third)
        return an_item("format", f"order:{kind}:{first}", Scoring.CHECK, prompt, f"{kind} {first} {second} {third}")

    return drawn(num, draw)


def holds(gold: str, answer: str) -> bool:
    """Whether an answer has the form that `gold` names: a kind of `ASKS` and its three words.

    Raises:
        ValueError: no such check.
    """
    kind, first, second, third = gold.split(" ")
    text = answer.strip()
    lower = text.lower()
    match kind:
        case "one_word":
            return re.fullmatch(r"\w+", text) is not None
        case "commas":
            return "\n" not in text and all(word in lower for word in (first, second, third)) and text.count(",") == 2
        case "numbered":
            return re.findall(r"^\s*(\d+)[.)]", text, re.MULTILINE) == ["1", "2", "3"]
        case "json":
            return _object(text) == {first: second}
        case "ends_with":
            return re.search(rf"\b{first}\W*$", lower) is not None
        case "contains":
            return first in lower and second in lower
        case "upper":
            return first.upper() in text and second.upper() in text
    raise ValueError(f"no check {kind!r}")


def _object(text: str) -> object:
    try:
        return json.loads(text.removeprefix("```json").strip("`\n "))
    except json.JSONDecodeError:
        return None
