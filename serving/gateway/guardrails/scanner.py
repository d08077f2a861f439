"""Patterns over all texts of a request: one pass says which found something, and only those look where.

The pass is a set of RE2: one automaton for every pattern and blocklist together, 1.6 ns a byte whatever there is to
find. What is looked for as a person reads it is looked for in the folded text too, when the text is not plain ASCII.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from unicodedata import is_normalized

import re2

from serving.core.policies.guardrails import Action
from serving.gateway.guardrails.folding import fold, fold_with_origins
from serving.gateway.guardrails.patterns import BadPattern, Pattern, options

Span = tuple[int, int]
MEMORY_BYTES = 8 << 20
MEMORY_BYTES_A_CHAR = 256
"""RE2's memory: a base, and as much again as an automaton of long blocklists needs."""

MAX_ON_LOOP_US = 2_000.0
CANDIDATE_US = 7.0
FOLDED_CHAR_US = 0.15
TRACED_CHAR_US = 0.7
"""What a closer look costs at most: for each candidate, each character folded, and folded with its origin kept."""


@dataclass(frozen=True, slots=True)
class Hit:
    """A check found something in the text of that index.

    `spans` are all the places (characters, in order, apart) where its action is to redact, else empty; `label` is what
    takes their place.
    """

    check: str
    index: int
    spans: tuple[Span, ...] = ()
    label: str = ""


class Laborious(Exception):
    """So much looks like a find that looking closer takes milliseconds: not on the event loop."""


class Reading:
    """The texts as they came and as a person reads them, and the time that looking at them may still take.

    With `on_loop` that time is bounded and Laborious is raised when it is over; in a thread nothing bounds it but the
    texts' length, in which it is linear.
    """

    def __init__(self, texts: Sequence[str], *, on_loop: bool = False) -> None:
        self.texts = texts
        self.joined = "\n".join(texts)
        self.data = _encode(self.joined)
        self._left_us = MAX_ON_LOOP_US if on_loop else None

    def spend(self, cost_us: float) -> None:
        """Takes time. Raises Laborious when there is none left."""
        if self._left_us is not None:
            self._left_us -= cost_us
            if self._left_us < 0:
                raise Laborious

    def fold(self, text: str) -> str:
        """The text as a person reads it. What is in that form already, as most is, costs next to nothing."""
        if not is_normalized("NFKC", text):
            self.spend(FOLDED_CHAR_US * len(text))
        return fold(text)

    @cached_property
    def folded_data(self) -> bytes | None:
        """All texts folded; None when that changes nothing."""
        if len(self.data) == len(self.joined):
            return None
        folded = self.fold(self.joined)
        return None if folded == self.joined else _encode(folded)


class Scanner:
    """Patterns compiled together. Which of them count, and how, says each scan."""

    def __init__(self, patterns: Iterable[Pattern]) -> None:
        """Raises BadPattern when they need more memory than they may have."""
        self._patterns = list(patterns)
        self.names = frozenset(pattern.name for pattern in self._patterns)
        num_chars = sum(len(pattern.expression) for pattern in self._patterns)
        chosen = options(MEMORY_BYTES + MEMORY_BYTES_A_CHAR * num_chars)
        self._compiled = [re2.compile(pattern.expression.encode(), chosen) for pattern in self._patterns]
        self._set = re2.Set.SearchSet(chosen)
        for pattern in self._patterns:
            self._set.Add(pattern.expression)
        try:
            self._set.Compile()
        except re2.error as error:
            raise BadPattern("the patterns and blocklists are too large to look for together") from error

    def has_candidates(self, text: str) -> bool:
        """Whether a closer look at the ASCII text could find anything."""
        return bool(self._set.Match(text))

    def scan(self, reading: Reading, actions: Mapping[str, Action]) -> list[Hit]:
        """What was found by the checks that have an action other than `allow`, in the order of the patterns.

        Raises:
            Laborious: the reading's time is over; read again in a thread.
        """
        candidates = set(self._set.Match(reading.data) or ())
        if reading.folded_data is not None:
            candidates |= set(self._set.Match(reading.folded_data) or ())
        hits = []
        for number in sorted(candidates):
            name = self._patterns[number].name
            action = actions.get(name, Action.ALLOW)
            if action is Action.ALLOW:
                continue
            for index, text in enumerate(reading.texts):
                reading.spend(CANDIDATE_US)
                if action is Action.REDACT:
                    spans = tuple(self._places(number, text, reading))
                    hits += [Hit(name, index, spans, self._patterns[number].label)] if spans else []
                elif next(self._find(number, self._as_read(number, text, reading), reading), None) is not None:
                    hits.append(Hit(name, index))
        return hits

    def _as_read(self, number: int, text: str, reading: Reading) -> str:
        if text.isascii() or not self._patterns[number].folds:
            return text
        return reading.fold(text)

    def _places(self, number: int, text: str, reading: Reading) -> Iterator[Span]:
        """Spans in characters of `text`."""
        if text.isascii() or not self._patterns[number].folds:
            yield from self._find(number, text, reading)
            return
        reading.spend(TRACED_CHAR_US * len(text))
        folded, origins = fold_with_origins(text)
        for start, end in self._find(number, folded, reading):
            last = origins[end - 1]
            yield origins[start], next(origin for origin in islice(origins, end, None) if origin > last)

    def _find(self, number: int, text: str, reading: Reading) -> Iterator[Span]:
        """Spans of what proved real, in characters of `text`."""
        pattern = self._patterns[number]
        compiled = self._compiled[number]
        data = _encode(text)
        is_ascii = len(data) == len(text)
        last_byte = last_char = position = 0
        while (match := compiled.search(data, position)) is not None:
            reading.spend(CANDIDATE_US)
            start, end = _span(match, pattern.num_groups)
            found = _decode(data[start:end])
            real = len(found) if pattern.proof is None else pattern.proof(found)
            if not real:
                position = max(end, start + 1) if real == 0 else start + 1
                continue
            position = end = start + len(_encode(found[:real]))
            if is_ascii:
                yield start, end
                continue
            first = last_char + len(_decode(data[last_byte:start]))
            last_byte, last_char = end, first + real
            yield first, last_char


def redact(text: str, finds: Iterable[tuple[int, int, str]]) -> str:
    """The text with each find, from its start to its end, replaced by its label."""
    pieces: list[str] = []
    position = 0
    for start, end, label in sorted(finds):
        if end <= position:
            continue
        pieces += [text[position : max(start, position)], label]
        position = end
    return "".join([*pieces, text[position:]])


def _encode(text: str) -> bytes:
    """UTF-8; half a surrogate pair, which it cannot hold, becomes a question mark of the same length."""
    return text.encode("utf-8", "replace")


def _decode(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _span(match: re2._Match, num_groups: int) -> Span:
    for number in range(1, num_groups + 1):
        if match.start(number) >= 0:
            return match.span(number)
    return match.span()
