"""The control plane's loop: look at every source, compose the routing table, publish what changed.

    python -m serving.control          settings from WORKBENCH_CONTROL_* (serving/settings.py)

Nothing here is on the way of a request. Any source may be dead for any time: the loop says so once, keeps
that source's last known word, and goes on. The table goes to the store first and then, the same table, to
the file; whichever sink was away gets the newest table when it is back, and so it is with the tenant directory
(tenants.py). Each round leaves a heartbeat in the store (`control_health`), which ends by itself when the loop does.

Two control planes do not corrupt the table (epochs are taken one by one) but take turns; rollouts are moved by the one
that holds the lease alone (rollout.py).
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import Mapping
from dataclasses import dataclass

import redis.asyncio

from serving.clock import SystemClock
from serving.control.compose import FleetSeen, Observed, Registered, compose, sole_versions
from serving.control.lazy_registry import LazyRegistry
from serving.control.registry_watch import RegistryWatch
from serving.control.release_desk import ReleaseDesk, ReleaseParts
from serving.control.release_events import ReleaseEvents
from serving.control.rollout import RolloutKeeper, RolloutPorts
from serving.control.tenants import TenantKeeper
from serving.control.troubles import Troubles
from serving.core.errors import ServingError, StaleEpoch
from serving.core.ports import Clock
from serving.core.state import RoutingTable
from serving.engine.catalogue import CATALOGUE
from serving.settings import ControlSettings
from serving.store.connection import KEY_PREFIX, StoreUnavailable, connect, store_errors
from serving.store.cost_table import FileCostTable, PublishedCostTable, StoreCostTable
from serving.store.documents import Codec
from serving.store.leases import Lease
from serving.store.replicas import ReplicaReports
from serving.store.reservations import reservations
from serving.store.routing_table import FileRoutingTable, StoreRoutingTable
from serving.telemetry import shared_folder
from serving.telemetry.decision_log import RolloutLog

logger = logging.getLogger(__name__)

HEARTBEAT_KEY = f"{KEY_PREFIX}control"
HEARTBEAT_TTL_S = 10
MAX_PUBLISH_TRIES = 3
# Beside the routing table's file: a table names only models with pools, and a stack that ends takes its pools out.
REGISTRY_FILE = "registry.json"
RELEASE_EVENTS_FILE = "releases.jsonl"
EVIDENCE_FOLDER = "evidence"

TableStore = StoreRoutingTable | FileRoutingTable
CostStore = StoreCostTable | FileCostTable


@dataclass(frozen=True, slots=True)
class ControlHealth:
    """The control plane's last round. `registry_ok` is None where no registry is configured."""

    pid: int
    at_s: float
    epoch: int | None
    registry_ok: bool | None


_HEALTH = Codec(ControlHealth, "control plane's heartbeat")


async def control_health(client: redis.asyncio.Redis) -> ControlHealth | None:
    """The last round of the control plane, None when none ended in the last 10 s. Raises StoreUnavailable."""
    with store_errors("read the control plane's heartbeat"):
        data = await client.get(HEARTBEAT_KEY)
    return None if data is None else _HEALTH.decode(data)


