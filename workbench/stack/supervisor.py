"""Starts the parts in order, keeps them up, and ends them in the reverse order.

    lock → leftovers of a dead stack → ports → store → { MLflow, control plane, gateway, pools } at once

Ending: the gateway first (it drains, so that no request loses its engine), then pools, control plane, MLflow, store.
Nothing is ever ended that this stack, or a dead one by the proof of state.py, did not start.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import redis.asyncio

from serving.core.errors import ServingError
from serving.store import wanted_pools
from serving.store.connection import connect
from serving.store.replicas import ReplicaReports
from serving.store.server import LOG_NAME, StoreServer
from workbench.config import PoolConfig, StartPolicy, WorkbenchConfig
from workbench.stack import wanted
from workbench.stack.lab import jupyter_lab, lab_url
from workbench.stack.lock import AlreadyRunning, StackLock
from workbench.stack.parts import control_plane, gateway_workers, mlflow, url_host
from workbench.stack.pools import PoolRunner
from workbench.stack.ports import check_port
from workbench.stack.restarts import Restarts
from workbench.stack.service import Part, Service, ServiceFailed, first_of, keep_alive, unfailing
from workbench.stack.state import ProcessRecord, StackState, end_sessions
from workbench.stack.versions import Versions, import_registry, register_with
from workbench.wiring import Layout, layout, speak_as_service

OnChange = Callable[[str, str], None]
LOOK_S = 1.0
# Workers take up a table within 2 s; until then they may still send to a replica that is to end.
SETTLE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Started:
    name: str
    part: Part
    log_path: Path


class Stack:
    """The parts of one data folder, supervised by this process.

    Args:
        config: what to run.
        on_change: told which part does what, as it happens.
        with_pools: pools to start beside those that start with the stack.
    """

    def __init__(self, config: WorkbenchConfig, on_change: OnChange, *, with_pools: tuple[str, ...] = ()) -> None:
        self.config = config
        self.layout: Layout = layout(config)
        self.urls: dict[str, str] = {}
        self.pools: dict[str, PoolRunner] = {}
        self._on_change = unfailing(on_change)
        self._with_pools = with_pools
        self._lock = StackLock(self.layout.lock_path)
        self._parts: list[_Started] = []
        self._keepers: list[asyncio.Task[None]] = []
        self._store: redis.asyncio.Redis | None = None
        self._save_fails = False
        self._mlflow_s = 0.0

    @property
    def store(self) -> redis.asyncio.Redis:
        """A client of the stack's store, from `start` to `stop`."""
        if self._store is None:
            raise RuntimeError("the stack has no store before it was started")
        return self._store

    async def start(self) -> None:
        """Returns when every part serves and every pool that starts with the stack has a ready replica.

        Raises:
            AlreadyRunning: another stack runs from this folder.
            PortTaken: a port is in use.
            ServingError, ServiceFailed: a part could not start; those already started have been ended.
        """
        try:
            self._lock.acquire()
            self._prepare()
            await self._start_parts()
        except OSError as error:
            await self.stop()
            raise ServiceFailed(f"the stack cannot start from {self.layout.data_dir}: {error!s}") from error
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Drains and ends everything that `start` started; safe to call at any point of it."""
        if not self._lock.is_held:
            # Whatever runs from this folder is another supervisor's, and so is the state file.
            return
        try:
            records = self._records()
            await self._cancel_keepers()
            await self._stop_parts("gateway")
            await self._end_all({pool_id: runner.stop() for pool_id, runner in self.pools.items()})
            await self._stop_parts("lab", "control", "mlflow")
            if self._store is not None:
                await self._end_all({"store": self._store.aclose()})
                self._store = None
            await self._stop_parts("store")
            shutil.rmtree(self.layout.metrics_dir, ignore_errors=True)
            await asyncio.to_thread(self._forget, records)
        finally:
            self._lock.release()

    def _forget(self, records: list[ProcessRecord]) -> None:
        """Ends what is left of the records; as long as any of it runs, the state file goes on naming it."""
        if ended := end_sessions(records):
            self._on_change("stack", f"ended what did not end by itself: {', '.join(ended)}")
        left = tuple(record for record in records if record.session())
        if not left:
            self.layout.state_file.remove()
            return
        self._on_change("stack", f"could not end {', '.join(f'{record.name} ({record.pid})' for record in left)}")
        with contextlib.suppress(OSError):
            self.layout.state_file.write(StackState(_own_record(), left))

    def seconds(self) -> dict[str, float]:
        """What `start` spent on weights, on MLflow and on each phase of a cold start; they overlap."""
        found = {"fetch": max((runner.fetch_s for runner in self.pools.values()), default=0.0)}
        for runner in self.pools.values():
            for phase, seconds in runner.phases_s().items():
                found[phase] = max(seconds, found.get(phase, 0.0))
        return found | {"mlflow": self._mlflow_s}

    async def start_lab(self, token: str, notebook_dir: Path) -> str:
        """Starts JupyterLab beside the stack; its URL with the token."""
        check_port("127.0.0.1", self.config.lab.port, "lab.port")
        await self._start_service(jupyter_lab(self.config, self.layout, token, notebook_dir))
        self.urls["lab"] = lab_url(self.config, token, notebook_dir)
        self._save()
        return self.urls["lab"]

    def _prepare(self) -> None:
        """Ends what a dead stack left, checks the ports, and begins a new state file."""
        old = self.layout.state_file.read()
        if old is not None and old.is_running:
            raise AlreadyRunning(f"a stack already runs (pid {old.supervisor.pid}): end it with `workbench down`")
        if old is not None and old.leftovers:
            self._on_change("stack", f"ends what a dead stack left: {', '.join(r.name for r in old.leftovers)}")
            end_sessions(old.leftovers)
        check_port(self.config.gateway.host, self.config.gateway.port, "gateway.port")
        if self.config.stores.mlflow_tracking_uri is None:
            check_port("127.0.0.1", self.config.mlflow.port, "mlflow.port")
        shutil.rmtree(self.layout.metrics_dir, ignore_errors=True)
        self.layout.metrics_dir.mkdir(parents=True, mode=0o700)
        # Without its file nobody could end this stack: here a full disk ends it, later it does not.
        self.layout.state_file.write(self._state())

    async def _start_parts(self) -> None:
        store_url = await self._start_store()
        mlflow_uri = self.config.stores.mlflow_tracking_uri or f"http://127.0.0.1:{self.config.mlflow.port}"
        self.urls["mlflow"] = mlflow_uri
        self.urls["gateway"] = f"http://{url_host(self.config.gateway.host)}:{self.config.gateway.port}"
        mlflow_tried = asyncio.Event()
        await self._set_up_pools(mlflow_uri, mlflow_tried)
        services = [
            control_plane(self.config, self.layout, store_url, mlflow_uri),
            *gateway_workers(self.config, self.layout, store_url),
        ]
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start_mlflow(mlflow_tried))
                for service in services:
                    group.create_task(self._start_service(service))
                for runner in self.pools.values():
                    if self._starts_now(runner.pool):
                        group.create_task(runner.start())
        except BaseExceptionGroup as failures:
            raise first_of(failures) from None
        self._keepers.append(asyncio.create_task(self._look_after_wishes()))
        self._save()

    async def _start_mlflow(self, tried: asyncio.Event) -> None:
        """MLflow's client takes seconds to import: its server starts meanwhile."""
        began_s = time.monotonic()
        speak_as_service(self.config)
        importing = asyncio.create_task(asyncio.to_thread(import_registry))
        try:
            if self.config.stores.mlflow_tracking_uri is None:
                await self._start_service(mlflow(self.config, self.layout))
            await importing
        finally:
            self._mlflow_s = time.monotonic() - began_s
            tried.set()

    async def _set_up_pools(self, mlflow_uri: str, mlflow_tried: asyncio.Event) -> None:
        reports = ReplicaReports(self.store)
        await self._forget_old_pools(reports)
        versions = Versions(
            register_with(mlflow_uri), self.layout.versions_path, self._on_change, mlflow_tried.wait, uri=mlflow_uri
        )
        self.pools = {
            pool.pool_id: PoolRunner(pool, self.config, self.layout, reports, versions, self._changed)
            for pool in self.config.pools
        }

    def _starts_now(self, pool: PoolConfig) -> bool:
        return pool.start is StartPolicy.WITH_STACK or pool.pool_id in self._with_pools

    async def _start_store(self) -> str:
        url = self.config.stores.redis_url
        if url is None:
            server = StoreServer(self.layout.store_dir)
            await self._start_part(_Started("store", server, self.layout.store_dir / LOG_NAME))
            url = server.url
        self.urls["store"] = url
        self._store = connect(url)
        await wanted.forget(self._store)
        return url

    async def _forget_old_pools(self, reports: ReplicaReports) -> None:
        """An embedded store is this stack's alone: what an earlier configuration published there is over."""
        if self.config.stores.redis_url is not None:
            return
        for replica_id in await reports.all():
            await reports.remove(replica_id)
        for pool_id in await reports.pools():
            await reports.remove_pool(pool_id)

    async def _start_service(self, service: Service) -> None:
        await self._start_part(_Started(service.name, service, service.log_path))

    async def _start_part(self, started: _Started) -> None:
        self._parts.append(started)
        self._on_change(started.name, "starts")
        await started.part.start()
        self._changed(started.name, "ready")
        self._keepers.append(asyncio.create_task(keep_alive(started.name, started.part, self._changed)))

    async def _look_after_wishes(self) -> None:
        """Starts and ends pools, and replaces workers, when asked to; keeps the state file true."""
        starting: dict[str, asyncio.Task[None]] = {}
        restarts = Restarts(self.store, self._gateway_workers, self._changed)
        try:
            while True:
                await asyncio.sleep(LOOK_S)
                self._save()
                with contextlib.suppress(ServingError):
                    for pool_id, run in (await wanted_pools.asked(self.store)).items():
                        if pool_id in self.pools and (pool_id not in starting or starting[pool_id].done()):
                            starting[pool_id] = asyncio.create_task(self._run_or_end(self.pools[pool_id], run))
                    await restarts.look()
        finally:
            await restarts.stop()
            for task in starting.values():
                task.cancel()
            await asyncio.gather(*starting.values(), return_exceptions=True)

    def _gateway_workers(self) -> list[Service]:
        return [s.part for s in self._parts if isinstance(s.part, Service) and s.name.startswith("gateway")]

    async def _run_or_end(self, runner: PoolRunner, run: bool) -> None:
        if run == runner.is_started:
            return
        try:
            await (runner.start() if run else runner.stop(settle_s=SETTLE_S))
        except (ServingError, ServiceFailed, OSError) as error:
            self._on_change(runner.pool.pool_id, f"failed: {error}")

    def _changed(self, part: str, what: str) -> None:
        self._on_change(part, what)
        self._save()

    def _save(self) -> None:
        """Writes the state file when it does not hold what runs; the next look tries again when that fails."""
        file, failed = self.layout.state_file, self._save_fails
        try:
            if not file.holds(state := self._state()):
                file.write(state)
        except OSError as error:
            self._save_fails = True
            if not failed:
                self._on_change("stack", f"cannot write {file.path}, and goes on trying: {error}")
        else:
            self._save_fails = False
            if failed:
                self._on_change("stack", f"running again: {file.path} is written")

    def _state(self) -> StackState:
        facts = {pool_id: runner.facts for pool_id, runner in self.pools.items() if runner.facts is not None}
        return StackState(_own_record(), tuple(self._records()), dict(self.urls), facts)

    def _records(self) -> list[ProcessRecord]:
        named: list[tuple[str, int | None, Path | None]] = [
            (started.name, started.part.pid, started.log_path) for started in self._parts
        ]
        for service in self._gateway_workers():
            named += [(name, pid, None) for name, pid in service.others]
        for runner in self.pools.values():
            named += runner.processes()
        records = (ProcessRecord.of(name, pid, log_path) for name, pid, log_path in named if pid is not None)
        return [record for record in records if record is not None]

    async def _cancel_keepers(self) -> None:
        keepers, self._keepers = self._keepers, []
        for keeper in keepers:
            keeper.cancel()
        await asyncio.gather(*keepers, return_exceptions=True)

    async def _stop_parts(self, *prefixes: str) -> None:
        stopping = [started for started in self._parts if started.name.startswith(prefixes)]
        for started in stopping:
            if started.part.is_alive:
                self._on_change(started.name, "ends")
        await self._end_all({started.name: started.part.stop() for started in stopping})
        self._parts = [started for started in self._parts if started not in stopping]

    async def _end_all(self, endings: Mapping[str, Awaitable[Any]]) -> None:
        """Awaits all; one that fails keeps no other from its end."""
        outcomes = await asyncio.gather(*endings.values(), return_exceptions=True)
        for name, outcome in zip(endings, outcomes, strict=True):
            if isinstance(outcome, BaseException):
                self._on_change(name, f"failed to end: {outcome!r}")


def _own_record() -> ProcessRecord:
    record = ProcessRecord.of("supervisor", os.getpid())
    if record is None:
        raise RuntimeError("this process cannot be looked up by its own pid")
    return record
