"""What speaks for a replica, each in [0, 1]: 1 is the best that there could be, None that nothing is known.

kv_headroom     room in the KV cache once this request is there: the resource that binds
queued_tokens   little work ahead, in tokens
in_flight       few requests
cost            little usd against the cheapest candidate, by the cost table
latency         a short time to the first token against the fastest candidate, by the cost table
prefix          how much of the prompt it likely holds; yields where it is much busier than the others
preemptions     no sequences thrown out of its batch lately
adapter         the request's adapter is loaded
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from serving.core.policies.quote import Quote
from serving.core.state import Pool, ReplicaView, RequestView, RoutingPolicy


@dataclass(slots=True)
class Field:
    """What the candidates of one decision have in common: the best figures among them."""

    cheapest_usd: float = math.inf
    fastest_s: float = math.inf
    fewest_requests: float = math.inf


@dataclass(slots=True)
class Seen:
    """A candidate with what the scorers share: its load, its quote, the prompt tokens that it holds.

    `num_tokens` are the request's own; `late` by how much the prediction misses the tier's SLO (1 is just kept).
    """

    replica: ReplicaView
    pool: Pool
    num_tokens: int
    stale: bool
    num_requests: int
    queued_tokens: float
    quote: Quote
    num_cached_tokens: int
    late: float = 0.0


Scorer = Callable[[RequestView, Seen, Field, RoutingPolicy], float | None]


def kv_headroom(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """Share of the KV cache still free once this request is there."""
    replica = seen.replica
    if seen.stale:
        return None
    free_frac = 1.0 - replica.kv_cache_usage_frac
    if not replica.kv_cache_capacity_tokens:
        return _clamp(free_frac)
    claimed = max(replica.num_tokens_since_scrape, 0) + seen.num_tokens
    return _clamp(free_frac - claimed / replica.kv_cache_capacity_tokens)


def queued_tokens(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """Work ahead of this request in tokens; one half at `queued_tokens_scale`."""
    return _clamp(policy.queued_tokens_scale / (policy.queued_tokens_scale + seen.queued_tokens))


def in_flight(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """Requests on the replica; one half at `in_flight_scale`."""
    return policy.in_flight_scale / (policy.in_flight_scale + seen.num_requests)


def cost_to_serve(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """The cheapest candidate's expected usd over this one's: 1 for the cheapest, one half for twice the price."""
    usd = seen.quote.usd
    if usd is None:
        return None
    return 1.0 if usd <= 0.0 else _clamp(field.cheapest_usd / usd)


def latency(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """The fastest candidate's expected TTFT over this one's."""
    ttft_s = seen.quote.ttft_s
    if ttft_s is None:
        return None
    return 1.0 if ttft_s <= 0.0 else _clamp(field.fastest_s / ttft_s)


def prefix(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """Share of the prompt that is likely there; nothing on a replica that is too busy for it."""
    if seen.num_cached_tokens <= 0 or seen.num_requests - field.fewest_requests > policy.max_imbalance:
        return 0.0
    return _clamp(seen.num_cached_tokens / max(request.num_prompt_tokens, 1))


def preemptions(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """1 without a recent preemption, one half with one."""
    return _clamp(1.0 / (1.0 + max(seen.replica.num_recent_preemptions, 0.0)))


def adapter(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> float | None:
    """Whether the request's adapter is loaded; None for a request without one."""
    return None if request.adapter is None else float(request.adapter in seen.replica.adapters)


SCORERS: Mapping[str, Scorer] = {
    "kv_headroom": kv_headroom,
    "queued_tokens": queued_tokens,
    "in_flight": in_flight,
    "cost": cost_to_serve,
    "latency": latency,
    "prefix": prefix,
    "preemptions": preemptions,
    "adapter": adapter,
}

COST_AWARE_WEIGHTS: Mapping[str, Mapping[str, float]] = {
    "interactive": {"latency": 1.0, "prefix": 0.2, "preemptions": 0.1, "adapter": 0.5},
    "default": {"latency": 0.7, "cost": 0.3, "prefix": 0.2, "preemptions": 0.1, "adapter": 0.5},
    "batch": {"latency": 0.1, "cost": 0.9, "prefix": 0.2, "preemptions": 0.1, "adapter": 0.5},
}
"""Weights by tier for a fleet with a cost table: interactive pays for latency, batch for price. What prices cannot tell
of a pool without rows is left to prefixes, preemptions and adapters."""


def check(policy: RoutingPolicy) -> None:
    """Refuses a policy that cannot decide.

    Raises:
        ValueError: an unknown scorer, a weight that is not a positive number, or a bad scale.
    """
    for weights in (policy.weights, *policy.tier_weights.values()):
        unknown = sorted(set(weights) - set(SCORERS))
        if unknown:
            raise ValueError(
                f"unknown scorer {unknown[0]!r} in routing weights; there are {', '.join(sorted(SCORERS))}"
            )
        if not weights or not all(0.0 <= w < math.inf for w in weights.values()):
            raise ValueError(f"routing weights must be finite and not negative, and at least one: {weights}")
        if not any(weights.values()):
            raise ValueError("routing weights are all zero: nothing would decide")
    if policy.num_samples < 1 or policy.queued_tokens_scale <= 0 or policy.in_flight_scale <= 0:
        raise ValueError("routing needs num_samples >= 1 and scales above zero")
    if not 0.5 <= policy.slo_quantile < 1.0 or not policy.slo_margin > 0.0:
        raise ValueError("routing needs a slo_quantile from 0.5 to below 1 and a slo_margin above zero")


def _clamp(value: float) -> float | None:
    """`value` within [0, 1]; None when it is NaN: a reading that is no number says nothing."""
    if 0.0 <= value <= 1.0:
        return value
    return None if math.isnan(value) else min(max(value, 0.0), 1.0)
