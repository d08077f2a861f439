"""What a decision may know: the published routing table and the replicas as last seen.

Two kinds of knowledge with different freshness meet here:

    routing table   published by the control plane, whole, with an epoch; at most 2 s old
    snapshot        scraped from a replica; `observed_at_s` says when (about 0.25 s apart)
    own dispatches  counted by this worker at dispatch; exact

Everything is frozen. `Fleet` (fleet.py) replaces a `ReplicaView` when an event touches it, so a
decision reads references and a decision record can keep them without a copy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from serving.core.split import Split
from serving.core.values import value

ROUTING_TABLE_SCHEMA = 1
ANYWHERE = ("*",)
"""The grant of every region."""


class Task(StrEnum):
    """What a pool does with a prompt."""

    GENERATE = "generate"
    EMBED = "embed"


class Tier(StrEnum):
    """Priority of a request; drained in this order under pressure."""

    INTERACTIVE = "interactive"
    DEFAULT = "default"
    BATCH = "batch"


class ReplicaState(StrEnum):
    """Only `READY` takes new requests; `RESERVED` is held by a benchmark; `DRAINING` finishes what it has."""

    STARTING = "starting"
    READY = "ready"
    RESERVED = "reserved"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class ReplicaSnapshot:
    """One scrape of one replica. Totals count since the engine started."""

    replica_id: str
    observed_at_s: float
    num_running: int
    num_waiting: int
    kv_cache_usage_frac: float
    kv_cache_capacity_tokens: int | None = None
    num_prompt_tokens_total: int = 0
    num_output_tokens_total: int = 0
    num_preemptions_total: int = 0
    prefix_cache_queried_tokens_total: int = 0
    prefix_cache_hit_tokens_total: int = 0
    adapters: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Replica:
    """One engine process as the routing table names it."""

    replica_id: str
    url: str
    state: ReplicaState


@dataclass(frozen=True, slots=True)
class Pool:
    """Replicas of one model version on one hardware class under one engine configuration.

    `engine_fingerprint` and `hardware_fingerprint` are short digests; a cost row counts for this
    pool only when both are equal to the row's. `usd_per_hour` is for one replica, whatever its `num_devices`.
    `adapters` are those that each of its engines serves, by the names that they have there.
    """

    pool_id: str
    model: str
    version: str
    task: Task
    hardware_class: str
    usd_per_hour: float
    max_model_len: int
    engine_fingerprint: str
    hardware_fingerprint: str
    replicas: tuple[Replica, ...]
    role: str = "unified"
    zone: str = "local"
    region: str = "local"
    adapters: tuple[str, ...] = ()
    num_devices: int = 1


@dataclass(frozen=True, slots=True)
class Model:
    """A served name: its versions and the one that a request without a version gets.

    While a rollout runs, `split` says which that is, whatever the champion.
    """

    name: str
    task: Task
    champion: str | None
    versions: tuple[str, ...]
    tokens_per_byte: float = 0.5
    split: Split | None = None


@dataclass(frozen=True, slots=True)
class CostRow:
    """One measured cell of the cost table, as the router needs it (a subset of the table's columns).

    Prices are usd per million tokens. `num_prompt_tokens` and `num_output_tokens` are the cell's shape.
    `provenance` is `measured`, `predicted` or `published`. `num_requests` is the size of the sample, where known.
    """

    model: str
    version: str
    task: Task
    hardware_class: str
    engine_fingerprint: str
    hardware_fingerprint: str
    num_prompt_tokens: int
    num_output_tokens: int
    concurrency: int
    output_tokens_per_s_per_gpu: float | None
    prefill_tokens_per_s_per_gpu: float | None
    ttft_p50_s: float | None
    ttft_p99_s: float | None
    tpot_p50_s: float | None
    tpot_p99_s: float | None
    usd_per_million_input_tokens: float
    usd_per_million_cached_input_tokens: float | None
    usd_per_million_output_tokens: float
    provenance: str
    measured_at_s: float
    expires_at_s: float
    mlflow_run_id: str
    num_requests: int | None = None


@dataclass(frozen=True, slots=True)
class TierSlo:
    """What a tier is promised: seconds to the first token, more for each thousand prompt tokens, and a token after."""

    ttft_s: float
    tpot_s: float
    ttft_s_per_1k_tokens: float = 0.0

    def ttft_limit_s(self, num_prompt_tokens: int) -> float:
        """Of a prompt of that length."""
        return self.ttft_s + self.ttft_s_per_1k_tokens * num_prompt_tokens / 1000.0


@dataclass(frozen=True, slots=True)
class RoutingPolicy:
    """Settings of the router, published with the table so that every worker decides alike.

    `weights` names scorers of policies/scorers.py; an unknown name is an error when the table is taken up.
    `tier_weights` stand in for them where a tier has its own. A replica whose predicted time at `slo_quantile` takes
    more than `slo_margin` of what `slos` promise is chosen only when every candidate does. Prefix affinity yields on
    a replica that holds more than `max_imbalance` requests above the least loaded candidate.
    """

    weights: Mapping[str, float] = field(
        default_factory=lambda: {"kv_headroom": 1.0, "queued_tokens": 1.0, "in_flight": 1.0, "cost": 1.0}
    )
    num_samples: int = 2
    stale_after_s: float = 2.0
    queued_tokens_scale: float = 4096.0
    in_flight_scale: float = 16.0
    provenances: tuple[str, ...] = ("measured",)
    tier_weights: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    slos: Mapping[str, TierSlo] = field(default_factory=dict)
    slo_quantile: float = 0.99
    slo_margin: float = 1.0
    max_imbalance: int = 16

    def weights_of(self, tier: Tier) -> Mapping[str, float]:
        """What scorers weigh for a request of that tier."""
        return self.tier_weights.get(tier, self.weights)


@dataclass(frozen=True, slots=True)
class RoutingTable:
    """All that a worker needs to serve: it can start from a file copy of this alone."""

    epoch: int
    published_at_s: float
    models: tuple[Model, ...]
    pools: tuple[Pool, ...]
    cost_rows: tuple[CostRow, ...] = ()
    cost_table_run_id: str | None = None
    policy: RoutingPolicy = field(default_factory=RoutingPolicy)
    schema: int = ROUTING_TABLE_SCHEMA


@value
class RequestView:
    """What the router knows of a request. Token counts are estimates until the engine answers.

    `regions` are those that its tenant grants; `*` among them is every region. `target_replica` is the one replica that
    may serve it, where an admin has said so. `adapter` is the one to answer with, None for the model alone.
    """

    request_id: str
    model: str
    version: str | None
    task: Task
    num_prompt_tokens: int
    expected_output_tokens: int
    tier: Tier = Tier.DEFAULT
    regions: tuple[str, ...] = ANYWHERE
    target_replica: str | None = None
    adapter: str | None = None

    def may_run_in(self, region: str) -> bool:
        """Whether a pool of that region may serve it."""
        return "*" in self.regions or region in self.regions

    @property
    def num_tokens(self) -> int:
        """Tokens of KV cache that the request will hold at its end."""
        return self.num_prompt_tokens + self.expected_output_tokens


@value
class ReplicaView:
    """A replica as a decision sees it: the last scrape plus this worker's own dispatches.

    `num_in_flight` and `in_flight_tokens` are this worker's own and exact. `num_requests_since_scrape`
    and `num_tokens_since_scrape` are own dispatches minus own finishes since `observed_at_s`, and so
    may be negative. `queued_prompt_tokens` are of own requests without a first token. Preemptions of the last seconds
    fade.
    """

    replica_id: str
    url: str
    state: ReplicaState
    observed_at_s: float | None = None
    num_running: int = 0
    num_waiting: int = 0
    kv_cache_usage_frac: float = 0.0
    kv_cache_capacity_tokens: int | None = None
    num_in_flight: int = 0
    in_flight_tokens: int = 0
    num_requests_since_scrape: int = 0
    num_tokens_since_scrape: int = 0
    queued_prompt_tokens: int = 0
    num_recent_preemptions: float = 0.0
    adapters: tuple[str, ...] = ()

    @property
    def num_requests(self) -> int:
        """Requests on the replica now: as scraped, corrected by what this worker has done since."""
        if self.observed_at_s is None:
            return self.num_in_flight
        scraped = self.num_running + self.num_waiting + self.num_requests_since_scrape
        return max(scraped, self.num_in_flight, 0)


@dataclass(frozen=True, slots=True)
class PoolView:
    """A pool, its ready replicas as seen now, how many are not ready by state, and the rows that match it.

    In the live fleet `ready` is a list that events change in place; a record keeps a tuple of it.
    """

    pool: Pool
    ready: Sequence[ReplicaView]
    num_not_ready: Mapping[str, int] = field(default_factory=dict)
    cost_rows: tuple[CostRow, ...] = ()


@value
class Affinity:
    """A ready replica that likely holds some of the request's prompt: `view.pools[pool].ready[ready]`."""

    pool: int
    ready: int
    num_tokens: int


@value
class RouteView:
    """All that one routing decision may read. `policy` and `now_s` included, so that it replays alone.

    `affinities`: who holds the most of the prompt first.
    """

    now_s: float
    epoch: int
    policy: RoutingPolicy
    pools: tuple[PoolView, ...]
    cost_table_run_id: str | None = None
    affinities: tuple[Affinity, ...] = ()
