"""Owns the release book: who is champion, by the control plane's own record, and what the registry shows of it.

    book      the store's copy and the file's are kept equal; the newer one counts, of one epoch the store's
    alias     shows the champion to people. What it says otherwise is put back and is an alarm
    claims    versions whose tags changed are judged, so that what is forged is gone before a rollout asks

A model that the book doesn't know takes its champion from the alias, once: its first registration set it. The book is
written, and the registry put right, only by the control plane that holds the lease.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import redis.asyncio

from serving.control.compose import Registered
from serving.control.judge import Claims, RecordJudge
from serving.control.release_events import CHAMPION_APPOINTED, ReleaseEvents
from serving.control.troubles import Troubles
from serving.core.approval import CHAMPION, TAG_WEIGHTS, Alarm, Finding, ReleasePolicy, is_reserved
from serving.core.errors import ServingError, StaleEpoch, Unavailable
from serving.core.ports import Clock
from serving.core.releases import Champion, Evidence, ReleaseBook, appointed, of_registry
from serving.store.leases import Lease
from serving.store.releases import FileReleaseBook, StoreReleaseBook

logger = logging.getLogger(__name__)

TRY_AGAIN_S, LOOK_AGAIN_S = 5.0, 1.0


class Shown(Claims, Protocol):
    """The registry as the desk reads and writes it."""

    def said_champion(self, model: str) -> str | None:
        """What the alias says. Raises ServingError."""
        ...

    def set_champion(self, model: str, version: str) -> None:
        """Makes the alias say the version. Raises ServingError."""
        ...


@dataclass(frozen=True, slots=True)
class ReleaseParts:
    """What a desk is made of.

    `path` is the book's file, `copies` the folder of recorded evidence documents; None keeps none.
    """

    registry: Shown
    events: ReleaseEvents
    policy: ReleasePolicy = field(default_factory=ReleasePolicy)
    path: Path | None = None
    copies: Path | None = None


class ReleaseDesk:
    """Looked after by the control plane's loop.

    Attributes:
        book: the newest book known.
        judge: judges versions by it.
    """

    def __init__(
        self, client: redis.asyncio.Redis, lease: Lease, parts: ReleaseParts, clock: Clock, troubles: Troubles
    ) -> None:
        """Writes only while `lease` is held; `troubles` is told what does not answer."""
        self._store = StoreReleaseBook(client)
        self._file = None if parts.path is None else FileReleaseBook(parts.path)
        self._lease = lease
        self._registry = parts.registry
        self._events = parts.events
        self._clock = clock
        self._troubles = troubles
        self._found = Registered({}, {})
        self._shown: dict[str, Champion] = {}
        self._judged: dict[tuple[str, str], object] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._due_s: dict[str, float] = {}
        self.book = ReleaseBook()
        self.judge = RecordJudge(lambda: self.book, parts.registry, parts.policy, clock, parts.events, parts.copies)

    async def step(self, found: Registered | None) -> Registered | None:
        """One look: `found` is the registry's last word; the answer has the champions that count instead of its own."""
        await self._sync()
        if found is None:
            return None
        self._found = found
        if self._lease.value is not None:
            await self._belong(found)
            await self._adopt(found)
            self._put_right(found)
        recorded = {one.model: one.champion.version for one in self.book.releases if one.champion is not None}
        return replace(found, champions={**found.champions, **recorded})

    async def appoint(self, model: str, version: str, why: str) -> None:
        """Makes the version champion in the book; the alias follows. Raises ServingError; nothing was written then."""
        digest = self._found.claims.get(model, {}).get(version, {}).get(TAG_WEIGHTS)
        changed = appointed(self.book, model, version, digest, self._clock.now_s(), why)
        if changed is self.book:
            return
        book = self._next(changed)
        await self._store.publish_held(book, self._lease)
        self.book = book
        self._events.notice(CHAMPION_APPOINTED, model, version, f"champion: {why}")
        if self._file is not None:
            await self._publish(self._file, book)

    async def settled(self) -> None:
        """Returns when the registry has answered what it was told so far."""
        await asyncio.gather(*self._tasks.values())

    async def stop(self) -> None:
        """Ends what runs in the background."""
        for task in self._tasks.values():
            task.cancel()
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)

    async def _sync(self) -> None:
        """Takes up the newest book, and brings the place that is behind up to it."""
        in_store, in_file = await self._read(self._store), await self._read(self._file)
        if in_store is not None and in_file is not None and in_store.epoch == in_file.epoch and in_store != in_file:
            in_store = self._next(in_store)
        known = [book for book in (in_store, in_file) if book is not None]
        self.book = max([self.book, *known], key=lambda book: book.epoch)
        if self._lease.value is None or self.book.epoch == 0:
            return
        for place, there in ((self._store, in_store), (self._file, in_file)):
            if place is not None and there != self.book:
                await self._publish(place, self.book)

    async def _read(self, place: StoreReleaseBook | FileReleaseBook | None) -> ReleaseBook | None:
        if place is None:
            return None
        topic = f"reading {type(place).__name__}"
        try:
            found = await place.read()
        except ServingError as error:
            self._troubles.begin(topic, f"{error.message}; releases stand as last known")
            return None
        self._troubles.over(topic)
        return found

    async def _publish(self, place: StoreReleaseBook | FileReleaseBook, book: ReleaseBook) -> None:
        topic = f"publishing to {type(place).__name__}"
        try:
            if isinstance(place, StoreReleaseBook):
                await place.publish_held(book, self._lease)
            else:
                await place.publish(book)
            self._troubles.over(topic)
        except StaleEpoch:
            return  # somebody wrote in this moment, or the lease went: the next look sees it
        except ServingError as error:
            self._troubles.begin(topic, error.message)

    async def _belong(self, found: Registered) -> None:
        """Begins an empty book where the registry is another one than the book's."""
        if not found.registry or found.registry == self.book.registry:
            return
        if self.book.registry:
            logger.warning(
                "the release book is of %r, and the registry now is %r: it begins anew",
                self.book.registry,
                found.registry,
            )
        book = self._next(of_registry(self.book, found.registry))
        for place in (self._store, self._file):
            if place is not None:
                await self._publish(place, book)
        self.book, self._shown, self._judged = book, {}, {}

    async def _adopt(self, found: Registered) -> None:
        """Models with pools that have an alias, and no champion in the book yet."""
        for model in found.versions:
            version = found.champions.get(model)
            if version is None or self.book.of(model).champion is not None:
                continue
            try:
                await self.appoint(model, version, "the registry's champion when the model was first seen")
            except StaleEpoch:
                return
            except ServingError as error:
                self._troubles.begin("release book", error.message)
                return

    def _put_right(self, found: Registered) -> None:
        for model in found.versions:
            champion = self.book.of(model).champion
            if champion is not None and (self._shown.get(model) != champion or self._differs(found, model, champion)):
                self._begin(f"champion of {model}", self._show(model, champion))
            for version, tags in found.claims.get(model, {}).items():
                newest = next(iter(self.book.of(model).evidence_of(version)), None)
                has_claims = newest is not None or set(tags) - {TAG_WEIGHTS}
                if has_claims and self._judged.get((model, version)) != (tags, newest):
                    self._begin(f"claims of {model}@{version}", self._look(model, version, newest))

    def _differs(self, found: Registered, model: str, champion: Champion) -> bool:
        said = found.claims.get(model, {}).get(champion.version, {}).get(TAG_WEIGHTS)
        return found.champions.get(model) != champion.version or (
            champion.weights_digest is not None and said != champion.weights_digest
        )

    def _begin(self, topic: str, doing: Coroutine[None, None, None]) -> None:
        """Does it in the background, one thing of a topic at a time and not all the time."""
        now_s = self._clock.monotonic_s()
        if topic in self._tasks or now_s < self._due_s.get(topic, now_s):
            doing.close()
            return
        task = asyncio.create_task(self._told(topic, doing))
        self._tasks[topic] = task
        task.add_done_callback(lambda _: self._tasks.pop(topic, None))

    async def _told(self, topic: str, doing: Coroutine[None, None, None]) -> None:
        try:
            await doing
        except ServingError as error:
            self._troubles.begin(topic, f"{topic}: {error.message}; tried again")
            self._due_s[topic] = self._clock.monotonic_s() + TRY_AGAIN_S
        else:
            self._troubles.over(topic)
            self._due_s[topic] = self._clock.monotonic_s() + LOOK_AGAIN_S

    async def _show(self, model: str, champion: Champion) -> None:
        """Makes alias and weights say what the book says. Right after a change the version before is no forgery."""
        version, digest = champion.version, champion.weights_digest
        said = await asyncio.to_thread(self._registry.said_champion, model)
        weights = (await asyncio.to_thread(self._registry.tags, model, version)).get(TAG_WEIGHTS)
        findings = []
        late = () if self._shown.get(model) == champion else (champion.previous, None)
        if said not in (version, *late):
            text = f"the alias {CHAMPION} was {said or 'taken away'}; {version} is served throughout, and shown again"
            findings.append(Finding(Alarm.ALIAS_FORGED, model, said or version, text))
        if digest is not None and weights != digest:
            text = f"the champion's {TAG_WEIGHTS} said {weights}; {digest} was recorded, and is shown again"
            findings.append(Finding(Alarm.WEIGHTS_CHANGED, model, version, text))
        self._events.alarms("champion", model, version, findings)
        if said != version:
            await asyncio.to_thread(self._registry.set_champion, model, version)
        if digest is not None and weights != digest:
            await asyncio.to_thread(self._registry.write_tags, model, version, {TAG_WEIGHTS: digest})
        self._events.alarms("champion", model, version, ())
        self._shown[model] = champion

    async def _look(self, model: str, version: str, newest: Evidence | None) -> None:
        _, tags = await asyncio.to_thread(self.judge.look, model, version)
        reserved = None if tags is None else {tag: value for tag, value in tags.items() if is_reserved(tag)}
        self._judged[model, version] = (reserved, newest)
        if tags is None:
            raise Unavailable(f"tags of {model}@{version} could not be put right")

    def _next(self, book: ReleaseBook) -> ReleaseBook:
        return replace(book, epoch=book.epoch + 1, published_at_s=self._clock.now_s())
