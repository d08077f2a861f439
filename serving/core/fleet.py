"""The fleet as one worker knows it, moved by events alone.

The live gateway and the simulator call the same events in the same order:

    on_table(table)                                 a newer routing table was taken up
    on_snapshot(snapshot)                           a replica was scraped
    on_dispatched(replica_id, request, now_s)       counted at dispatch, before the engine answers
    on_first_token(replica_id, request_id)          its prompt is computed
    on_finished(replica_id, request_id, now_s)      once for each dispatch, whatever the end

and ask `view(request, now_s)` for what a decision may read. Load of a replica = scraped at t + own dispatches
since t − own finishes since t. An event costs the same whatever the size of the fleet; only a table or a change
of a replica's state touches a whole pool.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

from serving.core import split
from serving.core.errors import BadRequest, NotFound
from serving.core.policies import cost, routing
from serving.core.policies.cost import RowState
from serving.core.prefix_index import Prefix, PrefixIndex
from serving.core.split import Place
from serving.core.state import (
    Affinity,
    Model,
    Pool,
    PoolView,
    Replica,
    ReplicaSnapshot,
    ReplicaState,
    ReplicaView,
    RequestView,
    RouteView,
    RoutingTable,
)

PREEMPTION_FADES_S = 10.0
"""After which a preemption counts a third of itself."""
MAX_RECENT_EVENTS = 4096
"""Events kept between two scrapes; without scrapes the view goes stale and own counts alone are used."""


@dataclass(slots=True)
class _Slot:
    """A replica's view, its place among the ready ones, and what this worker did to it lately."""

    view: ReplicaView
    pool_id: str
    ready_index: int | None = None
    num_preemptions_total: int = 0
    recent: deque[tuple[float, int, int]] = field(default_factory=lambda: deque(maxlen=MAX_RECENT_EVENTS))


@dataclass(slots=True)
class _OnItsWay:
    """What a dispatched request counts on its replica."""

    num_tokens: int
    queued_prompt_tokens: int


