"""Keeps the tenant directory where workers find it: the store's copy and the file equal, issuers' key sets in it.

    store newer, or no file     the file is written
    file newer, or no store's   the store gets it: it was emptied, or somebody edited while nothing ran
    both of one epoch, unlike   the store's counts, under a new epoch
    both the same               the file's time of change is renewed: workers see how long ago that was known

Without the store nothing is done: the file then grows old in the eyes of the workers, as it should.
"""

from __future__ import annotations

import asyncio
import contextlib
import random
from dataclasses import replace
from pathlib import Path

import redis.asyncio

from serving.control.troubles import Troubles
from serving.core.errors import ServingError, StaleEpoch
from serving.core.ports import Clock
from serving.core.tenancy import Issuer, TenantDirectory
from serving.store.jwks import Fetch, fetch_jwks
from serving.store.tenants import FileTenantDirectory, StoreTenantDirectory

CONFIRM_EVERY_S = 10.0
JWKS_TTL_S = 300.0
JWKS_RETRY_S = 30.0
JITTER = (0.75, 1.25)

_Place = StoreTenantDirectory | FileTenantDirectory


class TenantKeeper:
    """One round after another: read both places, make them equal, publish key sets that have changed.

    Args:
        client: the store's.
        path: the file; None keeps no copy.
        clock: for the times written.
        rng: spreads the fetches of key sets.
        troubles: where a dead store or issuer is told.
        fetch: asks an address for its key set; tests hand in their own.
    """

    def __init__(
        self,
        client: redis.asyncio.Redis,
        path: Path | None,
        clock: Clock,
        rng: random.Random,
        troubles: Troubles,
        *,
        fetch: Fetch = fetch_jwks,
    ) -> None:
        self._store = StoreTenantDirectory(client)
        self._file = None if path is None else FileTenantDirectory(path)
        self._clock = clock
        self._rng = rng
        self._troubles = troubles
        self._fetch = fetch
        self._confirmed_s: float | None = None
        self._fetched: dict[str, str] = {}
        self._due_s: dict[str, float] = {}
        self._fetching: dict[str, asyncio.Task[None]] = {}

    async def step(self) -> TenantDirectory | None:
        """One round; what counts after it, None when nothing is published or the store is away. Raises nothing."""
        try:
            in_store = await self._store.read()
            self._troubles.over("reading the tenant directory")
        except ServingError as error:
            self._troubles.begin("reading the tenant directory", error.message)
            return None
        in_file = await self._read_file()
        newest = self._newest(in_store, in_file)
        if newest is None:
            return None
        newest = self._with_key_sets(newest)
        if in_store is None or in_store.epoch < newest.epoch:
            await self._publish(self._store, newest)
        if self._file is not None and (in_file is None or in_file.epoch < newest.epoch):
            await self._publish(self._file, newest)
        if in_store == in_file == newest:
            await self._confirm()
        return newest

    async def stop(self) -> None:
        """Ends what is being fetched."""
        for task in list(self._fetching.values()):
            task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await task

    async def _read_file(self) -> TenantDirectory | None:
        if self._file is None:
            return None
        try:
            found = await self._file.read()
        except ServingError as error:
            self._troubles.begin("reading the tenants' file", error.message)
            return None
        self._troubles.over("reading the tenants' file")
        return found

    def _newest(self, in_store: TenantDirectory | None, in_file: TenantDirectory | None) -> TenantDirectory | None:
        if in_store is None or in_file is None:
            return in_store or in_file
        if in_store.epoch != in_file.epoch or in_store == in_file:
            return max(in_store, in_file, key=lambda directory: directory.epoch)
        self._troubles.begin(
            "tenants", f"store and file hold two directories of epoch {in_file.epoch}: the store's counts"
        )
        return self._next(in_store)

    def _with_key_sets(self, directory: TenantDirectory) -> TenantDirectory:
        """The directory with the last good answer of each issuer, under a new epoch if any has changed."""
        self._fetch_what_is_due(directory)
        for url, text in list(self._fetched.items()):
            if all(issuer.jwks == text for issuer in directory.issuers if issuer.jwks_url == url):
                del self._fetched[url]  # published: from now on an operator's own change counts
        issuers = tuple(
            replace(issuer, jwks=self._fetched.get(issuer.jwks_url or "", issuer.jwks)) for issuer in directory.issuers
        )
        return directory if issuers == directory.issuers else self._next(replace(directory, issuers=issuers))

    def _fetch_what_is_due(self, directory: TenantDirectory) -> None:
        now_s = self._clock.monotonic_s()
        for issuer in directory.issuers:
            url = issuer.jwks_url
            if url is not None and url not in self._fetching and now_s >= self._due_s.get(url, now_s):
                self._fetching[url] = asyncio.create_task(self._renew(issuer, url))

    async def _renew(self, issuer: Issuer, url: str) -> None:
        wait_s = JWKS_RETRY_S
        topic = f"key set of {issuer.issuer}"
        try:
            self._fetched[url] = await self._fetch(url)
            self._troubles.over(topic)
            wait_s = JWKS_TTL_S
        except ServingError as error:
            self._troubles.begin(topic, f"{error.message}; the last good answer stands")
        finally:
            self._due_s[url] = self._clock.monotonic_s() + wait_s * self._rng.uniform(*JITTER)
            del self._fetching[url]

    async def _publish(self, place: _Place, directory: TenantDirectory) -> None:
        topic = f"publishing to {type(place).__name__}"
        try:
            await place.publish(directory)
            self._troubles.over(topic)
        except StaleEpoch:
            return  # somebody edited in this moment: the next round sees it
        except ServingError as error:
            self._troubles.begin(topic, error.message)

    async def _confirm(self) -> None:
        now_s = self._clock.now_s()
        if self._file is None or (self._confirmed_s is not None and now_s - self._confirmed_s < CONFIRM_EVERY_S):
            return
        try:
            await self._file.confirm(now_s)
            self._confirmed_s = now_s
        except ServingError as error:
            self._troubles.begin("confirming the tenants' file", error.message)
        else:
            self._troubles.over("confirming the tenants' file")

    def _next(self, directory: TenantDirectory) -> TenantDirectory:
        return replace(directory, epoch=directory.epoch + 1, published_at_s=self._clock.now_s())
