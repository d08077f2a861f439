"""The release book as a published document: in the store, and in a file that outlives it.

Whoever can write here decides what is served, so that neither is open to those who only measure: the store is the
stack's own, the file its owner's.
"""

from __future__ import annotations

from pathlib import Path
from typing import cast

import redis.asyncio

from serving.core.releases import RELEASE_BOOK_SCHEMA, ReleaseBook
from serving.store.connection import KEY_PREFIX, store_errors, text
from serving.store.documents import Codec
from serving.store.leases import FENCE, Lease, LeaseLost
from serving.store.published import DocumentKind, FileDocument, StoreDocument

RELEASE_BOOK = DocumentKind(
    what="release book",
    key=f"{KEY_PREFIX}releases",
    field="book",
    codec=Codec(ReleaseBook, "release book", schema=RELEASE_BOOK_SCHEMA),
    summary=lambda book: f"{len(book.releases)} models",
    mode=0o600,
)

# KEYS[2] the hash {epoch, digest, book}; ARGV[2] epoch, [3] the book. Answers the epoch in the way, or 0.
_PUBLISH_HELD = f"""{FENCE}
local there = tonumber(redis.call('HGET', KEYS[2], 'epoch') or '0')
if there >= tonumber(ARGV[2]) then return tostring(there) end
redis.call('HSET', KEYS[2], 'epoch', ARGV[2], 'digest', redis.sha1hex(ARGV[3]), '{RELEASE_BOOK.field}', ARGV[3])
return '0'
"""


class StoreReleaseBook(StoreDocument[ReleaseBook]):
    """The book in the store: source and sink."""

    def __init__(self, client: redis.asyncio.Redis) -> None:
        super().__init__(client, RELEASE_BOOK)
        self._redis = client

    async def publish_held(self, book: ReleaseBook, lease: Lease) -> None:
        """Publishes only while the lease is held, in one step with looking. Raises LeaseLost, or as `publish`."""
        data = RELEASE_BOOK.codec.encode(book)
        with store_errors("publish the release book"):
            answer = await self._redis.eval(
                _PUBLISH_HELD, 2, lease.key, RELEASE_BOOK.key, lease.value or "", str(book.epoch), data
            )
        there = text(cast("bytes | str", answer))
        if there == "lost":
            raise LeaseLost("the lease was lost: the release book stays as it was")
        if there != "0":
            raise RELEASE_BOOK.stale(book.epoch, int(there))


class FileReleaseBook(FileDocument[ReleaseBook]):
    """The book in a file that only its owner reads: source and sink."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, RELEASE_BOOK)