class ControlPlane:
    """Composes and publishes, round by round."""

    def __init__(
        self,
        settings: ControlSettings,
        client: redis.asyncio.Redis,
        *,
        registry: RegistryWatch | None,
        tokens_per_byte: Mapping[str, float],
        clock: Clock,
        releases: ReleaseParts | None = None,
    ) -> None:
        """`registry` None means that no registry is configured: a model's only version is then its champion.

        `releases` None moves no rollout, those that run stand as they are, and the registry's champion is believed.
        """
        self._settings = settings
        self._client = client
        self._registry = registry
        self._tokens_per_byte = tokens_per_byte
        self._clock = clock
        self._reports = ReplicaReports(client)
        self._tables: list[TableStore] = [StoreRoutingTable(client)]
        self._costs: list[CostStore] = [StoreCostTable(client)]
        if settings.routing_table_path is not None:
            self._tables.append(FileRoutingTable(settings.routing_table_path))
        if settings.cost_table_path is not None:
            self._costs.append(FileCostTable(settings.cost_table_path))
        self._newest: RoutingTable | None = None
        self._settled_since_s = 0.0
        self._troubles = Troubles(logger)
        self._desk: ReleaseDesk | None = None
        self._rollouts: RolloutKeeper | None = None
        if releases is not None:
            lease = Lease(client, "control", settings.lease_ttl_s)
            self._desk = ReleaseDesk(client, lease, releases, clock, self._troubles)
            log = RolloutLog(settings.decision_log_path)
            ports = RolloutPorts(self._desk.judge, self._desk, log.write, releases.events.approval_waits)
            self._rollouts = RolloutKeeper(client, lease, ports, clock, self._troubles, settings.report_max_age_s)
        self._tenants = TenantKeeper(client, settings.tenants_path, clock, random.Random(), self._troubles)

    async def run(self, stop: asyncio.Event) -> None:
        """Rounds, `compose_poll_s` apart, until `stop` is set."""
        try:
            while not stop.is_set():
                await self.step()
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(stop.wait(), self._settings.compose_poll_s)
        finally:
            await self._tenants.stop()
            if self._desk is not None:
                await self._desk.stop()
            if self._rollouts is not None:
                await self._rollouts.stop()

    async def step(self) -> RoutingTable | None:
        """One round; the newest table after it, None when nothing is known yet. A dead source raises nothing."""
        for _ in range(MAX_PUBLISH_TRIES):
            try:
                await self._compose_and_publish()
                self._troubles.over("epoch")
                break
            except StaleEpoch as error:
                self._troubles.begin("epoch", f"{error.message}; reading again")
        await self._tenants.step()
        await self._beat()
        return self._newest

    async def _compose_and_publish(self) -> None:
        there = [await self._read_table(sink) for sink in self._tables]
        previous = max(
            (table for table in (*there, self._newest) if table is not None),
            key=lambda table: table.epoch,
            default=None,
        )
        table = compose(await self._observe(), previous)
        if table is not None:
            logger.info("epoch %d: %s", table.epoch, _summary(table))
        self._newest = table or previous
        for sink, found in zip(self._tables, there, strict=True):
            if self._newest is not None and (found is None or found.epoch < self._newest.epoch):
                await self._publish(sink, self._newest)

    async def _observe(self) -> Observed:
        fleet = await self._read_fleet()
        # Once for both: a champion that changed in between would make a table of two moments.
        registered = self._registered(fleet)
        if self._desk is not None:
            registered = await self._desk.step(registered)
        splits = None if self._rollouts is None else await self._rollouts.step(fleet, registered)
        return Observed(
            now_s=self._clock.now_s(),
            fleet=fleet,
            registered=registered,
            splits=splits,
            cost=await self._read_cost(),
            policy=self._settings.routing,
            tokens_per_byte=self._tokens_per_byte,
            report_max_age_s=self._settings.report_max_age_s,
        )

    async def _read_fleet(self) -> FleetSeen | None:
        try:
            pools = await self._reports.pools()
            reports = await self._reports.all()
            reserved = await reservations(self._client, list(reports))
        except StoreUnavailable as error:
            self._troubles.begin("store", f"{error.message}; the fleet stands as last seen")
            return None
        if self._troubles.over("store"):
            self._settled_since_s = self._clock.now_s()
        return FleetSeen(tuple(pools.values()), tuple(reports.values()), frozenset(reserved), self._settled_since_s)

    def _registered(self, fleet: FleetSeen | None) -> Registered | None:
        if self._registry is None:
            return None if fleet is None else sole_versions(fleet.pools)
        self._registry.check()
        if fleet is not None:
            self._registry.watch(pool.model for pool in fleet.pools)
        return self._registry.last

    async def _read_cost(self) -> PublishedCostTable | None:
        """The newest of store and file: whichever was away at the last publication is older."""
        found = []
        for source in self._costs:
            topic = f"cost table in {type(source).__name__}"
            try:
                found.append(await source.read())
                self._troubles.over(topic)
            except ServingError as error:
                self._troubles.begin(topic, error.message)
        tables = [table for table in found if table is not None]
        return max(tables, key=lambda table: table.published_at_s, default=None)

    async def _read_table(self, sink: TableStore) -> RoutingTable | None:
        topic = f"reading {type(sink).__name__}"
        try:
            table = await sink.read()
        except ServingError as error:
            self._troubles.begin(topic, error.message)
            return None
        self._troubles.over(topic)
        return table

    async def _publish(self, sink: TableStore, table: RoutingTable) -> None:
        topic = f"publishing to {type(sink).__name__}"
        try:
            await sink.publish(table)
            self._troubles.over(topic)
        except StaleEpoch:
            raise
        except ServingError as error:
            self._troubles.begin(topic, error.message)

    async def _beat(self) -> None:
        health = ControlHealth(
            pid=os.getpid(),
            at_s=self._clock.now_s(),
            epoch=self._newest.epoch if self._newest else None,
            registry_ok=self._registry.is_answering if self._registry else None,
        )
        try:
            with store_errors("leave a heartbeat"):
                await self._client.set(HEARTBEAT_KEY, _HEALTH.encode(health), ex=HEARTBEAT_TTL_S)
        except StoreUnavailable as error:
            self._troubles.begin("heartbeat", error.message)
        else:
            self._troubles.over("heartbeat")


