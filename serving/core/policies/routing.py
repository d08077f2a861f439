"""Which replica serves a request: filters, then a sample, then scores.

    ready replicas of the model's pools      kept by events, see fleet.py
      └─ filters: pools in a region that the tenant grants; the one replica that the request names, if it does
           └─ sample: a few at random in each pool (power of two choices, Mitzenmacher 2001)
                └─ scorers in [0, 1], weighted by the published policy
                     └─ the highest score; chance breaks ties

The sample is drawn pool by pool because price belongs to the pool and load to the replica: one draw over all
replicas would often not see the cheaper pool at all. A scorer that knows nothing (a stale scrape, a reading that is
no number, no cost row) returns None and is left out of that candidate's weighted mean: it neither helps nor hurts.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from serving.core.chance import Chance
from serving.core.decisions import Candidate, Decision, Reject, Route, RouteRecord
from serving.core.errors import ErrorCode
from serving.core.policies import cost
from serving.core.state import Pool, PoolView, ReplicaView, RequestView, RouteView, RoutingPolicy

RETRY_AFTER_NO_REPLICA_S = 5.0
NO_READY_REPLICA = "no_ready_replica"
REGION = "region"
"""Reason of a rejection that another grant of regions would have spared, and the name of that filter's count."""
TARGET = "target_replica"
"""Reason of a decision on a request that names its replica, and the name of that filter's count."""


@dataclass(slots=True)
class Seen:
    """One sampled replica with what the scorers share: its load, its price, the cheapest price on offer.

    `num_tokens` are the request's own.
    """

    replica: ReplicaView
    pool: Pool
    num_tokens: int
    stale: bool
    num_requests: int
    queued_tokens: float
    cost: cost.CostEstimate
    cheapest_usd: float | None = None


Scorer = Callable[[RequestView, Seen, RoutingPolicy], float | None]


def kv_headroom(request: RequestView, seen: Seen, policy: RoutingPolicy) -> float | None:
    """Share of the KV cache still free once this request is there: the resource that binds."""
    replica = seen.replica
    if seen.stale:
        return None
    free_frac = 1.0 - replica.kv_cache_usage_frac
    if not replica.kv_cache_capacity_tokens:
        return _clamp(free_frac)
    claimed = max(replica.num_tokens_since_scrape, 0) + seen.num_tokens
    return _clamp(free_frac - claimed / replica.kv_cache_capacity_tokens)


def queued_tokens(request: RequestView, seen: Seen, policy: RoutingPolicy) -> float | None:
    """Work ahead of this request in tokens; one half at `queued_tokens_scale`."""
    return _clamp(policy.queued_tokens_scale / (policy.queued_tokens_scale + seen.queued_tokens))


def in_flight(request: RequestView, seen: Seen, policy: RoutingPolicy) -> float | None:
    """Requests on the replica; one half at `in_flight_scale`."""
    return policy.in_flight_scale / (policy.in_flight_scale + seen.num_requests)


def cost_to_serve(request: RequestView, seen: Seen, policy: RoutingPolicy) -> float | None:
    """The cheapest candidate's expected usd over this one's: 1 for the cheapest, one half for twice the price."""
    usd = seen.cost.usd
    if usd is None or seen.cheapest_usd is None:
        return None
    return 1.0 if usd <= 0.0 else _clamp(seen.cheapest_usd / usd)


SCORERS: Mapping[str, Scorer] = {
    "kv_headroom": kv_headroom,
    "queued_tokens": queued_tokens,
    "in_flight": in_flight,
    "cost": cost_to_serve,
}


def check(policy: RoutingPolicy) -> None:
    """Refuses a policy that cannot decide.

    Raises:
        ValueError: an unknown scorer, a weight that is not a positive number, or a bad scale.
    """
    unknown = sorted(set(policy.weights) - set(SCORERS))
    if unknown:
        raise ValueError(f"unknown scorer {unknown[0]!r} in routing weights; there are {', '.join(sorted(SCORERS))}")
    if not policy.weights or not all(0.0 <= w < float("inf") for w in policy.weights.values()):
        raise ValueError(f"routing weights must be finite and not negative, and at least one: {policy.weights}")
    if not any(policy.weights.values()):
        raise ValueError("routing weights are all zero: nothing would decide")
    if policy.num_samples < 1 or policy.queued_tokens_scale <= 0 or policy.in_flight_scale <= 0:
        raise ValueError("routing needs num_samples >= 1 and scales above zero")


def route(request: RequestView, view: RouteView, chance: Chance, excluded: Collection[str] = frozenset()) -> Decision:
    """Chooses a replica for `request`, or rejects when none takes requests.

    Args:
        request: the request, its tokens estimated.
        view: pools that serve the model version, with their ready replicas.
        chance: the decision's own stream of chance.
        excluded: replicas that already failed this request.
    """
    pools = _in_granted_regions(request, view.pools)
    num_filtered = _num_filtered(pools, excluded)
    if len(pools) < len(view.pools):
        num_filtered[REGION] = sum(len(p.ready) for p in view.pools if not request.may_run_in(p.pool.region))
    target = request.target_replica
    if target is not None:
        num_ready = sum(len(pool.ready) for pool in pools)
        pools = _with_target(target, pools)
        num_filtered[TARGET] = num_ready - sum(len(pool.ready) for pool in pools)
    seen: list[Seen] = []
    for pool in pools:
        _look(request, pool, _sample(pool, view, chance, excluded), view, seen)
    if not seen and target is not None:
        return Reject(ErrorCode.REPLICA_NOT_FOUND, TARGET, RETRY_AFTER_NO_REPLICA_S, num_filtered)
    if not seen:
        is_elsewhere = bool(num_filtered.get(REGION)) or len(pools) == 0 < len(view.pools)
        reason = REGION if is_elsewhere else NO_READY_REPLICA
        return Reject(ErrorCode.NO_REPLICA, reason, RETRY_AFTER_NO_REPLICA_S, num_filtered)
    prices = [s.cost.usd for s in seen if s.cost.usd is not None]
    cheapest = min(prices) if prices else None
    for one in seen:
        one.cheapest_usd = cheapest
    candidates = [_score(request, one, view.policy) for one in seen]
    ranked = _ranked(candidates, chance)
    chosen, best = seen[ranked[0]], candidates[ranked[0]]
    return Route(
        best.replica_id,
        best.pool_id,
        chosen.replica.url,
        chosen.pool.version,
        best.usd,
        best.cost_state,
        _reason(candidates, ranked, view.policy) if target is None else TARGET,
        tuple(candidates),
        num_filtered,
    )


