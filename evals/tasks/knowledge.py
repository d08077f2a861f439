"""Tasks scored by likelihood alone: facts to complete, and which of two endings is grammatical."""

from __future__ import annotations

import itertools
import random

from evals.tasks.items import Item, Scoring, an_item, data, sampled

FACTS = (
    ("The capital of {country} is", "capital"),
    ("{country} is a country whose capital city is called", "capital"),
    ("Question: What is the capital city of {country}?\nAnswer:", "capital"),
    ("{country} is a country on the continent of", "continent"),
    ("Question: On which continent is {country}?\nAnswer:", "continent"),
)
BETWEEN = ("near the {noun}", "behind the {noun}", "next to the {noun}", "that I saw with the {noun}")


def cloze(rng: random.Random, num: int) -> list[Item]:
    """Facts about countries; a country is a source."""
    every = [
        an_item("cloze", f"country:{row['country']}", Scoring.GOLD, text.format(**row), row[field])
        for row in data("countries")
        for text, field in FACTS
    ]
    return sampled(rng, every, num)


def pairs(rng: random.Random, num: int) -> list[Item]:
    """Does the verb agree with its subject, with a noun of the other number between? A subject is a source."""
    words = data("words")
    every = []
    for subject, other, between, verb in itertools.product(words["nouns"], words["nouns"], BETWEEN, words["verbs"]):
        if subject == other:
            continue
        for plural in (0, 1):
            prompt = f"The {subject[plural]} {between.format(noun=other[1 - plural])}"
            source = f"subject:{subject[plural]}"
            every.append(an_item("pairs", source, Scoring.CHOICE, prompt, verb[plural], verb[1 - plural]))
    return sampled(rng, every, num)
