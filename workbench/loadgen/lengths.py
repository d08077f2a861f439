"""How long prompts and outputs are: fixed, uniform, lognormal, or drawn from what was recorded.

64                  always 64
16-256              any from 16 to 256, each as likely
lognormal/256/1.5   mean 256, standard deviation 1.5 times that; `lognormal/256/1.5/2048` never above 2048
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass
from typing import Protocol

from workbench.loadgen.specs import SpecError, whole_number


class Lengths(Protocol):
    """A distribution of whole numbers of tokens, all at least 1."""

    @property
    def mean(self) -> float:
        """The mean."""
        ...

    def draw(self, rng: random.Random) -> int:
        """One length."""
        ...


@dataclass(frozen=True, slots=True)
class Fixed:
    """Always the same."""

    num_tokens: int

    @property
    def mean(self) -> float:
        """The length."""
        return float(self.num_tokens)

    def draw(self, rng: random.Random) -> int:
        """The length."""
        return self.num_tokens


@dataclass(frozen=True, slots=True)
class Uniform:
    """Any from `shortest` to `longest`, each as likely."""

    shortest: int
    longest: int

    @property
    def mean(self) -> float:
        """The middle."""
        return (self.shortest + self.longest) / 2

    def draw(self, rng: random.Random) -> int:
        """One length."""
        return rng.randint(self.shortest, self.longest)


@dataclass(frozen=True, slots=True)
class LogNormal:
    """Many short and few very long, as people's texts are.

    `mean` and `cv` are of the distribution before it is rounded and cut: drawn again until it lies within 1 and
    `longest`, a cut near the mean makes the lengths shorter than `mean`.
    """

    mean: float
    cv: float
    longest: int | None = None

    def draw(self, rng: random.Random) -> int:
        """One length."""
        sigma = math.sqrt(math.log1p(self.cv**2))
        mu = math.log(self.mean) - sigma**2 / 2
        while True:
            length = max(1, round(rng.lognormvariate(mu, sigma)))
            if self.longest is None or length <= self.longest:
                return length


class Shapes(Protocol):
    """Draws prompt and output length of a request together: in real traffic they are not independent."""

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        ...


@dataclass(frozen=True, slots=True)
class Independent:
    """Prompt and output length, each by itself."""

    prompt: Lengths
    output: Lengths

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        return self.prompt.draw(rng), self.output.draw(rng)


@dataclass(frozen=True, slots=True)
class Empirical:
    """Pairs that were recorded, each as likely."""

    pairs: tuple[tuple[int, int], ...]

    def draw(self, rng: random.Random) -> tuple[int, int]:
        """Prompt and output tokens of one request."""
        return rng.choice(self.pairs)


def parse_lengths(text: str) -> Lengths:
    """`64`, `16-256`, `lognormal/MEAN/CV` or `lognormal/MEAN/CV/LONGEST`.

    Raises:
        SpecError: it is none of these.
    """
    if text.startswith("lognormal/"):
        return _log_normal(text)
    shortest, dash, longest = text.partition("-")
    if not dash:
        return Fixed(whole_number(text))
    if not (shortest.isdigit() and longest.isdigit()):
        raise SpecError(f"{text!r} is no length: write 64, 16-256 or lognormal/256/1.5")
    low, high = whole_number(shortest), whole_number(longest)
    if low > high:
        raise SpecError(f"{text!r} goes from the longer to the shorter; write {high}-{low}")
    return Uniform(low, high)


def _log_normal(text: str) -> LogNormal:
    parts = text.split("/")[1:]
    try:
        mean, cv = float(parts[0]), float(parts[1])
        longest = whole_number(parts[2]) if len(parts) > 2 else None
        if len(parts) > 3 or not (1 <= mean < math.inf and 0 < cv < math.inf):
            raise ValueError
    except (ValueError, IndexError):
        raise SpecError(f"{text!r} is none: write lognormal/MEAN/CV or lognormal/MEAN/CV/LONGEST, MEAN ≥ 1") from None
    if longest is not None and longest < mean:
        raise SpecError(f"{text!r}: the longest, {longest}, lies below the mean")
    return LogNormal(mean, cv, longest)
