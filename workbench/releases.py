"""Tells the control plane what the gates said of a version: the one way by which evidence comes to count.

    1. the evidence document is an artifact of an MLflow run; its bytes are hashed
    2. `record_evidence` writes the digest and the verdicts into the release book: in the store, or in its file while
       no stack runs (the control plane takes that up)
    3. the control plane shows them as tags of the version, for people

What was not recorded counts for nothing, whatever the tags say.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from serving.core import gate_record
from serving.core.errors import BadRequest, StaleEpoch
from serving.core.gate_record import EVIDENCE_FILE, FOLDER
from serving.core.releases import Evidence, ReleaseBook, recorded
from serving.core.sequential import Verdict
from serving.store.connection import connect
from serving.store.releases import FileReleaseBook, StoreReleaseBook
from workbench.config import WorkbenchConfig
from workbench.wiring import NotRunning, layout, store_url

EVIDENCE_PATH = f"{FOLDER}/{EVIDENCE_FILE}"
"""Where the evidence document lies in its run. Only the service account may write below `gate/`."""
MAX_TRIES = 20


async def record_evidence(
    config: WorkbenchConfig,
    model: str,
    version: str,
    document: bytes,
    run_id: str,
    verdicts: Mapping[str, Verdict],
    *,
    weights_digest: str | None,
    path: str = EVIDENCE_PATH,
) -> Evidence:
    """Records the evidence document that lies at `path` of the run; the digest to approve is its beginning.

    Args:
        config: whose stack.
        model: the served name.
        version: the one that was judged.
        document: the very bytes of the artifact.
        run_id: the MLflow run that holds it.
        verdicts: by tag, such as `gate.quality`; every gate's must be there and pass for a pass.
        weights_digest: the version's `weights.digest`.
        path: of the artifact in its run.

    Raises:
        BadRequest: no run id or path that can be.
        StoreUnavailable, BrokenDocument, StaleEpoch: it could not be written.
    """
    try:
        digest = gate_record.digest(document)
        evidence = Evidence(version, digest, run_id, path, dict(verdicts), weights_digest, time.time())
    except ValueError as error:
        raise BadRequest(str(error)) from error
    await _edit(config, lambda book: recorded(book, model, evidence))
    return evidence


async def read_book(config: WorkbenchConfig) -> ReleaseBook:
    """The book that counts; an empty one when there is none. Raises StoreUnavailable, BrokenDocument."""
    file = FileReleaseBook(layout(config).releases_path)
    try:
        client = connect(store_url(config))
    except NotRunning:
        return await file.read() or ReleaseBook()
    try:
        return await _newest(StoreReleaseBook(client), file)
    finally:
        await client.aclose()


async def _edit(config: WorkbenchConfig, change: Callable[[ReleaseBook], ReleaseBook]) -> None:
    file = FileReleaseBook(layout(config).releases_path)
    try:
        client = connect(store_url(config))
    except NotRunning:
        await file.publish(_next(change(await file.read() or ReleaseBook())))
        return
    try:
        store = StoreReleaseBook(client)
        for _ in range(MAX_TRIES):
            try:
                await store.publish(_next(change(await _newest(store, file))))
                return
            except StaleEpoch:
                continue
    finally:
        await client.aclose()
    raise StaleEpoch(f"the release book was changed by others {MAX_TRIES} times in a row; try again")


async def _newest(store: StoreReleaseBook, file: FileReleaseBook) -> ReleaseBook:
    found = [book for book in (await store.read(), await file.read()) if book is not None]
    return max(found, key=lambda book: book.epoch, default=ReleaseBook())


def _next(book: ReleaseBook) -> ReleaseBook:
    return replace(book, epoch=book.epoch + 1, published_at_s=time.time())
