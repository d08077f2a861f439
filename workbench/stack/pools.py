"""A pool of the running stack: weights, version, replicas, and what the store is told about them.

weights resolved ─┬─ replicas start ───────────────┐
                  └─ version asked from registry ──┴─ pool published → reports every 0.25 s
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from serving.clock import SystemClock
from serving.control.registered import ENGINE_PART
from serving.core.errors import EngineError, ServingError
from serving.core.state import Pool, Replica, ReplicaSnapshot, ReplicaState
from serving.engine.client import EngineClient
from serving.engine.launchers import ReplicaStatus
from serving.engine.scrape import scrape
from serving.store.replicas import ReplicaReport, ReplicaReports
from workbench.config import PoolConfig, WorkbenchConfig
from workbench.hardware import HardwareFingerprint, fingerprint
from workbench.stack.replicas import Engine, prepare
from workbench.stack.service import OnChange, first_of
from workbench.stack.state import PoolFacts
from workbench.stack.versions import Versions
from workbench.wiring import Layout

SCRAPE_EVERY_S = 0.25
# A core busy with long prompts answers late; that a process died is seen at once by its launcher.
SILENT_AFTER_S = 15.0


@dataclass(slots=True)
class _Scraped:
    """What is known of one replica's metrics page."""

    client: EngineClient
    snapshot: ReplicaSnapshot | None = None
    silent_since_s: float | None = None
    error: str | None = None


