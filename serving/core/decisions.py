"""What policies return, and the record from which a decision can be made again.

A decision says what to do and why. A record keeps everything that the decision read (the request, the view, the
seed), so that a log replays in a fresh process from the file alone.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from serving.core.errors import ErrorCode
from serving.core.policies.cost import RowState
from serving.core.state import RequestView, RouteView
from serving.core.values import value

Interval = tuple[float | None, float | None]
"""A predicted median and the quantile that the policy names; None where nothing measured tells."""


@value
class Candidate:
    """A replica looked at, the requests on it, and its scores; None where a scorer had nothing to go by."""

    replica_id: str
    pool_id: str
    num_requests: int
    score: float
    scores: Mapping[str, float | None]
    usd: float | None
    cost_state: RowState
    ttft_s: Interval = (None, None)
    tpot_s: Interval = (None, None)


@value
class Route:
    """Send the request to this replica. `reason` names the scorer that set it apart from the runner-up."""

    replica_id: str
    pool_id: str
    url: str
    version: str
    usd: float | None
    cost_state: RowState
    reason: str
    candidates: tuple[Candidate, ...]
    num_filtered: Mapping[str, int] = field(default_factory=dict)
    kind: Literal["route"] = "route"


@dataclass(frozen=True, slots=True)
class Reject:
    """Do not send the request anywhere now."""

    code: ErrorCode
    reason: str
    retry_after_s: float
    num_filtered: Mapping[str, int] = field(default_factory=dict)
    kind: Literal["reject"] = "reject"


Decision = Route | Reject


@dataclass(frozen=True, slots=True)
class RouteRecord:
    """One routing decision with all that it rested on."""

    request: RequestView
    view: RouteView
    seed: int
    excluded: tuple[str, ...]
    decision: Route | Reject

    @classmethod
    def of(
        cls, request: RequestView, view: RouteView, seed: int, excluded: Collection[str], decision: Route | Reject
    ) -> RouteRecord:
        """Freezes a decision: the live view's lists change with the next event, the record's do not."""
        pools = tuple(replace(pool, ready=tuple(pool.ready)) for pool in view.pools)
        return cls(request, replace(view, pools=pools), seed, tuple(sorted(excluded)), decision)
