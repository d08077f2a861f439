"""Totals of usage events: who used how much of what, and what it cost, by day."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from datetime import UTC, datetime

from serving.metering.events import UsageEvent, Waste


@dataclass(slots=True)
class UsageTotals:
    """Sums over requests.

    Attributes:
        num_requests: events, but for the waste of first attempts and of mirrors, which are no requests of their own.
        num_prompt_tokens: cached ones included.
        usd: of the requests that have a price; `num_unpriced` have tokens and none.
        num_wasted_tokens: of all tokens, those of answers that no client got whole; `wasted_usd` likewise.
    """

    num_requests: int = 0
    num_replayed: int = 0
    num_failed: int = 0
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_output_tokens: int = 0
    usd: float = 0.0
    num_unpriced: int = 0
    num_wasted_tokens: int = 0
    wasted_usd: float = 0.0

    def add(self, event: UsageEvent) -> None:
        """Takes an event in."""
        if event.waste not in (Waste.RETRIED, Waste.SHADOW):
            self.num_requests += 1
            self.num_replayed += event.replayed
            self.num_failed += event.status >= 400 or event.waste is not None
        self.num_prompt_tokens += event.num_prompt_tokens
        self.num_cached_tokens += event.num_cached_tokens
        self.num_output_tokens += event.num_output_tokens
        if event.waste is not Waste.SHADOW:  # nobody asked for it, so that nobody pays
            self.usd += event.usd or 0.0
        self.num_unpriced += event.usd is None and event.num_tokens > 0
        if event.waste is not None:
            self.num_wasted_tokens += event.num_tokens
            self.wasted_usd += event.usd or 0.0


@dataclass(frozen=True, slots=True, order=True)
class UsageGroup:
    """Whose, of what, and when: `day` is the UTC day on which requests ended, as YYYY-MM-DD."""

    day: str
    tenant: str
    model: str

    @classmethod
    def of(cls, event: UsageEvent) -> UsageGroup:
        """The group that an event belongs to."""
        return cls(day_of(event.ended_at_s), event.tenant, event.model)


def day_of(at_s: float) -> str:
    """The UTC day of a Unix time."""
    return datetime.fromtimestamp(at_s, UTC).date().isoformat()


def totals(
    events: Iterable[UsageEvent],
    *,
    since_day: str | None = None,
    until_day: str | None = None,
    tenant: str | None = None,
    model: str | None = None,
) -> dict[UsageGroup, UsageTotals]:
    """Totals of the events that fit, by group in order; an id counts once.

    Args:
        events: in any order.
        since_day: the first day, inclusive.
        until_day: the last day, inclusive.
        tenant: only its requests.
        model: only requests to it.
    """
    found: dict[UsageGroup, UsageTotals] = {}
    seen: set[str] = set()
    for event in events:
        group = UsageGroup.of(event)
        if (tenant is not None and event.tenant != tenant) or (model is not None and event.model != model):
            continue
        if (since_day is not None and group.day < since_day) or (until_day is not None and group.day > until_day):
            continue
        if event.id in seen:
            continue
        seen.add(event.id)
        found.setdefault(group, UsageTotals()).add(event)
    return dict(sorted(found.items()))


def summed(parts: Iterable[UsageTotals]) -> UsageTotals:
    """All of them together."""
    total = UsageTotals()
    for part in parts:
        for field in fields(UsageTotals):
            setattr(total, field.name, getattr(total, field.name) + getattr(part, field.name))
    return total
