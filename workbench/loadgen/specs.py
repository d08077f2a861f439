"""The short form in which people ask for a load: `kind:key=value,key=value`.

    poisson:rate=4          trace:FILE,scale=10          sessions:turns=4,prompt=32-96

A value without a key stands first and is the kind's own (the file of a trace). A key that the kind does not know,
a value of a wrong kind, a key that is missing: each is an error that says what would be right.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import TypeVar

T = TypeVar("T")


class SpecError(ValueError):
    """A spec cannot be read; the message says what would be right."""


@dataclass(slots=True)
class Spec:
    """A spec taken apart. Each `number`, `whole`, `text` or `value` takes its key; `end` refuses what is left.

    Attributes:
        text: the spec as it was given.
        kind: what stands before the colon.
        subject: the value without a key, or None.
    """

    text: str
    kind: str
    subject: str | None = None
    fields: dict[str, str] = field(default_factory=dict)
    _known: list[str] = field(default_factory=list)

    def value(self, key: str, read: Callable[[str], T], default: T | None = None) -> T:
        """The value of `key`, read by `read`.

        Raises:
            SpecError: it is missing and has no default, or `read` refuses it.
        """
        self._known.append(key)
        if key not in self.fields:
            if default is not None:
                return default
            self.end()  # a key misspelled is a better answer than one missing
            raise SpecError(f"{self.text!r} lacks {key}=; write it as in `{self.kind}:{key}=…`")
        try:
            return read(self.fields.pop(key))
        except ValueError as error:
            raise SpecError(f"{key} of {self.text!r}: {error}") from None

    def number(self, key: str, default: float | None = None, *, least: float = 0.0, above: bool = False) -> float:
        """A finite number of at least `least`, or `above` it."""

        def read(text: str) -> float:
            try:
                number = float(text)
            except ValueError:
                raise SpecError(f"{text!r} is no number") from None
            if not math.isfinite(number) or number < least or (above and number == least):
                raise SpecError(f"{text} is not a number {'above' if above else 'of at least'} {least:g}")
            return number

        return self.value(key, read, default)

    def whole(self, key: str, default: int | None = None, *, least: int = 1) -> int:
        """A whole number of at least `least`."""
        return self.value(key, lambda text: whole_number(text, least), default)

    def has(self, key: str) -> bool:
        """Whether the key was given; a key asked for is a known one."""
        self._known.append(key)
        return key in self.fields

    def need_subject(self, what: str) -> str:
        """The value without a key.

        Raises:
            SpecError: there is none.
        """
        if self.subject is None:
            raise SpecError(f"{self.text!r} lacks {what}; write it first, as in `{self.kind}:{what.upper()}`")
        return self.subject

    def end(self, *, subject: bool = True) -> None:
        """Refuses keys that nobody asked for, and a value without a key when `subject` is False."""
        for key in self.fields:
            if key not in self._known:
                raise SpecError(f"{self.text!r}: {self.kind} has no {key}={nearest(key, self._known, of='It takes')}")
        if self.subject is not None and not subject:
            raise SpecError(f"{self.text!r}: {self.subject!r} has no key; write KEY={self.subject}")


def parse_spec(text: str, kinds: Iterable[str]) -> Spec:
    """Takes `kind:key=value,…` apart.

    Raises:
        SpecError: the kind is unknown, a key comes twice, or a part is no `key=value`.
    """
    kind, _, rest = text.strip().partition(":")
    known = list(kinds)
    if kind not in known:
        raise SpecError(f"{kind!r} in {text!r} is unknown{nearest(kind, known, of='Known are')}")
    spec = Spec(text, kind)
    for number, part in enumerate(rest.split(",") if rest else ()):
        key, equals, value = (piece.strip() for piece in part.partition("="))
        if not equals and number == 0 and key:
            spec.subject = key
        elif not (equals and key and value):
            raise SpecError(f"{part!r} in {text!r} is no KEY=VALUE; write `{kind}:key=value,key=value`")
        elif key in spec.fields:
            raise SpecError(f"{text!r} gives {key}= twice")
        else:
            spec.fields[key] = value
    return spec


def nearest(word: str, known: Iterable[str], *, of: str) -> str:
    """The end of a sentence about an unknown word: the likely one, and all known."""
    names = list(dict.fromkeys(known))
    close = difflib.get_close_matches(word, names, n=1)
    return (f"; did you mean {close[0]}?" if close else ".") + (f" {of}: {', '.join(names)}" if names else "")


def whole_number(text: str, least: int = 1) -> int:
    """A whole number of at least `least`.

    Raises:
        SpecError: it is none.
    """
    try:
        number = int(text)
    except ValueError:
        raise SpecError(f"{text!r} is no whole number") from None
    if number < least:
        raise SpecError(f"{number} is less than {least}")
    return number


def shares(text: str) -> Mapping[str, float]:
    """`priority:1/default:3` as shares that add up to 1; a name without a number weighs 1.

    Raises:
        SpecError: a weight is no number above 0, or a name comes twice.
    """
    weights: dict[str, float] = {}
    for part in text.split("/"):
        name, colon, number = part.strip().partition(":")
        try:
            weight = float(number) if colon else 1.0
        except ValueError:
            weight = math.nan
        if not name or not (weight > 0 and math.isfinite(weight)):
            raise SpecError(f"{part!r} is no NAME:WEIGHT with a weight above 0, as in priority:1/default:3")
        if name in weights:
            raise SpecError(f"{name} comes twice in {text!r}")
        weights[name] = weight
    total = sum(weights.values())
    return {name: weight / total for name, weight in weights.items()}