def _summary(table: RoutingTable) -> str:
    states = [replica.state.value for pool in table.pools for replica in pool.replicas]
    counts = ", ".join(f"{states.count(state)} {state}" for state in sorted(set(states))) or "no replica"
    return f"{len(table.pools)} pools ({counts}), {len(table.cost_rows)} cost rows"


async def serve(settings: ControlSettings, registry: RegistryWatch | None, releases: ReleaseParts | None) -> None:
    """Runs the control plane until SIGTERM or SIGINT."""
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    client = connect(_redis_url(settings))
    tokens_per_byte = {name: entry.tokens_per_byte for name, entry in CATALOGUE.items()}
    plane = ControlPlane(
        settings, client, registry=registry, tokens_per_byte=tokens_per_byte, clock=SystemClock(), releases=releases
    )
    logger.info("the control plane runs, pid %d", os.getpid())
    try:
        await plane.run(stop)
    finally:
        await client.aclose()
    logger.info("the control plane stopped")


def main() -> int:
    """Exit code: 0 after a signal, 2 for settings that can't work."""
    try:
        settings = ControlSettings()
        _redis_url(settings)
    except ValueError as error:
        print(f"control plane: {error}", file=sys.stderr)  # noqa: T201 - there are no settings to log by
        return 2
    logging.basicConfig(level=settings.log_level, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    registry, releases = _release_parts(settings)
    asyncio.run(serve(settings, registry, releases))
    return 0


def _release_parts(settings: ControlSettings) -> tuple[RegistryWatch | None, ReleaseParts | None]:
    """The registry, watched, and what releases need; none without a registry."""
    if settings.mlflow_tracking_uri is None:
        return None, None
    table_path = settings.routing_table_path
    path = None if table_path is None else table_path.with_name(REGISTRY_FILE)
    mlflow = LazyRegistry(settings.mlflow_tracking_uri)
    registry = RegistryWatch(mlflow.read, settings.registry_poll_s, path, uri=settings.mlflow_tracking_uri)
    registry.start()
    if settings.metrics_dir is not None:
        shared_folder.share(settings.metrics_dir)
    from serving.telemetry.release_metrics import ReleaseMetrics  # after share(): the library decides as it is imported

    log = settings.decision_log_path
    webhook = None if settings.release_webhook is None else settings.release_webhook.get_secret_value()
    events = ReleaseEvents(
        SystemClock(), None if log is None else log / RELEASE_EVENTS_FILE, webhook, ReleaseMetrics().count
    )
    copies = None if settings.releases_path is None else settings.releases_path.with_name(EVIDENCE_FOLDER)
    return registry, ReleaseParts(mlflow, events, settings.releases, settings.releases_path, copies)


def _redis_url(settings: ControlSettings) -> str:
    if settings.redis_url is None:
        raise ValueError(
            "it hears of replicas through the store: set WORKBENCH_CONTROL_REDIS_URL (unix:///path, redis://…)"
        )
    return settings.redis_url
