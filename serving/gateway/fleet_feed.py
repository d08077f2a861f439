"""What a worker knows of its fleet, kept fresh in the background and never asked for on the hot path.

routing table   store, then file, every `table_poll_s`; a broken or older one changes nothing
snapshots       the supervisors' reports in the store, one read every `report_poll_s`
own scrapes     of replicas whose last sight is older than SCRAPE_AFTER_S: the store is dead, or nobody reports them
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from functools import partial

from serving.core.errors import UpstreamError
from serving.core.fleet import Fleet
from serving.core.ports import Clock, RoutingTableSource
from serving.core.state import ReplicaState, ReplicaView, RoutingTable
from serving.engine.scrape import scrape
from serving.gateway.connections import Connections
from serving.store.connection import StoreUnavailable
from serving.store.replicas import ReplicaReports
from serving.store.routing_table import CachedRoutingTable
from serving.telemetry.metrics import GatewayMetrics

logger = logging.getLogger(__name__)

SCRAPE_AFTER_S = 1.0
GAUGES_EVERY_S = 1.0


class FleetFeed:
    """Feeds the fleet its events from outside: tables and snapshots."""

    def __init__(
        self,
        fleet: Fleet,
        sources: Sequence[RoutingTableSource],
        reports: ReplicaReports | None,
        connections: Connections,
        metrics: GatewayMetrics,
        clock: Clock,
        *,
        table_poll_s: float,
        report_poll_s: float,
    ) -> None:
        self._fleet = fleet
        self._reports = reports
        self._connections = connections
        self._metrics = metrics
        self._clock = clock
        self._report_poll_s = report_poll_s
        self._table = CachedRoutingTable(sources, self._on_table, poll_s=table_poll_s)
        self._tasks: list[asyncio.Task[None]] = []
        self._scrapes: dict[str, asyncio.Task[None]] = {}
        self._store_answers: bool | None = None

    async def start(self) -> None:
        """Takes up the table that is there, then goes on in the background."""
        await self._table.refresh()
        if self._table.current is None:
            logger.warning("no routing table yet: nothing can be served until one is published")
        for loop in (self._table.run(), self._watch_replicas(), self._show_gauges()):
            task = asyncio.create_task(loop)
            task.add_done_callback(_report_failure)
            self._tasks.append(task)

    @property
    def is_running(self) -> bool:
        """False once a background loop has failed: what this worker knows then grows old."""
        return bool(self._tasks) and not any(task.done() for task in self._tasks)

    async def refresh_table(self) -> bool:
        """Looks for a newer table now, not only at the next poll; True when one was taken up."""
        return await self._table.refresh()

    async def stop(self) -> None:
        """Ends the background work."""
        tasks = [*self._tasks, *self._scrapes.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def _on_table(self, table: RoutingTable) -> None:
        self._fleet.on_table(table)
        self._metrics.table_epoch.set(table.epoch)
        self._metrics.set_cost_states(self._fleet.cost_states(self._clock.now_s()))

    async def _watch_replicas(self) -> None:
        while True:
            await self._read_reports()
            self._scrape_unseen()
            await asyncio.sleep(self._report_poll_s)

    async def _read_reports(self) -> None:
        if self._reports is None:
            return
        try:
            reports = await self._reports.all()
        except StoreUnavailable as error:
            self._note_store(answers=False, why=error.message)
            return
        self._note_store(answers=True, why="the store answers again")
        for report in reports.values():
            if report.snapshot is not None:
                self._fleet.on_snapshot(report.snapshot)

    def _note_store(self, *, answers: bool, why: str) -> None:
        if self._store_answers != answers:
            self._metrics.store_up.set(answers)
            if not answers or self._store_answers is False:
                logger.warning("%s", why)
            self._store_answers = answers

    def _scrape_unseen(self) -> None:
        oldest_s = self._clock.now_s() - SCRAPE_AFTER_S
        for replica in self._fleet.replicas:
            seen = replica.observed_at_s is not None and replica.observed_at_s >= oldest_s
            if seen or replica.state is not ReplicaState.READY or replica.replica_id in self._scrapes:
                continue
            task = asyncio.create_task(self._scrape(replica))
            self._scrapes[replica.replica_id] = task
            task.add_done_callback(partial(self._scraped, replica.replica_id))

    def _scraped(self, replica_id: str, _: asyncio.Task[None]) -> None:
        del self._scrapes[replica_id]

    async def _scrape(self, replica: ReplicaView) -> None:
        # A replica that does not answer stays unseen: it is routed by own counts, and its table entry is not ours.
        with contextlib.suppress(UpstreamError):
            self._fleet.on_snapshot(
                await scrape(self._connections.client(replica.url), replica.replica_id, self._clock)
            )

    async def _show_gauges(self) -> None:
        while True:
            await asyncio.sleep(GAUGES_EVERY_S)
            self._metrics.set_cost_states(self._fleet.cost_states(self._clock.now_s()))
            await self._connections.keep_only({replica.url for replica in self._fleet.replicas})


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the worker no longer follows its fleet; /health says so", exc_info=task.exception())
