"""A sweep on the running stack: finds a replica of the model, holds it, measures it, brings it to MLflow.

routing table → a ready replica of the model's version → what the stack wrote down of its pool
    → reserved through the store → run_sweep → results folder and MLflow
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, aclosing, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import redis.asyncio

from serving.clock import SystemClock
from serving.core.errors import NotFound, Unavailable
from serving.core.state import Pool, Replica, ReplicaState, RoutingTable
from serving.store.connection import connect
from serving.store.routing_table import StoreRoutingTable
from workbench import loadgen
from workbench.config import WorkbenchConfig
from workbench.stack.state import PoolFacts, StackState
from workbench.sweeps.cells import MeasuredReplica, Shape
from workbench.sweeps.holds import StoreHold, owner_here
from workbench.sweeps.limits import SweepLimits
from workbench.sweeps.plan import SweepPlan
from workbench.sweeps.preview import SweepPreview, preview
from workbench.sweeps.run import OnProgress, SweepMode, SweepResult, SweepTracker, full_plan, run_sweep, short_plan
from workbench.wiring import NotRunning, layout, running_stack

HUB = "hf:"
KEEP_CELLS_S = 15 * 86400.0
"""Half the time for which a cost row counts: a table built from kept cells is still good for as long again."""


@dataclass(frozen=True, slots=True)
class SweepRequest:
    """What to measure; None takes the mode's own.

    Attributes:
        model: a served name, `name@version` for another version than the champion.
        shapes: tokens of a request.
        concurrencies: of the closed loops.
        replica_id: which replica of the model; any ready one when None.
        max_age_s: finished cells older than this are measured again, 0 measures all; `KEEP_CELLS_S` when None.
        max_s, max_usd: what this run may take at most; the rest waits for the next.
        stops_at_saturation: skip higher concurrencies once more users bring no tokens and the SLO is broken.
        client_processes: that share each cell's load; what it takes when None.
    """

    model: str
    mode: SweepMode = SweepMode.SHORT
    shapes: tuple[Shape, ...] | None = None
    concurrencies: tuple[int, ...] | None = None
    replica_id: str | None = None
    max_age_s: float | None = None
    max_s: float | None = None
    max_usd: float | None = None
    stops_at_saturation: bool = True
    client_processes: int | None = None


async def sweep_on_stack(
    config: WorkbenchConfig, request: SweepRequest, *, tracker: SweepTracker | None, on_progress: OnProgress
) -> SweepResult:
    """Sweeps one replica of the running stack, which serves nobody else meanwhile, and makes a page of it.

    Raises:
        NotRunning: no stack runs from this configuration.
        NotFound: no such model, version or replica.
        Unavailable: no replica of it is ready, or nothing on disk says what it is.
        ReplicaReserved, NotHeld, ReplicaBusy, ReplicaLost, ResultsNotWritten, ResultsBroken: as `run_sweep`.
        WorkloadError: the model's tokenizer cannot make prompts of exact length.
    """
    async with _found(config, request) as found:
        owner = owner_here(f"sweep of {request.model}")
        swept = await run_sweep(
            plan_of(config, request, found.pool),
            found.replica,
            vocabulary=loadgen.Vocabulary.load(found.tokenizer),
            results_dir=layout(config).results_dir,
            tracker=tracker,
            hold=StoreHold(found.store, found.tables, found.replica, owner=owner, clock=SystemClock()),
            max_age_s=_max_age_s(request),
            limits=limits_of(config, request, found.pool),
            client_processes=request.client_processes,
            on_progress=on_progress,
        )
    page, trouble = await asyncio.to_thread(_publish, swept, config, tracker)
    return replace(swept, page=page, page_error=trouble)


def _publish(
    swept: SweepResult, config: WorkbenchConfig, tracker: SweepTracker | None
) -> tuple[Path | None, str | None]:
    # Figures take a second to import: after measuring, and where nobody waits for it.
    from workbench.pages.publish import publish_sweep

    return publish_sweep(swept, config, tracker)


async def preview_on_stack(config: WorkbenchConfig, request: SweepRequest) -> SweepPreview:
    """What `sweep_on_stack` would measure now, and what that takes; nothing is reserved or sent.

    Raises:
        NotRunning, NotFound, Unavailable, ResultsBroken: as `sweep_on_stack`.
    """
    async with _found(config, request) as found:
        return preview(
            request.model,
            plan_of(config, request, found.pool),
            found.replica,
            layout(config).results_dir,
            limits_of(config, request, found.pool),
            max_age_s=_max_age_s(request),
            now_s=SystemClock().now_s(),
        )


@dataclass(frozen=True, slots=True)
class FoundReplica:
    """A replica to measure, and the connection by which it is held."""

    pool: Pool
    replica: MeasuredReplica
    tokenizer: Path
    store: redis.asyncio.Redis
    tables: StoreRoutingTable


@asynccontextmanager
async def found_replica(config: WorkbenchConfig, model: str, replica_id: str | None) -> AsyncIterator[FoundReplica]:
    """A replica of the running stack, as `choose_replica` chooses; not held yet.

    Raises:
        NotRunning, NotFound, Unavailable: as `sweep_on_stack`.
    """
    state = running_stack(config)
    if state is None:
        raise NotRunning("a sweep measures a replica of the running stack: start it with `workbench up`")
    async with aclosing(connect(state.urls["store"])) as store:
        tables = StoreRoutingTable(store)
        table = await tables.read()
        if table is None:
            raise Unavailable("no routing table is published yet: `workbench status` shows what the stack waits for")
        pool, chosen = choose_replica(table, model, replica_id)
        measured, weights_path = describe(config, state, pool, chosen)
        yield FoundReplica(pool, measured, weights_path, store, tables)


def _found(config: WorkbenchConfig, request: SweepRequest) -> AbstractAsyncContextManager[FoundReplica]:
    return found_replica(config, request.model, request.replica_id)


def _max_age_s(request: SweepRequest) -> float:
    return KEEP_CELLS_S if request.max_age_s is None else request.max_age_s


def limits_of(config: WorkbenchConfig, request: SweepRequest, pool: Pool) -> SweepLimits:
    """Bounds of the request, with the price and the SLO of the pool's hardware class."""
    return SweepLimits(
        max_s=request.max_s,
        max_usd=request.max_usd,
        usd_per_s=config.hardware[pool.hardware_class].usd_per_hour * config.pool(pool.pool_id).num_units / 3600,
        served_within_frac=config.slo.of(pool.hardware_class).served_within_frac,
        stops_at_saturation=request.stops_at_saturation,
    )


