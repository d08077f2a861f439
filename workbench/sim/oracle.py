"""The split that knows everything: how much of each tier each class can take, and the highest rate that this carries.

fluid rates   of each class and tier: the largest batch whose steps, prompts included, keep the tier's TPOT
split         a linear programme: the most requests a second, tiers by their shares, replicas not more than there are
places        each class's replicas go to its tiers in proportion, the most demanding tier first
capacity      the highest rate at which the simulated fleet, so split, keeps 99 % of requests within their SLO
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import numpy as np
from scipy.optimize import linprog

from serving.core.state import ReplicaSnapshot, Tier
from workbench.sim.fleet import FleetSpec
from workbench.sim.kernel import Kernel
from workbench.sim.serving_fleet import Outcome, ServingFleet, SimReplica
from workbench.sim.step_time import StepTime
from workbench.sim.workload import SimRequest, Workload

GOOD_FRAC = 0.99
UTILIZATIONS = (0.5, 0.6, 0.7, 0.8)
"""Shares of a tier's TPOT that a step may take on average; the best of them is kept."""
KV_FRAC = 0.9


@dataclass(frozen=True, slots=True)
class Shape:
    """Mean tokens of a model's requests."""

    num_prompt_tokens: float
    num_output_tokens: float

    @classmethod
    def of(cls, requests: Sequence[SimRequest]) -> Shape:
        """Of these requests."""
        return cls(fmean(r.num_prompt_tokens for r in requests), fmean(r.num_output_tokens for r in requests))


def fluid_rate_rps(step: StepTime, shape: Shape, tpot_s: float, max_num_seqs: int) -> float:
    """Requests a second of one replica whose mean time a token, prompts of others included, is at most `tpot_s`."""
    context = shape.num_prompt_tokens + shape.num_output_tokens / 2.0
    places = min(max_num_seqs, int(step.kv_capacity_tokens * KV_FRAC / context))
    best = 0.0
    for num_seqs in range(1, places + 1):
        # Each sequence brings one prompt in its life, so that much of a prompt falls on each of its tokens.
        prompts = num_seqs * shape.num_prompt_tokens / shape.num_output_tokens
        token_s = step.step_s(num_seqs, int(num_seqs * context), 0, 0.0, 0) + prompts * step.per_token_s
        if token_s > tpot_s:
            break
        best = num_seqs / (shape.num_output_tokens * token_s)
    return best


def split_of(spec: FleetSpec, model: str, shape: Shape, utilization: float) -> dict[Tier, dict[str, float]]:
    """Replicas of each class that each tier of a model gets; empty where no class can serve a tier."""
    tiers, pools = list(spec.tiers), spec.pools[model]
    rates = np.array(
        [
            [
                fluid_rate_rps(
                    StepTime.of(spec, model, pool.class_name, pool.tp),
                    shape,
                    utilization * spec.tiers[tier].tpot_p99_s,
                    spec.engine.max_num_seqs,
                )
                for pool in pools
            ]
            for tier in tiers
        ]
    )
    num_tiers, num_pools = rates.shape
    # Unknowns: replicas of each pool for each tier, then the whole rate, which is to be as high as can be.
    objective = np.append(np.zeros(num_tiers * num_pools), -1.0)
    served = np.zeros((num_tiers, objective.size))
    for row, tier in enumerate(tiers):
        served[row, row * num_pools : (row + 1) * num_pools] = rates[row]
        served[row, -1] = -spec.tiers[tier].share
    there = np.zeros((num_pools, objective.size))
    for column in range(num_pools):
        there[column, column:-1:num_pools] = 1.0
    found = linprog(
        objective, A_ub=there, b_ub=[p.replicas for p in pools], A_eq=served, b_eq=np.zeros(num_tiers), method="highs"
    )
    if not found.success or found.x[-1] <= 0.0:
        return {}
    places = found.x[:-1].reshape(num_tiers, num_pools)
    return {
        tier: {p.class_name: float(n) for p, n in zip(pools, row, strict=True)}
        for tier, row in zip(tiers, places, strict=True)
    }


class SplitRouter:
    """Each tier on its places, by the tokens that are truly left on them; it reads what no router can know."""

    def __init__(self, fleet: ServingFleet, splits: dict[str, dict[Tier, dict[str, float]]]) -> None:
        self._places = {
            (model, tier): places
            for model, split in splits.items()
            for tier, places in _places(fleet, model, split).items()
        }
        self._left_tokens = dict.fromkeys(fleet.replicas, 0.0)

    def choose(self, request: SimRequest, now_s: float) -> str | None:
        """The place with the least work for its share."""
        left = self._left_tokens
        places = self._places[request.model, request.tier]
        return min(places, key=lambda place: (left[place[0]] + _tokens(request)) / place[1])[0]

    def on_dispatched(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """More work there."""
        self._left_tokens[replica_id] += _tokens(request)

    def on_first_token(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """It needs none."""

    def on_finished(self, replica_id: str, request: SimRequest, now_s: float) -> None:
        """Less."""
        self._left_tokens[replica_id] -= _tokens(request)

    def on_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """It needs none."""


def _tokens(request: SimRequest) -> float:
    return request.num_output_tokens + request.num_prompt_tokens / 10.0


def _places(
    fleet: ServingFleet, model: str, split: dict[Tier, dict[str, float]]
) -> dict[Tier, list[tuple[str, float]]]:
    """For each tier its replicas and the share of each: along a class's replicas, one tier after the other."""
    by_class: dict[str, list[SimReplica]] = {}
    for replica in fleet.replicas_of(model):
        by_class.setdefault(replica.class_name, []).append(replica)
    begun = dict.fromkeys(by_class, 0.0)
    places: dict[Tier, list[tuple[str, float]]] = {}
    for tier, classes in split.items():
        places[tier] = []
        for class_name, number in classes.items():
            begin, end = begun[class_name], begun[class_name] + number
            begun[class_name] = end
            for index, replica in enumerate(by_class[class_name]):
                share = min(end, index + 1) - max(begin, index)
                if share > 0.02:
                    places[tier].append((replica.replica_id, share))
    return places


def good_frac(outcome: Outcome) -> float:
    """Share of all requests, shed ones included, that met their SLO."""
    return sum(result.good for result in outcome.results) / (len(outcome.results) + outcome.num_shed)


def serve_split(spec: FleetSpec, workload: Workload, utilization: float) -> Outcome:
    """The workload under the split for that utilization."""
    fleet = ServingFleet(spec, workload, Kernel())
    by_model: dict[str, list[SimRequest]] = {model: [] for model in spec.pools}
    for request in workload.requests:
        by_model[request.model].append(request)
    splits = {m: split_of(spec, m, Shape.of(requests), utilization) for m, requests in by_model.items() if requests}
    return fleet.serve(SplitRouter(fleet, splits), scraped=False)
