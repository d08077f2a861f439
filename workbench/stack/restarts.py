"""Replaces the gateway's workers one after another when a command asks for it; nobody's request is lost."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import redis.asyncio

from serving.core.errors import ServingError
from workbench.stack import wanted
from workbench.stack.service import OnChange, Service, ServiceFailed
from workbench.stack.wanted import Replaced, Restart

TELL_EVERY_S = 0.2
# With a store that is away when the last word is to be told.
PATIENCE_S = 30.0


class Restarts:
    """Takes up requests, one at a time.

    Args:
        store: where they come from.
        services: the workers as they are now.
        on_change: told what happens to which.
    """

    def __init__(
        self, store: redis.asyncio.Redis, services: Callable[[], Sequence[Service]], on_change: OnChange
    ) -> None:
        self._store = store
        self._services = services
        self._on_change = on_change
        self._running: asyncio.Task[None] | None = None

    async def look(self) -> None:
        """Takes up the next request unless a restart runs. Raises StoreUnavailable."""
        if self._running is not None and not self._running.done():
            return
        restart_id = await wanted.next_restart(self._store)
        if restart_id is not None:
            self._running = asyncio.create_task(self._run(_Progress(self._store, Restart(restart_id))))

    async def stop(self) -> None:
        """Leaves a restart where it is."""
        if self._running is not None:
            self._running.cancel()
            await asyncio.gather(self._running, return_exceptions=True)

    async def _run(self, progress: _Progress) -> None:
        """All of them, or up to the first that fails: what serves is never made worse than it was."""
        telling = asyncio.create_task(progress.keep_telling())
        error: str | None = None
        try:
            for service in self._services():
                await self._replace(service, progress)
        except (ServiceFailed, ServingError, OSError) as failure:
            error = str(failure)
        finally:
            telling.cancel()
        await progress.finish(error)

    async def _replace(self, service: Service, progress: _Progress) -> None:
        def on_step(what: str) -> None:
            self._on_change(service.name, what)
            progress.step(service.name, what)

        began_s, old_pid = time.monotonic(), service.pid
        try:
            await service.replace(on_step)
        except (ServiceFailed, ServingError, OSError) as failure:
            on_step(f"failed to be replaced, and serves as before: {failure}")
            raise
        if old_pid is not None and service.pid is not None:
            progress.replaced(Replaced(service.name, old_pid, service.pid, round(time.monotonic() - began_s, 3)))
        on_step("ready")


class _Progress:
    """Tells how far a restart has come; a store that is away for a while keeps no worker from its successor."""

    def __init__(self, store: redis.asyncio.Redis, restart: Restart) -> None:
        self._store = store
        self._restart = restart

    def step(self, part: str, what: str) -> None:
        self._restart = self._restart.with_step(part, what)

    def replaced(self, one: Replaced) -> None:
        self._restart = replace(self._restart, replaced=(*self._restart.replaced, one))

    async def keep_telling(self) -> None:
        told: Restart | None = None
        while True:
            if told is not self._restart:
                told = self._restart
                with contextlib.suppress(ServingError):
                    await wanted.tell_restart(self._store, told)
            await asyncio.sleep(TELL_EVERY_S)

    async def finish(self, error: str | None) -> None:
        self._restart = replace(self._restart, is_over=True, error=error)
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s:
            try:
                await wanted.tell_restart(self._store, self._restart)
            except ServingError:
                await asyncio.sleep(TELL_EVERY_S)
            else:
                return
