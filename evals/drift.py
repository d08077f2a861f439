"""Has a replica changed? Tripwires against a reference, each cheap, which decide how much to evaluate.

    token ids     of rendered chats: a changed template or tokenizer
    settings      generation config and stop tokens of the model's folder
    next token    KL divergence of its 20 likeliest from the reference's, over fixed prompts
    agreement     greedy answers, token by token, at the concurrency of the reference

A tripwire says that something changed, never that it is worse: weights rounded to 8 bits differ, and answer as well.
So its outcome is an amount of evaluation (`Action`), and the verdict stays with the gate.

Bands are of the mean KL in nats. The test asks whether this reading differs from the reference more than the
reference's own second reading does (the floor): the two divergences of a prompt change places at random.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import product

import numpy as np
from numpy.typing import NDArray

from evals.readings import HASHED, Answer, Reading

SIGNIFICANCE = 0.01
EXACT_PAIRS = 12
NUM_DRAWS = 10_000
FLOOR_PROBABILITY = 1e-6
EARLY_PROMPTS = 10
EARLY_TOKENS = 300


class Action(StrEnum):
    """How much to evaluate, from least to most."""

    SAME = "same"
    LABEL = "label"
    FULL_GATE = "full_gate"
    BLOCK = "block"


ORDER = tuple(Action)
# Mean KL in nats, from which on each action holds.
BANDS = ((0.1, Action.BLOCK), (0.03, Action.FULL_GATE), (0.003, Action.LABEL), (0.0, Action.SAME))


@dataclass(frozen=True, slots=True)
class Drift:
    """What a reading says against its reference.

    Attributes:
        action: the most that any tripwire asks for.
        reasons: what each of those that tripped saw.
        kl_mean: nats, over all prompts; short and long ones apart beside it.
        kl_p: the chance of divergences like these if the replica were the reference again.
        found_by_prompts: the first number of prompts, in order, at which mean KL is past the band `same` and the test
            rejects; None when that never happens.
        agreement_frac: share of answers that are equal token for token, with the same finish reason.
        first_difference: tokens compared, answer after answer, until the first that differs; None when none does.
        not_seen: tripwires that had nothing to compare.
    """

    action: Action
    reasons: tuple[str, ...]
    kl_mean: float
    kl_short: float
    kl_long: float
    kl_p: float
    found_by_prompts: int | None
    agreement_frac: float
    agreement_p: float
    first_difference: int | None
    not_seen: tuple[str, ...]


def kl(reference: Mapping[int, float], other: Mapping[int, float]) -> float:
    """KL divergence (nats) of two next-token distributions, each given by its likeliest tokens' logprobs.

    All tokens that are not among the reference's are one more outcome. A token that the other does not show is at most
    as likely there as the least likely that it shows, and counts as that: what it adds is understated.
    """
    if not reference or not other:
        raise ValueError("a distribution without a token")
    least = min(other.values())
    p = np.exp(np.array(list(reference.values())))
    q = np.exp(np.array([other.get(token, least) for token in reference]))
    p = np.append(p, max(1.0 - float(p.sum()), FLOOR_PROBABILITY))
    q = np.append(q, max(1.0 - float(q.sum()), FLOOR_PROBABILITY))
    p, q = p / p.sum(), q / q.sum()
    return max(0.0, float((p * np.log(p / q)).sum()))


def permutation_p(values: Sequence[float], floor: Sequence[float], *, seed: int = 0) -> float:
    """One-sided p of "values are no larger than floor", pair by pair: signs of the differences flipped at random.

    Exact up to 12 pairs; else by 10,000 draws, the observed one counted among them.
    """
    differences = np.array(values, dtype=np.float64) - np.array(floor, dtype=np.float64)
    signs = _signs(len(differences), seed)
    observed = float(differences.sum())
    # Sums of equal numbers in another order differ in the last digits.
    as_large = int((signs @ differences >= observed - 1e-12 * max(1.0, abs(observed))).sum())
    exact = len(differences) <= EXACT_PAIRS
    return as_large / len(signs) if exact else (1 + as_large) / (1 + len(signs))


def _signs(num: int, seed: int) -> NDArray[np.float64]:
    if num <= EXACT_PAIRS:
        return np.array(list(product((1.0, -1.0), repeat=num)))
    return np.random.default_rng(seed).choice((1.0, -1.0), size=(NUM_DRAWS, num))


def band(kl_mean: float) -> Action:
    """The action of a mean KL."""
    return next(action for least, action in BANDS if kl_mean >= least)


def compare(reference: Reading, floor: Reading, reading: Reading) -> Drift:
    """`reading` against `reference`, with the reference's own second reading as the floor.

    Raises:
        ValueError: they were not taken with the same prompts at the same concurrency.
    """
    for other in (floor, reading):
        if other.protocol != reference.protocol:
            raise ValueError("readings of other prompts or concurrency cannot be compared: take the reference anew")
    kls, floors = _kls(reference, reading), _kls(reference, floor)
    mean, p = float(np.mean(kls)), permutation_p(kls, floors)
    long = np.array(reference.is_long)
    differs, floor_differs = _differs(reference, reading), _differs(reference, floor)
    agreement_p = permutation_p(differs, floor_differs)
    tripped, not_seen = _hashes(reference, reading)
    if (by_kl := band(mean)) is not Action.SAME:
        tripped.append((by_kl, f"next-token KL {mean:.4f} nats (p {p:.2g})"))
    elif p <= SIGNIFICANCE:
        tripped.append((Action.SAME, f"next-token KL {mean:.4f} nats is more than chance, and in the band `same`"))
    if agreement_p <= SIGNIFICANCE:
        tripped.append((Action.LABEL, f"{int(sum(differs))} of {len(differs)} greedy answers differ"))
    return Drift(
        action=max((action for action, _ in tripped), key=ORDER.index, default=Action.SAME),
        reasons=tuple(reason for _, reason in tripped),
        kl_mean=mean,
        kl_short=float(np.mean(np.array(kls)[~long])),
        kl_long=float(np.mean(np.array(kls)[long])),
        kl_p=p,
        found_by_prompts=_found_by(kls, floors),
        agreement_frac=1.0 - sum(differs) / len(differs),
        agreement_p=agreement_p,
        first_difference=first_difference(reference.answers, reading.answers),
        not_seen=tuple(not_seen),
    )


def _hashes(reference: Reading, reading: Reading) -> tuple[list[tuple[Action, str]], list[str]]:
    tripped: list[tuple[Action, str]] = []
    not_seen = []
    for name in HASHED:
        before, now = getattr(reference, name), getattr(reading, name)
        if before is None or now is None:
            not_seen.append(name)
        elif before != now:
            what = {"token_ids": "rendered token ids", "settings": "generation config or stop tokens"}[name]
            tripped.append((Action.FULL_GATE, f"{what} differ"))
    return tripped, not_seen


def _kls(reference: Reading, reading: Reading) -> list[float]:
    return [kl(p, q) for p, q in zip(reference.next_tokens, reading.next_tokens, strict=True)]


def _differs(reference: Reading, reading: Reading) -> list[float]:
    return [float(a != b) for a, b in zip(reference.answers, reading.answers, strict=True)]


def _found_by(kls: Sequence[float], floors: Sequence[float]) -> int | None:
    least = math.ceil(-math.log2(SIGNIFICANCE))  # fewer pairs cannot reject
    for num in range(least, len(kls) + 1):
        past = band(float(np.mean(kls[:num]))) is not Action.SAME
        if past and permutation_p(kls[:num], floors[:num]) <= SIGNIFICANCE:
            return num
    return None


def first_difference(reference: Sequence[Answer], answers: Sequence[Answer]) -> int | None:
    """Tokens compared, answer after answer, up to and with the first that differs; None when none does."""
    num = 0
    for before, now in zip(reference, answers, strict=True):
        for a, b in zip(before.tokens, now.tokens, strict=False):
            num += 1
            if a != b:
                return num
        if before != now:
            return num + 1
    return None