class Fleet:
    """Everything that routing decisions of one worker rest on."""

    def __init__(self) -> None:
        self.table: RoutingTable | None = None
        self._models: dict[str, Model] = {}
        self._pools: dict[str, PoolView] = {}
        self._by_version: dict[tuple[str, str], tuple[PoolView, ...]] = {}
        self._slots: dict[str, _Slot] = {}
        self._dispatched: dict[tuple[str, str], _OnItsWay] = {}
        self._prefixes = PrefixIndex()

    def on_table(self, table: RoutingTable) -> None:
        """Takes up a whole table; what is in flight and was scraped stays with its replica.

        Raises:
            ValueError: the table's policy cannot decide; the fleet is unchanged.
        """
        routing.check(table.policy)
        self.table = table
        self._models = {model.name: model for model in table.models}
        named = {replica.replica_id for pool in table.pools for replica in pool.replicas}
        for replica_id, slot in list(self._slots.items()):
            if replica_id not in named:
                slot.view, slot.ready_index = replace(slot.view, state=ReplicaState.DOWN), None
                self._forget_if_idle(replica_id)
        self._pools = {pool.pool_id: self._pool_view(pool, table) for pool in table.pools}
        by_version: dict[tuple[str, str], list[PoolView]] = {}
        for pool_view in self._pools.values():
            by_version.setdefault((pool_view.pool.model, pool_view.pool.version), []).append(pool_view)
        self._by_version = {key: tuple(pools) for key, pools in by_version.items()}

    def on_snapshot(self, snapshot: ReplicaSnapshot) -> None:
        """Takes up a scrape; older ones than the last, and those of unknown replicas, change nothing."""
        slot = self._slots.get(snapshot.replica_id)
        if slot is None or (slot.view.observed_at_s or 0.0) >= snapshot.observed_at_s:
            return
        while slot.recent and slot.recent[0][0] <= snapshot.observed_at_s:
            slot.recent.popleft()
        self._put(
            slot,
            replace(
                slot.view,
                observed_at_s=snapshot.observed_at_s,
                num_running=snapshot.num_running,
                num_waiting=snapshot.num_waiting,
                kv_cache_usage_frac=snapshot.kv_cache_usage_frac,
                kv_cache_capacity_tokens=snapshot.kv_cache_capacity_tokens,
                num_requests_since_scrape=sum(requests for _, requests, _ in slot.recent),
                num_tokens_since_scrape=sum(tokens for _, _, tokens in slot.recent),
                num_recent_preemptions=_preemptions(slot, snapshot),
                adapters=snapshot.adapters,
            ),
        )
        slot.num_preemptions_total = snapshot.num_preemptions_total

    def on_dispatched(self, replica_id: str, request: RequestView, now_s: float, prefix: Prefix | None = None) -> None:
        """Counts a request at dispatch; the replica is taken to hold its prompt's `prefix` from now on.

        Raises:
            KeyError: no such replica was ever in a table.
            ValueError: the request is already on that replica.
        """
        key = (replica_id, request.request_id)
        if key in self._dispatched:
            raise ValueError(f"request {request.request_id} is already dispatched to {replica_id}")
        slot = self._slots[replica_id]
        queued = request.num_prompt_tokens
        if prefix is not None:
            queued -= min(self._prefixes.num_tokens(replica_id, prefix), queued)
            self._prefixes.add(replica_id, prefix, slot.view.kv_cache_capacity_tokens)
        self._dispatched[key] = _OnItsWay(request.num_tokens, queued)
        self._count(slot, 1, request.num_tokens, queued, now_s)

    def on_first_token(self, replica_id: str, request_id: str) -> None:
        """The request's prompt is computed. Later ones of the same request, and of one that is gone, change nothing."""
        on_its_way = self._dispatched.get((replica_id, request_id))
        if on_its_way is None or not on_its_way.queued_prompt_tokens:
            return
        slot = self._slots[replica_id]
        queued = slot.view.queued_prompt_tokens - on_its_way.queued_prompt_tokens
        on_its_way.queued_prompt_tokens = 0
        self._put(slot, replace(slot.view, queued_prompt_tokens=queued))

    def on_finished(self, replica_id: str, request_id: str, now_s: float) -> None:
        """Takes a request off its replica: answered, failed, aborted or lost.

        Raises:
            KeyError: that request was not dispatched to that replica, or has already finished.
        """
        on_its_way = self._dispatched.pop((replica_id, request_id))
        slot = self._slots[replica_id]
        self._count(slot, -1, -on_its_way.num_tokens, -on_its_way.queued_prompt_tokens, now_s)
        if slot.ready_index is None:
            self._forget_if_idle(replica_id)

    def view(self, request: RequestView, now_s: float, prefix: Prefix | None = None) -> RouteView:
        """What a decision on `request`, whose prompt begins with `prefix`, may read.

        Raises:
            NotFound: no such model or version, or the model has no champion; the message names what there is.
            BadRequest: the model does another task.
        """
        pools, table = self.pools_of(request), self.table
        assert table is not None  # pools_of() found a model
        affinities = self._affinities(pools, prefix) if prefix is not None else ()
        return RouteView(now_s, table.epoch, table.policy, pools, table.cost_table_run_id, affinities)

    def pools_of(self, request: RequestView) -> tuple[PoolView, ...]:
        """The pools of the request's model and version. Raises as `view`."""
        model = self.model(request.model)
        if model.task != request.task:
            raise BadRequest(f"model {model.name!r} does {model.task}; it cannot {request.task}", param="model")
        version = request.version or model.champion
        if version is None:
            raise NotFound(
                f"model {model.name!r} has no champion version; ask for one of "
                f"{', '.join(f'{model.name}@{v}' for v in model.versions) or 'none'}",
                param="model",
            )
        pools = self._by_version.get((model.name, version))
        if not pools and version not in model.versions:
            raise NotFound(
                f"model {model.name!r} has no version {version!r}; there are {', '.join(model.versions) or 'none'}",
                param="model",
            )
        adapter = request.adapter
        if adapter is None:
            return pools or ()
        with_adapter = tuple(pool for pool in pools or () if adapter in pool.pool.adapters)
        if pools and not with_adapter:
            raise NotFound(f"model {model.name!r} has no adapter {adapter!r} in version {version!r}", param="model")
        return with_adapter

    def adapters_of(self, name: str, version: str | None) -> Sequence[str]:
        """Names of the adapters of a model's version; None is the version that most requests get that name none.

        Raises:
            NotFound: there is no such model.
        """
        model = self.model(name)
        if version is None:
            version = model.champion if model.split is None else model.split.stable
        pools = () if version is None else self._by_version.get((name, version), ())
        return sorted({adapter for pool in pools for adapter in pool.pool.adapters})

    def version_of(
        self, name: str, regions: Collection[str], place: Place | None, adapter: str | None = None
    ) -> str | None:
        """The version for a request that names none: by the model's split, else its champion; None without one.

        Args:
            name: of the model.
            regions: those that the tenant grants; `*` among them is every region.
            place: of the request's session in the split; None where the model has none.
            adapter: the one that is asked for: a version without it is as one without replicas.

        Raises:
            NotFound: there is no such model.
        """
        model = self.model(name)
        if model.split is None or place is None:
            return model.champion

        def is_ready(version: str) -> bool:
            pools = self._by_version.get((name, version), ())
            return any(
                pool.ready
                and ("*" in regions or pool.pool.region in regions)
                and (adapter is None or adapter in pool.pool.adapters)
                for pool in pools
            )

        return split.choose(model.split, place, is_ready)

    def model(self, name: str) -> Model:
        """The served model of that name.

        Raises:
            NotFound: there is none; the message names those that there are.
        """
        try:
            return self._models[name]
        except KeyError:
            names = ", ".join(sorted(self._models)) or "none"
            raise NotFound(f"no model {name!r}; there are: {names}", param="model") from None

    @property
    def models(self) -> Sequence[Model]:
        """All served models, by name."""
        return [self._models[name] for name in sorted(self._models)]

    @property
    def replicas(self) -> Sequence[ReplicaView]:
        """Every replica of the table, ready or not, and removed ones that still have requests."""
        return [slot.view for slot in self._slots.values()]

    def cost_states(self, now_s: float) -> dict[str, RowState]:
        """For each pool, whether its cost rows count now; for the metric."""
        if self.table is None:
            return {}
        rows, provenances = self.table.cost_rows, self.table.policy.provenances
        return {pool.pool_id: cost.state_of(rows, pool, provenances, now_s) for pool in self.table.pools}

    def _affinities(self, pools: Sequence[PoolView], prefix: Prefix) -> tuple[Affinity, ...]:
        """The ready replicas of the pools that likely hold some of the prompt, the most first."""
        places = {pool.pool.pool_id: number for number, pool in enumerate(pools)}
        found = []
        for holder in self._prefixes.holders(prefix):
            slot = self._slots.get(holder.replica_id)
            if slot is not None and slot.ready_index is not None and slot.pool_id in places:
                found.append(Affinity(places[slot.pool_id], slot.ready_index, holder.num_tokens))
        return tuple(found)

    def _pool_view(self, pool: Pool, table: RoutingTable) -> PoolView:
        ready: list[ReplicaView] = []
        not_ready: dict[str, int] = {}
        for replica in pool.replicas:
            slot = self._slot(replica, pool.pool_id)
            if replica.state is ReplicaState.READY:
                slot.ready_index = len(ready)
                ready.append(slot.view)
            else:
                slot.ready_index = None
                not_ready[replica.state.value] = not_ready.get(replica.state.value, 0) + 1
        rows = tuple(row for row in table.cost_rows if cost.matches(row, pool, table.policy.provenances))
        return PoolView(pool=pool, ready=ready, num_not_ready=not_ready, cost_rows=rows)

    def _slot(self, replica: Replica, pool_id: str) -> _Slot:
        slot = self._slots.get(replica.replica_id)
        if slot is None:
            slot = _Slot(ReplicaView(replica.replica_id, replica.url, replica.state), pool_id)
            self._slots[replica.replica_id] = slot
        elif slot.view.url != replica.url:
            # A restarted engine counts from zero again: its old scrape says nothing about it.
            fresh = ReplicaView(replica.replica_id, replica.url, replica.state)
            self._prefixes.forget(replica.replica_id)
            slot.view = replace(
                fresh,
                num_in_flight=slot.view.num_in_flight,
                in_flight_tokens=slot.view.in_flight_tokens,
                queued_prompt_tokens=slot.view.queued_prompt_tokens,
            )
        slot.view = replace(slot.view, state=replica.state)
        slot.pool_id = pool_id
        return slot

    def _count(self, slot: _Slot, requests: int, tokens: int, prompt_tokens: int, now_s: float) -> None:
        slot.recent.append((now_s, requests, tokens))
        view = slot.view
        # Twice a request: built in place, for `replace` takes three times as long.
        self._put(
            slot,
            ReplicaView(
                view.replica_id,
                view.url,
                view.state,
                view.observed_at_s,
                view.num_running,
                view.num_waiting,
                view.kv_cache_usage_frac,
                view.kv_cache_capacity_tokens,
                view.num_in_flight + requests,
                view.in_flight_tokens + tokens,
                view.num_requests_since_scrape + requests,
                view.num_tokens_since_scrape + tokens,
                view.queued_prompt_tokens + prompt_tokens,
                view.num_recent_preemptions,
                view.adapters,
            ),
        )

    def _put(self, slot: _Slot, view: ReplicaView) -> None:
        slot.view = view
        if slot.ready_index is not None:
            ready = self._pools[slot.pool_id].ready
            assert isinstance(ready, list)  # built by _pool_view
            ready[slot.ready_index] = view

    def _forget_if_idle(self, replica_id: str) -> None:
        slot = self._slots[replica_id]
        if slot.view.num_in_flight == 0 and slot.ready_index is None and self._is_gone(replica_id, slot.pool_id):
            del self._slots[replica_id]
            self._prefixes.forget(replica_id)

    def _is_gone(self, replica_id: str, pool_id: str) -> bool:
        if self.table is None:
            return True
        return all(replica_id != r.replica_id for p in self.table.pools if p.pool_id == pool_id for r in p.replicas)


def _preemptions(slot: _Slot, snapshot: ReplicaSnapshot) -> float:
    """Preemptions of late: those since the last scrape, and what is left of earlier ones."""
    before_s = slot.view.observed_at_s
    if before_s is None or snapshot.num_preemptions_total < slot.num_preemptions_total:
        return 0.0  # how long ago those of a first scrape were is not known; a restarted engine counts anew
    left = slot.view.num_recent_preemptions * math.exp((before_s - snapshot.observed_at_s) / PREEMPTION_FADES_S)
    return left + snapshot.num_preemptions_total - slot.num_preemptions_total
