"""Keeps a worker's authenticator fed: the tenant directory twice a second, the issuers' keys every few minutes.

Nothing here is on the way of a request. When these loops end, nothing is confirmed any more, and so authentication
fails closed by itself after `auth_max_staleness_s`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import random

import redis.asyncio

from serving.core.ports import Clock
from serving.core.tenancy import AuthMode, TenantDirectory
from serving.gateway.auth import Authenticator
from serving.gateway.key_sets import KeySets
from serving.settings import GatewaySettings
from serving.store.jwks import Fetch, fetch_jwks
from serving.store.tenants import CachedTenantDirectory, FileTenantDirectory, StoreTenantDirectory

logger = logging.getLogger(__name__)


class Identity:
    """The authenticator of a worker and what keeps it fresh.

    Attributes:
        authenticator: what the door asks.
    """

    def __init__(
        self,
        settings: GatewaySettings,
        client: redis.asyncio.Redis | None,
        clock: Clock,
        rng: random.Random,
        *,
        fetch: Fetch = fetch_jwks,
    ) -> None:
        """`client` is the store's, None where there is no store; `fetch` is for tests.

        Raises:
            ValueError: keys are required and there is nowhere to learn of them.
        """
        self._clock = clock
        self._key_sets = KeySets(clock, rng, self._forget, fetch=fetch)
        self.authenticator = Authenticator(
            settings.auth_mode, clock, key_sets=self._key_sets, max_staleness_s=settings.auth_max_staleness_s
        )
        self._poll_s = settings.table_poll_s
        self._cache = self._make_cache(settings, client)
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Takes up the directory that is there, then goes on in the background."""
        await self.refresh()
        if self._cache is not None:
            for loop in (self._follow(), self._key_sets.run()):
                task = asyncio.create_task(loop)
                task.add_done_callback(_report_failure)
                self._tasks.append(task)

    async def stop(self) -> None:
        """Ends the background work."""
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._key_sets.stop()

    async def refresh(self) -> bool:
        """Looks for a newer directory now, not only at the next poll; True when one was taken up."""
        if self._cache is None:
            return False
        changed = await self._cache.refresh()
        if self._cache.confirmed_at_s is not None:
            self.authenticator.on_confirmed(self._cache.confirmed_at_s)
        return changed

    @property
    def is_running(self) -> bool:
        """False once a background loop has failed: what this worker knows then grows old."""
        return not any(task.done() for task in self._tasks)

    @property
    def epoch(self) -> int:
        """Of the directory in use; 0 without one."""
        current = None if self._cache is None else self._cache.current
        return 0 if current is None else current.epoch

    @property
    def age_s(self) -> float | None:
        """Seconds since the directory was known to be the newest; None when that never was."""
        if self._cache is None or self._cache.confirmed_at_s is None:
            return None
        return max(self._clock.now_s() - self._cache.confirmed_at_s, 0.0)

    def _make_cache(
        self, settings: GatewaySettings, client: redis.asyncio.Redis | None
    ) -> CachedTenantDirectory | None:
        if client is None and settings.tenants_path is None:
            if settings.auth_mode is AuthMode.REQUIRED:
                raise ValueError(
                    "keys are required and there is nowhere to learn of them: set WORKBENCH_GATEWAY_REDIS_URL, "
                    "WORKBENCH_GATEWAY_TENANTS_PATH or both"
                )
            self.authenticator.on_directory(TenantDirectory(epoch=0, published_at_s=0.0))
            self.authenticator.on_confirmed(math.inf)
            return None
        return CachedTenantDirectory(
            None if client is None else StoreTenantDirectory(client),
            None if settings.tenants_path is None else FileTenantDirectory(settings.tenants_path),
            self.authenticator.on_directory,
            self._clock,
            poll_s=self._poll_s,
        )

    def _forget(self) -> None:
        self.authenticator.forget()

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._poll_s)
            await self.refresh()


def _report_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and task.exception() is not None:
        logger.critical("the worker no longer follows its tenants", exc_info=task.exception())