class PoolRunner:
    """Runs one pool of the configuration.

    Args:
        pool: which one.
        config: the whole configuration: models and hardware classes.
        where: folders.
        reports: the store's pools and reports.
        versions: which version weights are.
        on_change: told what the pool does.
    """

    def __init__(
        self,
        pool: PoolConfig,
        config: WorkbenchConfig,
        where: Layout,
        reports: ReplicaReports,
        versions: Versions,
        on_change: OnChange,
    ) -> None:
        self.pool = pool
        self.is_started = False
        self.fetch_s = 0.0
        self.facts: PoolFacts | None = None
        self._config = config
        self._where = where
        self._reports = reports
        self._versions = versions
        self._on_change = on_change
        self._engine: Engine | None = None
        self._reporter: asyncio.Task[None] | None = None
        self._scraped: dict[str, _Scraped] = {}
        self._clock = SystemClock()

    async def start(self) -> None:
        """Returns when a replica is ready and the pool is published.

        Raises:
            ServingError, ServiceFailed: weights are broken, or no replica became ready.
        """
        self.is_started = True
        try:
            version = await self._start()
        except BaseExceptionGroup as failures:
            await self.stop()
            raise first_of(failures) from None
        except BaseException:
            await self.stop()
            raise
        self._reporter = asyncio.create_task(self._report())
        self._on_change(self.pool.pool_id, f"ready: serves {self.pool.model}@{version}")

    async def _start(self) -> str:
        """Brings a replica up and publishes the pool; the version that it serves."""
        model = self._config.models[self.pool.model]
        if self.pool.source is not None:
            model = model.model_copy(update={"source": self.pool.source})
        began_s = time.monotonic()
        engine = await prepare(self.pool, model, self._where, self._on_change)
        self.fetch_s = time.monotonic() - began_s
        self._engine = engine
        hardware = fingerprint(self.pool.hardware, self.pool.num_units)
        self.facts = self._facts(engine, hardware)
        self._on_change(self.pool.pool_id, "starts replicas")
        # The version may take as long as MLflow does; the engines load meanwhile.
        async with asyncio.TaskGroup() as group:
            group.create_task(engine.replicas.start())
            version = group.create_task(
                self._versions.of(self.pool.model, model.source, self._digest(engine), model.task)
            )
        listed = await _listed(engine) if self.pool.adapters or not engine.max_model_len else []
        _check_adapters(self.pool, listed)
        if not engine.max_model_len:  # neither configured nor in the catalogue
            engine = self._engine = replace(engine, max_model_len=_context_length(listed))
        await self._reports.publish_pool(self._published(engine, hardware, version.result()))
        return version.result()

    def _digest(self, engine: Engine) -> str:
        """What makes the version: the weights, and where the pool says so the engine's configuration."""
        if not self.pool.own_version:
            return engine.weights_digest
        return f"{engine.weights_digest}{ENGINE_PART}{engine.fingerprint}"

    async def stop(self, *, settle_s: float = 0.0) -> None:
        """Drains and ends the replicas, then takes the pool out of the store.

        Args:
            settle_s: how long replicas are shown as draining before they end; 0 when nobody can be routed here.
        """
        self.is_started, self.facts = False, None
        engine = self._engine
        if engine is not None:
            self._on_change(self.pool.pool_id, "drains")
            replica_ids = list(engine.replicas.logs)
            # The reporter goes on meanwhile: it is what tells everybody that they are draining.
            await engine.replicas.stop(settle_s)
            self._engine = None
        if self._reporter is not None:
            self._reporter.cancel()
            await asyncio.gather(self._reporter, return_exceptions=True)
            self._reporter = None
        if engine is not None:
            with contextlib.suppress(ServingError):
                await self._reports.remove_pool(self.pool.pool_id)
                for replica_id in replica_ids:
                    await self._reports.remove(replica_id)
            self._on_change(self.pool.pool_id, "ended")
        for scraped in self._scraped.values():
            await scraped.client.close()
        self._scraped.clear()

    def phases_s(self) -> dict[str, float]:
        """Seconds of each phase of the cold start, of the replica that took the longest in it."""
        longest: dict[str, float] = {}
        for status in () if self._engine is None else self._engine.replicas.statuses():
            for phase, seconds in status.phases_s.items():
                longest[str(phase)] = max(seconds, longest.get(str(phase), 0.0))
        return longest

    def processes(self) -> list[tuple[str, int | None, Path | None]]:
        """Name, pid and log of each replica's process."""
        if self._engine is None:
            return []
        logs = self._engine.replicas.logs
        return [(status.replica_id, status.pid, logs[status.replica_id]) for status in self._engine.replicas.statuses()]

    def _facts(self, engine: Engine, hardware: HardwareFingerprint) -> PoolFacts:
        replica_ids = list(engine.replicas.logs)
        bound = self.pool.cores or ()
        return PoolFacts(
            weights_path=None if engine.weights_path is None else str(engine.weights_path),
            engine_covers=dict(engine.covers),
            hardware_covers=hardware.covers(),
            cores={replica_id: list(cores) for replica_id, cores in zip(replica_ids, bound, strict=False)},
        )

    def _published(self, engine: Engine, hardware: HardwareFingerprint, version: str) -> Pool:
        price = self._config.hardware[self.pool.hardware].usd_per_hour
        return Pool(
            pool_id=self.pool.pool_id,
            model=self.pool.model,
            version=version,
            task=self._config.models[self.pool.model].task,
            hardware_class=self.pool.hardware,
            usd_per_hour=price * self.pool.num_units,
            max_model_len=engine.max_model_len,
            engine_fingerprint=engine.fingerprint,
            hardware_fingerprint=hardware.digest,
            replicas=(),
            role=self.pool.role,
            zone=self.pool.zone,
            region=self.pool.region,
            adapters=self.pool.adapters,
        )

    async def _report(self) -> None:
        """Scrapes and publishes until cancelled; a store that is away misses reports, nothing else."""
        while True:
            started_s = time.monotonic()
            statuses = self._engine.replicas.statuses() if self._engine is not None else ()
            await asyncio.gather(*(self._scrape_and_tell(status) for status in statuses))
            await asyncio.sleep(max(0.0, SCRAPE_EVERY_S - (time.monotonic() - started_s)))

    async def _scrape_and_tell(self, status: ReplicaStatus) -> None:
        if status.url is None:
            return
        if status.state is not ReplicaState.READY:
            await self._tell(status, None)
            return
        scraped = self._scraped.setdefault(status.url, _Scraped(EngineClient(status.url)))
        try:
            scraped.snapshot = await scrape(scraped.client, status.replica_id, self._clock)
            scraped.silent_since_s = scraped.error = None
        except ServingError as error:
            scraped.silent_since_s = scraped.silent_since_s or time.monotonic()
            scraped.error = error.message
            if time.monotonic() - scraped.silent_since_s > SILENT_AFTER_S:
                status = replace(status, state=ReplicaState.DOWN)
        await self._tell(replace(status, error=scraped.error), scraped.snapshot)

    async def _tell(self, status: ReplicaStatus, snapshot: ReplicaSnapshot | None) -> None:
        replica = Replica(status.replica_id, status.url or "", status.state)
        report = ReplicaReport(
            pool_id=self.pool.pool_id,
            replica=replica,
            snapshot=snapshot,
            updated_at_s=self._clock.now_s(),
            error=status.error,
            phases_s=dict(status.phases_s),
        )
        with contextlib.suppress(ServingError):
            await self._reports.publish(report)


async def _listed(engine: Engine) -> list[dict[str, Any]]:
    """The models and adapters that a ready engine lists; none when it does not."""
    for status in engine.replicas.statuses():
        if status.state is ReplicaState.READY and status.url is not None:
            async with EngineClient(status.url) as client:
                try:
                    return [dict(model) for model in (await client.get_json("/v1/models"))["data"]]
                except (ServingError, KeyError, TypeError, ValueError):
                    continue
    return []


def _context_length(listed: Sequence[Mapping[str, Any]]) -> int:
    """What an engine says of its context; 0 when it does not."""
    return max((one["max_model_len"] for one in listed if isinstance(one.get("max_model_len"), int)), default=0)


def _check_adapters(pool: PoolConfig, listed: Sequence[Mapping[str, Any]]) -> None:
    """Raises EngineError when an adapter of the pool is not among what its engine lists."""
    names = [str(one.get("id")) for one in listed]
    missing = [name for name in pool.adapters if name not in names]
    if missing:
        raise EngineError(
            f"{pool.pool_id}: its engines serve no adapter {missing[0]!r}, they list {', '.join(names) or 'nothing'}; "
            f"start them with --lora-modules {missing[0]}=FOLDER, or take it out of the pool's adapters"
        )
