"""What the routing table says, from what the control plane has seen. Pure: no clock, no I/O.

Each part of the table follows the one who knows it, and keeps the last known word while that one is silent:

    pools, replica states   the store, where supervisors report; kept while the store does not answer
    champions, versions     the model registry; kept while MLflow does not answer
    splits                  running rollouts, by the store; kept while it does not answer
    cost rows               the newest published cost table, expired rows included: the router judges
                            expiry at the moment of each decision
    policy                  the control plane's settings

A dead source must never empty the table: the data plane serves from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from serving.core.split import Split
from serving.core.state import CostRow, Model, Pool, Replica, ReplicaState, RoutingPolicy, RoutingTable
from serving.store.cost_table import PublishedCostTable
from serving.store.replicas import ReplicaReport


@dataclass(frozen=True, slots=True)
class Registered:
    """Champion and all versions of each registered model.

    `claims` are the tags, by model and version, that releases are judged by, as the registry has them. `registry` tells
    one registry from any other, also from one that began anew at the same address; empty where it does not say.
    """

    champions: Mapping[str, str]
    versions: Mapping[str, tuple[str, ...]]
    claims: Mapping[str, Mapping[str, Mapping[str, str]]] = field(default_factory=dict)
    registry: str = ""


@dataclass(frozen=True, slots=True)
class FleetSeen:
    """One reading of the store: declared pools, their supervisors' reports, replicas held by benchmarks.

    `settled_since_s` is when the store last came back; reports can't be older than supervisors had a
    chance to renew, so ages count from there. Zero when it was never away.
    """

    pools: tuple[Pool, ...]
    reports: tuple[ReplicaReport, ...]
    reserved: frozenset[str] = frozenset()
    settled_since_s: float = 0.0


@dataclass(frozen=True, slots=True)
class Observed:
    """All that one table is composed from. None means: this source does not answer, or never spoke.

    `splits` are those of running rollouts, by model.
    """

    now_s: float
    fleet: FleetSeen | None
    registered: Registered | None
    cost: PublishedCostTable | None
    policy: RoutingPolicy
    tokens_per_byte: Mapping[str, float] = field(default_factory=dict)
    report_max_age_s: float = 5.0
    splits: Mapping[str, Split] | None = field(default_factory=dict)


def compose(observed: Observed, previous: RoutingTable | None) -> RoutingTable | None:
    """The table that follows `previous`, with the next epoch; None when nothing changed or nothing is known.

    Args:
        observed: what the sources say now.
        previous: the newest table published anywhere, or None.
    """
    if previous is None and observed.fleet is None:
        return None
    pools = _pools(observed, previous)
    run_id, cost_rows = _cost_rows(observed, previous, {pool.model for pool in pools})
    table = RoutingTable(
        epoch=previous.epoch + 1 if previous else 1,
        published_at_s=observed.now_s,
        models=_models(observed, previous, pools),
        pools=pools,
        cost_rows=cost_rows,
        cost_table_run_id=run_id,
        policy=observed.policy,
    )
    return None if previous is not None and same_content(table, previous) else table


def same_content(one: RoutingTable, other: RoutingTable) -> bool:
    """Whether two tables say the same, whenever they were published."""
    return replace(one, epoch=other.epoch, published_at_s=other.published_at_s) == other


def sole_versions(pools: Iterable[Pool]) -> Registered:
    """What stands in for a registry where none is configured: a model's only version is its champion."""
    versions: dict[str, tuple[str, ...]] = {}
    for pool in pools:
        versions[pool.model] = tuple(sorted({*versions.get(pool.model, ()), pool.version}))
    return Registered({model: served[0] for model, served in versions.items() if len(served) == 1}, versions)


def _pools(observed: Observed, previous: RoutingTable | None) -> tuple[Pool, ...]:
    before = {pool.pool_id: pool for pool in previous.pools} if previous else {}
    if observed.fleet is None:
        return tuple(before.values())
    # A store that is just back may be empty: until supervisors had the time to report again, what they
    # have not yet said stands as it was.
    kept = before if observed.now_s - observed.fleet.settled_since_s < observed.report_max_age_s else {}
    pools = dict(kept)
    for pool in observed.fleet.pools:
        replicas = (
            {replica.replica_id: replica for replica in kept[pool.pool_id].replicas} if pool.pool_id in kept else {}
        )
        replicas |= _reported(pool, observed, observed.fleet)
        pools[pool.pool_id] = replace(pool, replicas=tuple(replicas[name] for name in sorted(replicas)))
    return tuple(pools[pool_id] for pool_id in sorted(pools))


def _reported(pool: Pool, observed: Observed, fleet: FleetSeen) -> dict[str, Replica]:
    return {
        report.replica.replica_id: replace(report.replica, state=_state(report, observed, fleet))
        for report in fleet.reports
        if report.pool_id == pool.pool_id
    }


def _state(report: ReplicaReport, observed: Observed, fleet: FleetSeen) -> ReplicaState:
    age_s = observed.now_s - max(report.updated_at_s, fleet.settled_since_s)
    if age_s > observed.report_max_age_s:
        return ReplicaState.DOWN
    if report.replica.state is ReplicaState.READY and report.replica.replica_id in fleet.reserved:
        return ReplicaState.RESERVED
    return report.replica.state


def _models(observed: Observed, previous: RoutingTable | None, pools: tuple[Pool, ...]) -> tuple[Model, ...]:
    known = {model.name: model for model in previous.models} if previous else {}
    tasks = {pool.model: pool.task for pool in pools}
    models = []
    for name in sorted(tasks):
        served = {pool.version for pool in pools if pool.model == name}
        if observed.registered is not None:
            champion = observed.registered.champions.get(name)
            registered = observed.registered.versions.get(name, ())
        else:
            champion = known[name].champion if name in known else None
            registered = known[name].versions if name in known else ()
        versions = tuple(sorted(served.union(registered), key=_version_order))
        if observed.splits is not None:
            split = observed.splits.get(name)
        else:
            split = known[name].split if name in known else None
        model = Model(name=name, task=tasks[name], champion=champion, versions=versions, split=split)
        if name in observed.tokens_per_byte:
            model = replace(model, tokens_per_byte=observed.tokens_per_byte[name])
        models.append(model)
    return tuple(models)


def _version_order(version: str) -> tuple[int, str]:
    return (int(version) if version.isdecimal() else 0, version)


def _cost_rows(
    observed: Observed, previous: RoutingTable | None, models: set[str]
) -> tuple[str | None, tuple[CostRow, ...]]:
    run_id: str | None = None
    rows: tuple[CostRow, ...] = ()
    if observed.cost is not None:
        run_id, rows = observed.cost.run_id, observed.cost.rows
    elif previous is not None:
        run_id, rows = previous.cost_table_run_id, previous.cost_rows
    return run_id, tuple(row for row in rows if row.model in models)