def replay(record: RouteRecord) -> Decision:
    """Decides again from a record alone. Equal to `record.decision` unless the record or the policy changed."""
    return route(record.request, record.view, Chance(record.seed), frozenset(record.excluded))


def _in_granted_regions(request: RequestView, pools: tuple[PoolView, ...]) -> tuple[PoolView, ...]:
    if "*" in request.regions:
        return pools
    return tuple(pool for pool in pools if request.may_run_in(pool.pool.region))


def _with_target(target: str, pools: Sequence[PoolView]) -> tuple[PoolView, ...]:
    """The pools with no other ready replica than the target."""
    return tuple(replace(pool, ready=[r for r in pool.ready if r.replica_id == target]) for pool in pools)


def _num_filtered(pools: Sequence[PoolView], excluded: Collection[str]) -> dict[str, int]:
    counts: dict[str, int] = {}
    for pool in pools:
        for state, number in pool.num_not_ready.items():
            counts[state] = counts.get(state, 0) + number
    if excluded:
        counts["already_tried"] = len(excluded)
    return counts


def _sample(pool: PoolView, view: RouteView, chance: Chance, excluded: Collection[str]) -> Sequence[ReplicaView]:
    ready = pool.ready
    if excluded:
        ready = [replica for replica in ready if replica.replica_id not in excluded]
    if len(ready) <= view.policy.num_samples:
        return ready
    return chance.sample(ready, view.policy.num_samples)


def _look(
    request: RequestView, pool: PoolView, sample: Sequence[ReplicaView], view: RouteView, seen: list[Seen]
) -> None:
    """Adds a pool's sampled replicas to `seen`. What is the same for all of them is found once."""
    rows, num_tokens = pool.cost_rows, request.num_tokens
    curve = cost.curve_for(request, rows, view.now_s)
    for replica in sample:
        # Written so that a time that is NaN counts as stale.
        stale = replica.observed_at_s is None or not view.now_s - replica.observed_at_s <= view.policy.stale_after_s
        in_flight = replica.num_in_flight
        num_requests = replica.num_requests
        if stale or not math.isfinite(num_requests):
            num_requests = in_flight
        queued = float(replica.in_flight_tokens)
        if num_requests > in_flight:  # those of others, taken to be as long as our own
            queued += (num_requests - in_flight) * (queued / in_flight if in_flight else num_tokens)
        estimate = cost.estimate_on(curve, request, rows, num_requests)
        seen.append(Seen(replica, pool.pool, num_tokens, stale, num_requests, queued, estimate))


def _score(request: RequestView, seen: Seen, policy: RoutingPolicy) -> Candidate:
    scores: dict[str, float | None] = {}
    total = weighted = 0.0
    for name, weight in policy.weights.items():
        scores[name] = score = SCORERS[name](request, seen, policy)
        if score is not None:
            total += weight
            weighted += weight * score
    score = weighted / total if total > 0.0 else 0.0
    usd, state = seen.cost.usd, seen.cost.state
    return Candidate(seen.replica.replica_id, seen.pool.pool_id, seen.num_requests, score, scores, usd, state)


def _ranked(candidates: Sequence[Candidate], chance: Chance) -> Sequence[int]:
    """Places of the candidates, the best first; chance is asked only when scores are equal."""
    scores = [candidate.score for candidate in candidates]
    if len(scores) == 2 and scores[0] != scores[1]:
        return (0, 1) if scores[0] > scores[1] else (1, 0)
    keys = [(-score, chance.bits() if len(scores) > 1 else 0) for score in scores]
    return sorted(range(len(scores)), key=keys.__getitem__)


def _reason(candidates: Sequence[Candidate], ranked: Sequence[int], policy: RoutingPolicy) -> str:
    """The scorer with the largest weighted lead over the runner-up."""
    if len(ranked) == 1:
        return "only_candidate"
    best, second = candidates[ranked[0]], candidates[ranked[1]]
    if best.score == second.score:
        return "tie"
    reason, largest = "unmeasured", -math.inf
    for name, mine in best.scores.items():
        other = second.scores[name]
        if mine is not None and other is not None and policy.weights[name] * (mine - other) > largest:
            reason, largest = name, policy.weights[name] * (mine - other)
    return reason


def _clamp(value: float) -> float | None:
    """`value` within [0, 1]; None when it is NaN: a reading that is no number says nothing."""
    if 0.0 <= value <= 1.0:
        return value
    return None if math.isnan(value) else min(max(value, 0.0), 1.0)
