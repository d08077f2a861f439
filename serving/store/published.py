"""A published document with an epoch: in the store, in a file and in memory, and the cache a worker serves from.

The routing table and the tenant directory are such documents. Publishing goes by epoch: a document is taken only
when its epoch is higher than the one that is there, so that two publishers can't overwrite each other unseen. A
worker reads every source, keeps the newest, and goes on with what it has when none answers.
"""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar

import redis.asyncio

from serving.core.errors import ServingError, StaleEpoch
from serving.store.connection import BrokenDocument, StoreUnavailable, store_errors
from serving.store.documents import Codec, locked, read_file, write_file

logger = logging.getLogger(__name__)


class HasEpoch(Protocol):
    """A document that is published whole."""

    @property
    def epoch(self) -> int:
        """Rises with each publication."""
        ...


D = TypeVar("D", bound=HasEpoch)
D_co = TypeVar("D_co", bound=HasEpoch, covariant=True)
D_contra = TypeVar("D_contra", bound=HasEpoch, contravariant=True)

# KEYS[1] the hash {epoch, digest, FIELD}; ARGV epoch, document, FIELD. Answers the epoch in the way, or 0.
_PUBLISH = """
local there = tonumber(redis.call('HGET', KEYS[1], 'epoch') or '0')
if there >= tonumber(ARGV[1]) then return there end
redis.call('HSET', KEYS[1], 'epoch', ARGV[1], 'digest', redis.sha1hex(ARGV[2]), ARGV[3], ARGV[2])
return 0
"""


@dataclass(frozen=True, slots=True)
class DocumentKind(Generic[D]):
    """What is published and how.

    `what` names it in messages; `key` and `field` are its place in the store; `summary` is the end of the line in
    the log when it is taken up; `mode` are the file's permissions, None for those that the process gives.
    """

    what: str
    key: str
    field: str
    codec: Codec[D]
    summary: Callable[[D], str]
    mode: int | None = None

    def stale(self, epoch: int, there: int) -> StaleEpoch:
        """The error for a publisher that is behind."""
        return StaleEpoch(f"{self.what} of epoch {epoch} is not newer than the published epoch {there}")


class Source(Protocol[D_co]):
    """Where a document is read from."""

    async def read(self) -> D_co | None:
        """The newest document, None when none was published. Raises StoreUnavailable, BrokenDocument."""
        ...


class StoreDocument(Generic[D]):
    """The document in the store: source and sink. Its bytes are fetched only when they have changed."""

    def __init__(self, client: redis.asyncio.Redis, kind: DocumentKind[D]) -> None:
        self._client = client
        self._kind = kind
        self._publish = client.register_script(_PUBLISH)
        self._last: tuple[list[Any], D] | None = None

    async def read(self) -> D | None:
        """The newest document or None. Raises StoreUnavailable, BrokenDocument."""
        kind = self._kind
        with store_errors(f"read the {kind.what}"):
            stamp = await self._client.hmget(kind.key, ["epoch", "digest"])
            if self._last is not None and self._last[0] == stamp and None not in stamp:
                return self._last[1]
            *stamp, data = await self._client.hmget(kind.key, ["epoch", "digest", kind.field])
        if data is None:
            return None
        document = kind.codec.decode(data)
        self._last = (stamp, document)
        return document

    async def publish(self, document: D) -> None:
        """Publishes atomically. Raises StaleEpoch, StoreUnavailable, BrokenDocument."""
        kind = self._kind
        data = kind.codec.encode(document)
        with store_errors(f"publish the {kind.what}"):
            there = await self._publish(keys=[kind.key], args=[document.epoch, data, kind.field])
        if there:
            raise kind.stale(document.epoch, there)


