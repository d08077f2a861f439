"""What a canary's own traffic says of it: answers of the two versions, paired by session, tested as they come.

    observation    one request, one thumb or one mirrored request: figures alone, never text
    session        all that a session did counts as one value a signal, its mean: its requests speak for one another.
                   It closes after a fixed time or number of requests, which its scores cannot move
    pair           a closed session of the candidate and those of the stable version that closed since the last pair.
                   Each is used once, so that a pair's mean difference is 0 when the versions are alike
    signals        better is higher, in [0, 1]: see `SIGNALS`; a family of sequential tests (family.py)

The same observations in the same order give the same evidence: whoever takes over reads them again.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum

from serving.core.family import Family, Signal, SignalReport
from serving.core.policies.rollout import Signals

ERRORS, REFUSALS, LENGTH, FINISH = "errors", "refusals", "length", "finish_reason"
LATENCY, COST, AGAIN, THUMBS = "latency", "cost", "regenerated", "thumbs"
SIGNALS = (
    Signal(ERRORS, 0.02),
    Signal(REFUSALS, 0.02),
    Signal(LENGTH, 0.05, two_sided=True),
    Signal(FINISH, 0.05, two_sided=True),
    Signal(LATENCY, 0.05),
    Signal(COST, 0.05),
    Signal(AGAIN, 0.02),
    Signal(THUMBS, 0.05),
)

ANSWERS_CLOSE_S, AGAIN_CLOSE_S = 5.0, 120.0
MAX_SESSION_REQUESTS = 8
MAX_WAIT_S = 300.0
"""A session of the stable version that no candidate's came to meet is too old to stand for now."""
LONGEST_TOKENS = 4096.0
REFUSED = "content_filter"
WHOLE = ("stop", "tool_calls", "function_call")


class Kind(StrEnum):
    """Of an observation."""

    REQUEST = "request"
    THUMB = "thumb"
    SHADOW = "shadow"


@dataclass(frozen=True, slots=True)
class Observation:
    """One thing seen at a gateway while a rollout runs.

    Attributes:
        session: a digest of tenant and session.
        at_s: when it ended (Unix seconds).
        prompt: an HMAC of what was asked; equal ones are the same question.
        failed: the client got an error that was not its own fault.
        latency_s: to the first token of a stream, else to the end.
        thumb: True is up; of a thumb alone.
        pair: of a mirrored request alone: the session of the request that it mirrors.
    """

    kind: Kind
    version: str
    session: str
    at_s: float
    prompt: str = ""
    failed: bool = False
    finish_reason: str | None = None
    num_output_tokens: int = 0
    latency_s: float | None = None
    usd: float | None = None
    thumb: bool | None = None
    pair: str | None = None


@dataclass(slots=True)
class _Session:
    version: str
    opened_at_s: float
    num_requests: int = 0
    values: dict[str, list[float]] = field(default_factory=dict)


