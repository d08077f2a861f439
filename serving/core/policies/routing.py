"""Which replica serves a request: filters, then a sample, then scores.

    ready replicas of the model's pools      kept by events, see fleet.py
      └─ filters: pools in a region that the tenant grants; the one replica that the request names, if it does
           └─ candidates: a few at random in each pool (power of two choices, Mitzenmacher 2001), and up to two that
              likely hold the beginning of the prompt (prefix_index.py)
                └─ filters: those predicted to keep the tier's SLO, and with room in the KV cache, unless none is
                     └─ scorers in [0, 1] (scorers.py), weighted by the published policy, by tier where it says so
                          └─ the highest score; chance breaks ties

The sample is drawn pool by pool because price belongs to the pool and load to the replica: one draw over all
replicas would often not see the cheaper pool at all. A scorer that knows nothing (a stale scrape, a reading that is
no number, no cost row) returns None and is left out of that candidate's weighted mean: it neither helps nor hurts.
A pool without rows that count is not filtered by the SLO: it is routed by load.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from serving.core.chance import Chance
from serving.core.decisions import Candidate, Decision, Reject, Route, RouteRecord
from serving.core.errors import ErrorCode
from serving.core.policies import cost
from serving.core.policies.quote import ALL_EXPIRED, NOT_MEASURED, Quote, point_at, quote
from serving.core.policies.scorers import SCORERS, Field, Seen, check
from serving.core.state import Pool, PoolView, ReplicaView, RequestView, RouteView, RoutingPolicy, TierSlo

__all__ = ["SCORERS", "check", "replay", "route"]

RETRY_AFTER_NO_REPLICA_S = 5.0
MAX_AFFINITY_CANDIDATES = 2
NO_READY_REPLICA = "no_ready_replica"
REGION = "region"
"""Reason of a rejection that another grant of regions would have spared, and the name of that filter's count."""
TARGET = "target_replica"
"""Reason of a decision on a request that names its replica, and the name of that filter's count."""
SLO_MISSED = "slo_missed"
"""Reason of a choice when no candidate is predicted to keep the SLO, and the name of that filter's count."""
KV_FULL = "kv_full"
"""Name of the count of candidates without room for the request."""


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
    seen = _candidates(request, pools, view, chance, excluded)
    if not seen and target is not None:
        return Reject(ErrorCode.REPLICA_NOT_FOUND, TARGET, RETRY_AFTER_NO_REPLICA_S, num_filtered)
    if not seen:
        is_elsewhere = bool(num_filtered.get(REGION)) or len(pools) == 0 < len(view.pools)
        reason = REGION if is_elsewhere else NO_READY_REPLICA
        return Reject(ErrorCode.NO_REPLICA, reason, RETRY_AFTER_NO_REPLICA_S, num_filtered)
    fitting = _fitting(seen, num_filtered)
    candidates = _scored(request, fitting, view.policy)
    ranked = _ranked(candidates, chance)
    chosen, best = fitting[ranked[0]], candidates[ranked[0]]
    reason = _reason(candidates, ranked, view.policy.weights_of(request.tier))
    if target is not None:
        reason = TARGET
    elif num_filtered.get(SLO_MISSED) == len(seen):
        reason = SLO_MISSED
    return Route(
        best.replica_id,
        best.pool_id,
        chosen.replica.url,
        chosen.pool.version,
        best.usd,
        best.cost_state,
        reason,
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


def _candidates(
    request: RequestView, pools: Sequence[PoolView], view: RouteView, chance: Chance, excluded: Collection[str]
) -> list[Seen]:
    """Replicas that likely hold the prompt's beginning, and those that chance draws; each once."""
    cached = _cached(request, pools, view, excluded)
    seen: list[Seen] = []
    for pool in pools:
        sample = _sample(pool, view, chance, excluded)
        if cached:
            drawn = {replica.replica_id for replica in sample}
            mine = list(cached.items())[:MAX_AFFINITY_CANDIDATES]
            sample = [*sample, *(r for i, (r, p, _) in mine if p is pool.pool and i not in drawn)]
        _look(request, pool, sample, view, cached, seen)
    return seen


def _cached(
    request: RequestView, pools: Sequence[PoolView], view: RouteView, excluded: Collection[str]
) -> dict[str, tuple[ReplicaView, Pool, int]]:
    """Of each replica that likely holds some of the prompt: itself, its pool, the tokens; the most first."""
    if not view.affinities:
        return {}
    allowed, target = {id(pool.pool) for pool in pools}, request.target_replica
    found = {}
    for affinity in view.affinities:
        pool = view.pools[affinity.pool]
        replica = pool.ready[affinity.ready]
        if target is not None and replica.replica_id != target:
            continue
        if id(pool.pool) in allowed and replica.replica_id not in excluded:
            found[replica.replica_id] = replica, pool.pool, affinity.num_tokens
    return found


def _sample(pool: PoolView, view: RouteView, chance: Chance, excluded: Collection[str]) -> Sequence[ReplicaView]:
    ready = pool.ready
    if excluded:
        ready = [replica for replica in ready if replica.replica_id not in excluded]
    if len(ready) <= view.policy.num_samples:
        return ready
    return chance.sample(ready, view.policy.num_samples)


def _look(
    request: RequestView,
    pool: PoolView,
    sample: Sequence[ReplicaView],
    view: RouteView,
    cached: dict[str, tuple[ReplicaView, Pool, int]],
    seen: list[Seen],
) -> None:
    """Adds candidates of a pool to `seen`. What is the same for all of them is found once."""
    rows, num_tokens, policy = pool.cost_rows, request.num_tokens, view.policy
    curve = cost.curve_for(request, rows, view.now_s)
    slo = policy.slos.get(request.tier)
    for replica in sample:
        # Written so that a time that is NaN counts as stale.
        stale = replica.observed_at_s is None or not view.now_s - replica.observed_at_s <= policy.stale_after_s
        in_flight = replica.num_in_flight
        num_requests = replica.num_requests
        if stale or not math.isfinite(num_requests):
            num_requests = in_flight
        queued = float(replica.in_flight_tokens)
        if num_requests > in_flight:  # those of others, taken to be as long as our own
            queued += (num_requests - in_flight) * (queued / in_flight if in_flight else num_tokens)
        num_cached = cached[replica.replica_id][2] if replica.replica_id in cached else 0
        if curve is None:
            quoted = ALL_EXPIRED if rows else NOT_MEASURED
        else:
            quoted = quote(
                request,
                point_at(curve, num_requests + 1, policy.slo_quantile),
                queued_prompt_tokens=replica.queued_prompt_tokens,
                num_cached_tokens=num_cached,
                num_devices=pool.pool.num_devices,
            )
        late = 0.0 if slo is None else _late(request, quoted, slo) / policy.slo_margin
        seen.append(Seen(replica, pool.pool, num_tokens, stale, num_requests, queued, quoted, num_cached, late))


def _late(request: RequestView, quoted: Quote, slo: TierSlo) -> float:
    """The larger of predicted TTFT and TPOT over what is promised; 0 where nothing is predicted."""
    late = 0.0
    if quoted.ttft_high_s is not None:
        late = quoted.ttft_high_s / slo.ttft_limit_s(request.num_prompt_tokens)
    if quoted.tpot_high_s is not None:
        late = max(late, quoted.tpot_high_s / slo.tpot_s)
    return late


def _fitting(seen: list[Seen], num_filtered: dict[str, int]) -> list[Seen]:
    """Candidates that keep the SLO and have room; those least late, or all, where none does."""
    in_time = [one for one in seen if one.late <= 1.0]
    if len(in_time) < len(seen):
        num_filtered[SLO_MISSED] = len(seen) - len(in_time)
        if not in_time:
            least = min(one.late for one in seen)
            in_time = [one for one in seen if one.late == least]
    roomy = [one for one in in_time if not _is_full(one)]
    if len(roomy) < len(in_time):
        num_filtered[KV_FULL] = len(in_time) - len(roomy)
    return roomy or in_time


def _is_full(seen: Seen) -> bool:
    """Whether a fresh scrape, and what was sent since, leaves the request no room in the KV cache."""
    replica = seen.replica
    capacity = replica.kv_cache_capacity_tokens
    if seen.stale or not capacity:
        return False
    claimed = max(replica.num_tokens_since_scrape, 0) + seen.num_tokens - seen.num_cached_tokens
    return replica.kv_cache_usage_frac + claimed / capacity > 1.0


def _scored(request: RequestView, seen: list[Seen], policy: RoutingPolicy) -> list[Candidate]:
    field = Field()
    for one in seen:
        usd, ttft_s = one.quote.usd, one.quote.ttft_s
        if usd is not None and usd < field.cheapest_usd:
            field.cheapest_usd = usd
        if ttft_s is not None and ttft_s < field.fastest_s:
            field.fastest_s = ttft_s
        if one.num_requests < field.fewest_requests:
            field.fewest_requests = one.num_requests
    return [_score(request, one, field, policy) for one in seen]


def _score(request: RequestView, seen: Seen, field: Field, policy: RoutingPolicy) -> Candidate:
    scores: dict[str, float | None] = {}
    total = weighted = 0.0
    for name, weight in policy.weights_of(request.tier).items():
        scores[name] = score = SCORERS[name](request, seen, field, policy)
        if score is not None:
            total += weight
            weighted += weight * score
    score = weighted / total if total > 0.0 else 0.0
    quoted = seen.quote
    return Candidate(
        seen.replica.replica_id,
        seen.pool.pool_id,
        seen.num_requests,
        score,
        scores,
        quoted.usd,
        quoted.state,
        (quoted.ttft_s, quoted.ttft_high_s),
        (quoted.tpot_s, quoted.tpot_high_s),
    )


def _ranked(candidates: Sequence[Candidate], chance: Chance) -> Sequence[int]:
    """Places of the candidates, the best first; chance is asked only when scores are equal."""
    scores = [candidate.score for candidate in candidates]
    if len(scores) == 2 and scores[0] != scores[1]:
        return (0, 1) if scores[0] > scores[1] else (1, 0)
    keys = [(-score, chance.bits() if len(scores) > 1 else 0) for score in scores]
    return sorted(range(len(scores)), key=keys.__getitem__)


def _reason(candidates: Sequence[Candidate], ranked: Sequence[int], weights: Mapping[str, float]) -> str:
    """The scorer with the largest weighted lead over the runner-up."""
    if len(ranked) == 1:
        return "only_candidate"
    best, second = candidates[ranked[0]], candidates[ranked[1]]
    if best.score == second.score:
        return "tie"
    reason, largest = "unmeasured", -math.inf
    for name, mine in best.scores.items():
        other = second.scores[name]
        if mine is not None and other is not None and weights[name] * (mine - other) > largest:
            reason, largest = name, weights[name] * (mine - other)
    return reason
