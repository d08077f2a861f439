"""Tasks whose items are drawn: sums, words to copy, and a last word that stands in the text before."""

from __future__ import annotations

import random

from evals.tasks.items import Item, Scoring, an_item, data, drawn

NUM_SHOTS = 4
NUM_WORDS = 5
LARGEST = 20
STORIES = (
    "{a} left the {thing} in the {place}. Then {a} went out to meet {b}. When {b} asked for the {thing}, {a} said that "
    "it was still in the",
    "{b} could not find the {thing} anywhere. {a} had seen it in the {place} that morning. So {b} went to look for the "
    "{thing} in the",
    "On Monday {a} carried the {thing} to the {place}. Nobody touched it for a week. On Sunday {b} found the {thing} "
    "in the",
)


def arithmetic(rng: random.Random, num: int) -> list[Item]:
    """Sums and differences after four solved ones; each item is its own source."""

    def draw() -> Item:
        shown = [_sum(rng) for _ in range(NUM_SHOTS)]
        question, gold = _sum(rng)
        prompt = "\n".join([*(f"{text} {answer}" for text, answer in shown), question])
        return an_item("arithmetic", f"sum:{question}", Scoring.GENERATE, prompt, gold)

    return drawn(num, draw)


def _sum(rng: random.Random) -> tuple[str, str]:
    first, second = rng.randint(1, LARGEST), rng.randint(1, LARGEST)
    if rng.random() < 0.5:
        return f"{first} + {second} =", str(first + second)
    first, second = max(first, second), min(first, second)
    return f"{first} - {second} =", str(first - second)


def copying(rng: random.Random, num: int) -> list[Item]:
    """Random words, to be said again after one example; each item is its own source."""
    words = data("words")["words"]

    def draw() -> Item:
        shown, asked = (" ".join(rng.sample(words, NUM_WORDS)) for _ in range(2))
        prompt = f"Words: {shown}\nThe same words again: {shown}\n\nWords: {asked}\nThe same words again:"
        return an_item("copying", f"words:{asked}", Scoring.GENERATE, prompt, asked)

    return drawn(num, draw)


def last_word(rng: random.Random, num: int) -> list[Item]:
    """The last word of a short story names a place that was told before; story, thing and place are a source."""
    words = data("words")

    def draw() -> Item:
        number = rng.randrange(len(STORIES))
        first, second = rng.sample(words["names"], 2)
        thing, place = rng.choice(words["things"]), rng.choice(words["places"])
        prompt = STORIES[number].format(a=first, b=second, thing=thing, place=place)
        return an_item("last_word", f"story:{number}:{thing}:{place}", Scoring.GOLD, prompt, place)

    return drawn(num, draw)
