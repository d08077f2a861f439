"""One request under one policy: what its checks found, and what that does to it.

What a check redacts is replaced in the body, and the texts are looked at again: what a replacement brings to light
counts too. A find that cannot be replaced blocks. Messages name checks and fields, never a text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NoReturn

from serving.core.errors import ContentBlocked
from serving.core.policies.guardrails import Action
from serving.gateway.guardrails.off_loop import Found
from serving.gateway.guardrails.scanner import Reading, Scanner, redact
from serving.gateway.guardrails.texts import Texts

MAX_LOOKS = 3
"""What hides more of itself time and again was made to."""

Count = Callable[[str, str], None]
"""Counts a check and what came of it: `flag`, `redact`, `block`, or `failed_` and the cause."""


@dataclass(frozen=True, slots=True)
class Verdict:
    """The request may run. `flags` are the checks that found something, sorted; `redacted`: the body was changed."""

    flags: tuple[str, ...] = ()
    redacted: bool = False


PASSED = Verdict()


@dataclass(frozen=True, slots=True)
class Ready:
    """A policy made ready: the action of each check, what looks for them, which of them are off the loop."""

    actions: dict[str, Action]
    scanners: tuple[Scanner, ...]
    off_loop: tuple[str, ...]
    max_chars: int

    def passes_at_once(self, texts: Texts) -> bool:
        """Whether nothing is there to be found, as is so for almost every request. False leaves it to a `Screening`."""
        if texts.num_token_ids:
            return False
        text = "\n".join(texts.values)
        if len(text) > self.max_chars or not text.isascii():
            return False
        for scanner in self.scanners:  # noqa: SIM110 - a generator costs each request two calls more
            if scanner.has_candidates(text):
                return False
        return True

    @property
    def looked_for(self) -> list[str]:
        """The checks by patterns that are on."""
        names = {name for scanner in self.scanners for name in scanner.names}
        return [name for name, action in self.actions.items() if name in names and action is not Action.ALLOW]


class Screening:
    """A request's texts under a policy. Each method raises ContentBlocked, naming the check and the field."""

    def __init__(self, ready: Ready, texts: Texts, count: Count) -> None:
        self._ready = ready
        self._texts = texts
        self._count = count
        self._flags: set[str] = set()
        self._redacted = False
        self._finds: dict[int, list[tuple[int, int, str]]] = {}

    @property
    def verdict(self) -> Verdict:
        """What has come of it so far."""
        if not self._flags:
            return PASSED
        return Verdict(tuple(sorted(self._flags)), self._redacted)

    @property
    def texts(self) -> Sequence[str]:
        """The texts as they are now."""
        return self._texts.values

    def weigh(self) -> None:
        """The checks that need no look at the texts."""
        num_chars, limit = self._texts.num_chars, self._ready.max_chars
        if num_chars > limit:
            self._act("size", None, f"{num_chars} characters of text; there may be {limit}")
        if self._texts.num_token_ids:
            self._act("token_ids", None, "no check can read a prompt of token ids")

    def look(self, on_loop: bool) -> None:
        """The checks by patterns, again after what they redacted. Raises Laborious when it is `on_loop` and long."""
        for _ in range(MAX_LOOKS):
            reading = Reading(self._texts.values, on_loop=on_loop)
            hits = [hit for scanner in self._ready.scanners for hit in scanner.scan(reading, self._ready.actions)]
            for hit in hits:
                if hit.spans:
                    self._redact(hit.check, hit.index, hit.spans, hit.label)
                else:
                    self._act(hit.check, self._texts.fields[hit.index])
            if not self._finds:
                return
            self._rewrite()
        self._block(hits[0].check, self._texts.fields[hits[0].index], "what was redacted hid more of it")

    def take(self, check: str, finds: Sequence[Found], threshold: float) -> None:
        """What a check off the loop found; `end` applies what it redacts."""
        redacts = self._ready.actions[check] is Action.REDACT
        for found in finds:
            if found.score < threshold:
                continue
            if redacts:
                self._redact(check, found.index, found.spans, f"[{found.category.upper()}]")
            else:
                self._act(check, self._texts.fields[found.index], found.category)

    def end(self) -> Verdict:
        """Replaces what is still to be replaced."""
        if self._finds:
            self._rewrite()
        return self.verdict

    def _act(self, check: str, param: str | None, detail: str = "") -> None:
        action = self._ready.actions[check]
        if action is Action.BLOCK:
            self._block(check, param, detail)
        if action is not Action.ALLOW:
            self._flag(check, action)

    def _redact(self, check: str, index: int, spans: Sequence[tuple[int, int]], label: str) -> None:
        if not spans or not self._texts.can_rewrite(index):
            self._block(check, self._texts.fields[index], "it stands where nothing can be redacted")
        self._flag(check, Action.REDACT)
        self._finds.setdefault(index, []).extend((start, end, label) for start, end in spans)

    def _rewrite(self) -> None:
        values = list(self._texts.values)
        for index, finds in self._finds.items():
            values[index] = redact(values[index], finds)
        self._texts.rewrite(values)
        self._finds = {}
        self._redacted = True

    def _flag(self, check: str, action: Action) -> None:
        if check not in self._flags:
            self._flags.add(check)
            self._count(check, action.value)

    def _block(self, check: str, param: str | None, detail: str) -> NoReturn:
        self._count(check, Action.BLOCK.value)
        reason = f": {detail}" if detail else ""
        raise ContentBlocked(f"the content was blocked by the guardrail {check!r}{reason}", param=param)