class FileDocument(Generic[D]):
    """The document in a file that is replaced in one step: source and sink."""

    def __init__(self, path: Path, kind: DocumentKind[D]) -> None:
        self.path = path
        self._kind = kind
        self._last: tuple[bytes, D] | None = None

    async def read(self) -> D | None:
        """The document in the file, None without a file. Raises StoreUnavailable, BrokenDocument."""
        data = await asyncio.to_thread(read_file, self.path)
        if data is None:
            return None
        if self._last is None or self._last[0] != data:
            try:
                self._last = (data, self._kind.codec.decode(data))
            except BrokenDocument as error:
                raise BrokenDocument(f"{self.path}: {error.message}") from error
        return self._last[1]

    async def publish(self, document: D) -> None:
        """Replaces the file. Raises StaleEpoch, StoreUnavailable, BrokenDocument. A broken file is overwritten."""
        await asyncio.to_thread(self._publish, document)

    async def confirm(self, at_s: float) -> None:
        """Marks the file as what the truth said at `at_s`: its time of change. Raises StoreUnavailable."""
        try:
            await asyncio.to_thread(os.utime, self.path, (at_s, at_s))
        except OSError as error:
            raise StoreUnavailable(f"cannot confirm {self.path}: {error.strerror or error}") from error

    async def confirmed_at_s(self) -> float | None:
        """When the file was last written or confirmed (Unix seconds), None without one. Raises StoreUnavailable."""
        try:
            return (await asyncio.to_thread(self.path.stat)).st_mtime
        except FileNotFoundError:
            return None
        except OSError as error:
            raise StoreUnavailable(f"cannot look at {self.path}: {error.strerror or error}") from error

    def _publish(self, document: D) -> None:
        data = self._kind.codec.encode(document)
        with locked(self.path):
            there = self._epoch_there()
            if there >= document.epoch:
                raise self._kind.stale(document.epoch, there)
            write_file(self.path, data, self._kind.mode)

    def _epoch_there(self) -> int:
        data = read_file(self.path)
        if data is None:
            return 0
        try:
            return self._kind.codec.decode(data).epoch
        except BrokenDocument as error:
            logger.warning("overwriting %s: %s", self.path, error.message)
            return 0


class MemoryDocument(Generic[D]):
    """The document in this process, for tests and the simulator: source and sink."""

    def __init__(self, kind: DocumentKind[D]) -> None:
        self._kind = kind
        self._document: D | None = None

    async def read(self) -> D | None:
        """The last document published, or None."""
        return self._document

    async def publish(self, document: D) -> None:
        """Keeps the document. Raises StaleEpoch, BrokenDocument."""
        self._kind.codec.encode(document)
        if self._document is not None and self._document.epoch >= document.epoch:
            raise self._kind.stale(document.epoch, self._document.epoch)
        self._document = document


class Listener(Protocol[D_contra]):
    """Takes up a new document."""

    def __call__(self, document: D_contra, /) -> None:
        """Raises ServingError or ValueError to refuse the document."""
        ...


class CachedDocument(Generic[D]):
    """The newest document that any source had and the listener took; polled, never asked on the hot path.

    Attributes:
        current: what was taken up last.
        answers: what each source that answered said at the last refresh, by its position.
    """

    def __init__(
        self,
        sources: Sequence[Source[D]],
        on_change: Listener[D],
        kind: DocumentKind[D],
        *,
        poll_s: float = 0.5,
    ) -> None:
        """`sources` in the order in which they are asked; `on_change` is called for each newer document."""
        self._sources = tuple(sources)
        self._on_change = on_change
        self._kind = kind
        self._poll_s = poll_s
        self._refused: D | None = None
        self._complaints: dict[int, str] = {}
        self.current: D | None = None
        self.answers: dict[int, D | None] = {}

    async def refresh(self) -> bool:
        """Asks every source once; True when a newer document was taken up. Logs what it refuses, raises nothing."""
        self.answers = {}
        for position in range(len(self._sources)):
            await self._read(position)
        found = [document for document in self.answers.values() if document is not None]
        for document in sorted(found, key=lambda document: -document.epoch):
            if self.current is not None and document.epoch <= self.current.epoch:
                return False
            if document != self._refused and self._take_up(document):
                return True
        return False

    async def run(self) -> None:
        """Refreshes every `poll_s` until cancelled."""
        while True:
            await self.refresh()
            await asyncio.sleep(self._poll_s)

    async def _read(self, position: int) -> None:
        try:
            self.answers[position] = await self._sources[position].read()
        except ServingError as error:
            if self._complaints.get(position) != error.message:
                logger.warning("%s: %s; keeping epoch %s", self._kind.what, error.message, self._epoch())
                self._complaints[position] = error.message
            return
        self._complaints.pop(position, None)

    def _take_up(self, document: D) -> bool:
        what = self._kind.what
        try:
            self._on_change(document)
        except (ServingError, ValueError) as error:
            logger.error("%s of epoch %d refused: %s; keeping epoch %s", what, document.epoch, error, self._epoch())
            self._refused = document
            return False
        self.current = document
        logger.info("%s of epoch %d taken up: %s", what, document.epoch, self._kind.summary(document))
        return True

    def _epoch(self) -> object:
        return "none" if self.current is None else self.current.epoch
