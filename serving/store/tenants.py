"""The tenant directory as a published document: in the store, in a file, in memory, and the cache of a worker.

The store's copy is the truth. The file is a copy of it, and the truth where there is no store. `confirmed_at_s` says
when a worker last knew that what it holds is what the truth says: from the store itself, or from the file's time of
change, which the control plane renews as long as store and file agree.
"""

from __future__ import annotations

from pathlib import Path

import redis.asyncio

from serving.core.ports import Clock
from serving.core.tenancy import TENANT_DIRECTORY_SCHEMA, TenantDirectory
from serving.store.connection import KEY_PREFIX, StoreUnavailable
from serving.store.documents import Codec
from serving.store.published import (
    CachedDocument,
    DocumentKind,
    FileDocument,
    Listener,
    MemoryDocument,
    Source,
    StoreDocument,
)

TENANT_DIRECTORY = DocumentKind(
    what="tenant directory",
    key=f"{KEY_PREFIX}tenants",
    field="directory",
    codec=Codec(TenantDirectory, "tenant directory", schema=TENANT_DIRECTORY_SCHEMA),
    summary=lambda directory: f"{len(directory.tenants)} tenants, {len(directory.keys)} keys",
    mode=0o600,  # it holds hashes of secrets, and who our customers are
)


class StoreTenantDirectory(StoreDocument[TenantDirectory]):
    """The directory in the store: source and sink."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        super().__init__(client, TENANT_DIRECTORY)


class FileTenantDirectory(FileDocument[TenantDirectory]):
    """The directory in a file that only its owner reads: source and sink."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, TENANT_DIRECTORY)


class MemoryTenantDirectory(MemoryDocument[TenantDirectory]):
    """The directory in this process, for tests: source and sink."""

    def __init__(self) -> None:
        super().__init__(TENANT_DIRECTORY)


class CachedTenantDirectory(CachedDocument[TenantDirectory]):
    """The directory that a worker authenticates by, and how long ago it was known to be the newest.

    Attributes:
        confirmed_at_s: Unix seconds; None until any source has answered. Nothing published counts as confirmed, too.
    """

    def __init__(
        self,
        truth: Source[TenantDirectory] | None,
        copy: FileTenantDirectory | None,
        on_change: Listener[TenantDirectory],
        clock: Clock,
        *,
        poll_s: float = 0.5,
    ) -> None:
        """`truth` is the store; without one the file `copy` is the truth itself.

        Raises:
            ValueError: there is neither.
        """
        sources = [source for source in (truth, copy) if source is not None]
        if not sources:
            raise ValueError("a tenant directory needs a store or a file to come from")
        super().__init__(sources, on_change, TENANT_DIRECTORY, poll_s=poll_s)
        self._copy = copy
        self._has_truth = truth is not None
        self._clock = clock
        self.confirmed_at_s: float | None = None

    async def refresh(self) -> bool:
        """As CachedDocument's, and learns as of when that is."""
        began_s = self._clock.now_s()
        changed = await super().refresh()
        confirmed_at_s = began_s if self._says_the_same(0) else await self._copied_at_s(began_s)
        if confirmed_at_s is not None:
            self.confirmed_at_s = max(self.confirmed_at_s or confirmed_at_s, confirmed_at_s)
        return changed

    def _says_the_same(self, position: int) -> bool:
        """Whether the source answered at this refresh, with what we hold.

        An empty store confirms only that there is nothing; it may have lost what we hold.
        """
        return position in self.answers and self.answers[position] == self.current

    async def _copied_at_s(self, now_s: float) -> float | None:
        if self._copy is None or not self._has_truth or self.current is None or not self._says_the_same(1):
            return None
        try:
            at_s = await self._copy.confirmed_at_s()
        except StoreUnavailable:
            return None
        return None if at_s is None else min(at_s, now_s)