def plan_of(config: WorkbenchConfig, request: SweepRequest, pool: Pool) -> SweepPlan:
    """The mode's plan with the SLO of the pool's hardware class and what the request overrides."""
    slo = config.slo.of(pool.hardware_class)
    make = short_plan if request.mode is SweepMode.SHORT else full_plan
    plan = make(pool.task, loadgen.Slo(slo.ttft_p99_s, slo.tpot_p99_s))
    return replace(
        plan,
        shapes=request.shapes or plan.shapes,
        concurrencies=request.concurrencies or plan.concurrencies,
    )


def choose_replica(table: RoutingTable, model: str, replica_id: str | None = None) -> tuple[Pool, Replica]:
    """A replica of the model's version to measure: a ready one, else one that the table shows as reserved.

    The table may lag behind a reservation that was just given back; one that still holds is refused, with its
    holder's name, when the replica is reserved.

    Raises:
        NotFound: no such model, version or replica; the message names those that there are.
        Unavailable: it is there but neither ready nor reserved.
    """
    name, _, version = model.partition("@")
    served = {entry.name: entry for entry in table.models}
    if name not in served:
        raise NotFound(f"no pool serves model {name!r}; served are {', '.join(sorted(served)) or 'none'}")
    version = version or served[name].champion or ""
    pools = [pool for pool in table.pools if pool.model == name and pool.version == version]
    candidates = [(pool, replica) for pool in pools for replica in pool.replicas]
    if replica_id is not None:
        candidates = [(pool, replica) for pool, replica in candidates if replica.replica_id == replica_id]
    if not candidates:
        known = [replica.replica_id for pool in table.pools if pool.model == name for replica in pool.replicas]
        wanted = replica_id or f"{name}@{version or 'champion'}"
        raise NotFound(f"no replica of {wanted}; {name} has {', '.join(known) or 'none'}")
    for state in (ReplicaState.READY, ReplicaState.RESERVED):
        for pool, replica in candidates:
            if replica.state is state:
                return pool, replica
    states = ", ".join(f"{replica.replica_id} is {replica.state.value}" for _, replica in candidates)
    raise Unavailable(f"no ready replica to measure: {states}")


def describe(config: WorkbenchConfig, state: StackState, pool: Pool, replica: Replica) -> tuple[MeasuredReplica, Path]:
    """The replica with all that makes its figures comparable, and the folder of its tokenizer.

    Raises:
        Unavailable: the stack has written nothing down of this pool, or it has no tokenizer.
    """
    facts: PoolFacts | None = state.pools.get(pool.pool_id)
    if facts is None:
        raise Unavailable(f"pool {pool.pool_id}: the stack has not started it, or wrote nothing down of it")
    tokenizer = _tokenizer_folder(config, pool, facts)
    cores = facts.cores.get(replica.replica_id)
    measured = MeasuredReplica(
        replica_id=replica.replica_id,
        url=replica.url,
        request_model=pool.model,
        model=pool.model,
        version=pool.version,
        task=pool.task,
        hardware_class=pool.hardware_class,
        num_units=config.pool(pool.pool_id).num_units,
        engine_fingerprint=pool.engine_fingerprint,
        hardware_fingerprint=pool.hardware_fingerprint,
        engine_covers=facts.engine_covers,
        hardware_covers=facts.hardware_covers,
        cores=None if not cores else tuple(cores),
        gateway_url=state.urls.get("gateway"),
    )
    return measured, tokenizer


def _tokenizer_folder(config: WorkbenchConfig, pool: Pool, facts: PoolFacts) -> Path:
    if facts.weights_path is not None:
        return Path(facts.weights_path)
    source = config.models[pool.model].source
    if source.startswith(HUB):
        # Seconds to import, and only models of the hub need it.
        from workbench.hub import tokenizer_folder

        return tokenizer_folder(source)
    raise Unavailable(
        f"pool {pool.pool_id}: the stack has no tokenizer of {source}, so no prompt has an exact length; "
        "give a folder with the model's tokenizer.json as the model's source"
    )