class _Pairing:
    """Sessions of both versions until they close, and the pairs that they make."""

    def __init__(self, stable: str, candidate: str, close_after_s: float, max_requests: float) -> None:
        self._close_after_s, self._max_requests = close_after_s, max_requests
        self._open: dict[str, _Session] = {}
        self._seen: set[str] = set()
        self._stable, self._candidate = stable, candidate
        self._closed: dict[str, deque[tuple[float, dict[str, float]]]] = {stable: deque(), candidate: deque()}

    def add(self, seen: Observation, values: Mapping[str, float]) -> None:
        """Adds to the session, which opens with its first observation; a closed one hears no more."""
        session = self._open.get(seen.session)
        if session is None:
            if seen.session in self._seen or seen.version not in self._closed:
                return
            self._seen.add(seen.session)
            session = self._open[seen.session] = _Session(seen.version, seen.at_s)
        if session.version != seen.version:  # the share grew: it came in in the middle, and belongs to neither
            return
        session.num_requests += 1
        for name, one in values.items():
            session.values.setdefault(name, []).append(one)
        if session.num_requests >= self._max_requests:
            self._close(seen.session, seen.at_s)

    def pairs(self, now_s: float) -> Iterable[dict[str, float]]:
        """Differences by signal of each new pair, after closing what is to close at `now_s`."""
        while self._open:
            oldest = next(iter(self._open))  # they opened in this order
            if now_s < self._open[oldest].opened_at_s + self._close_after_s:
                break
            self._close(oldest, now_s)
        stable, candidate = self._closed[self._stable], self._closed[self._candidate]
        while stable and stable[0][0] < now_s - MAX_WAIT_S:
            stable.popleft()
        while stable and candidate:
            size = max(1, len(stable) // len(candidate))
            _, mine = candidate.popleft()
            theirs = [stable.popleft()[1] for _ in range(size)]
            yield _difference(mine, theirs)

    def _close(self, name: str, now_s: float) -> None:
        session = self._open.pop(name)
        means = {signal: math.fsum(found) / len(found) for signal, found in session.values.items()}
        self._closed[session.version].append((now_s, means))


def _difference(mine: Mapping[str, float], theirs: list[dict[str, float]]) -> dict[str, float]:
    found = {}
    for name, value in mine.items():
        others = [other[name] for other in theirs if name in other]
        if others:
            found[name] = min(1.0, max(-1.0, value - math.fsum(others) / len(others)))
    return found


class CanaryTests:
    """All that was observed of one rollout, as evidence.

    Args:
        stable: the version that the candidate is compared with.
        candidate: the version on trial.
        alpha: chance of a false alarm over the whole rollout, by whatever signal.
    """

    def __init__(self, stable: str, candidate: str, alpha: float = 0.05) -> None:
        self._stable, self._candidate = stable, candidate
        self._family = Family(SIGNALS, alpha)
        self._answers = _Pairing(stable, candidate, ANSWERS_CLOSE_S, MAX_SESSION_REQUESTS)
        self._again = _Pairing(stable, candidate, AGAIN_CLOSE_S, math.inf)
        self._thumbs = _Pairing(stable, candidate, 0.0, 1)
        self._asked: dict[str, set[str]] = {}
        self._mirrored: dict[str, Observation] = {}
        self._scales: dict[str, float] = {}
        self._num_pairs = 0

    def add(self, seen: Observation) -> None:
        """Takes one observation, in the order in which they were kept."""
        if seen.kind is Kind.THUMB:
            self._thumbs.add(seen, {THUMBS: float(bool(seen.thumb))})
        elif seen.kind is Kind.SHADOW:
            self._add_mirrored(seen)
        else:
            self._answers.add(seen, self._values(seen))
            self._again.add(seen, {AGAIN: self._is_new(seen)})
        for values in self._answers.pairs(seen.at_s):
            self._num_pairs += 1
            self._test(values)
        for pairing in (self._again, self._thumbs):
            for values in pairing.pairs(seen.at_s):
                self._test(values)

    @property
    def signals(self) -> Signals:
        """What a rollout's decision reads."""
        return Signals(tuple(sorted(self._family.alarmed)), tuple(sorted(self._family.passed)), self._num_pairs)

    def report(self) -> dict[str, SignalReport]:
        """Each signal, for people."""
        return self._family.report()

    def _test(self, values: Mapping[str, float]) -> None:
        if values:
            self._family.add({name: [value] for name, value in values.items()})

    def _add_mirrored(self, seen: Observation) -> None:
        """The two ends of a mirrored request come one after the other, and are a pair of their own."""
        key = seen.pair or ""
        other = self._mirrored.pop(key, None)
        if other is None or other.version == seen.version:
            self._mirrored[key] = seen
            return
        mine, theirs = (seen, other) if seen.version == self._candidate else (other, seen)
        self._num_pairs += 1
        values = self._values(theirs)  # first, for it is the stable one that sets the scales
        self._test(_difference(self._values(mine), [values]))

    def _values(self, seen: Observation) -> dict[str, float]:
        values = {ERRORS: 0.0 if seen.failed else 1.0}
        if not seen.failed:
            values[REFUSALS] = 0.0 if seen.finish_reason == REFUSED else 1.0
            values[LENGTH] = min(1.0, math.log1p(max(0, seen.num_output_tokens)) / math.log1p(LONGEST_TOKENS))
            values[FINISH] = 1.0 if seen.finish_reason in WHOLE else 0.0
            self._scaled(values, LATENCY, seen, seen.latency_s)
            self._scaled(values, COST, seen, seen.usd)
        return values

    def _scaled(self, values: dict[str, float], name: str, seen: Observation, figure: float | None) -> None:
        """One half at the scale, which the first figure of the stable version sets for good."""
        if figure is None or not math.isfinite(figure) or figure < 0.0:
            return
        if name not in self._scales and seen.version == self._stable and figure > 0.0:
            self._scales[name] = figure
        scale = self._scales.get(name)
        if scale is not None:
            values[name] = scale / (scale + figure)

    def _is_new(self, seen: Observation) -> float:
        """0 when the session has asked just this before: its last answer was not what it wanted."""
        asked = self._asked.setdefault(seen.session, set())
        if not seen.prompt or seen.prompt not in asked:
            asked.add(seen.prompt)
            return 1.0
        return 0.0
