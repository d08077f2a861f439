"""Tasks scored by likelihood alone: facts to complete, and which of two endings is grammatical."""

from __future__ import annotations

import itertools
import random

from evals.tasks.items import Item, Scoring, an_item, data, sampled

# Shots are of countries that `countries.json` leaves out. Without any, a small model goes on with an article.
FACTS = (
    ("The capital of {country} is", "capital"),
    ("The capital of Australia is Canberra. The capital of Turkey is Ankara. The capital of {country} is", "capital"),
    (
        "Question: What is the capital of Turkey?\nAnswer: Ankara\n\n"
        "Question: What is the capital of {country}?\nAnswer:",
        "capital",
    ),
    (
        "Ankara is the capital of Turkey. Canberra is the capital of Australia. {capital} is the capital of",
        "country",
    ),
    ("Turkey is in Asia. Australia is in Oceania. Tanzania is in Africa. {country} is in", "continent"),
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
