"""The issuers' key sets as this worker knows them: from the directory, and from the issuers themselves.

    directory       the last good answer that the control plane had; all that a worker with nothing else needs
    time to live    each set with an address is fetched again about every 5 minutes, in the background
    unknown key id  the issuer may have rotated its keys: one fetch, shared by all who wait, every 10 s at most

A set that can't be fetched stands as last known.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
from collections.abc import Callable, Sequence

from serving.core.errors import ServingError
from serving.core.ports import Clock
from serving.core.tenancy import Issuer
from serving.store.jwks import Fetch, VerifyKey, fetch_jwks, parse_jwks

logger = logging.getLogger(__name__)

TTL_S = 300.0
RETRY_S = 30.0
MIN_REFRESH_S = 10.0
LOOK_S = 1.0
# Workers that started together do not ask together.
JITTER = (0.75, 1.25)


class _KeySet:
    """One issuer's keys, and when they are due."""

    def __init__(self) -> None:
        self.keys: tuple[VerifyKey, ...] = ()
        self.published: str | None = None
        self.text: str | None = None
        self.due_s = 0.0
        self.asked_s: float | None = None
        self.fetching: asyncio.Task[bool] | None = None


class KeySets:
    """Keys by issuer.

    Args:
        clock: for the time to live.
        rng: spreads the fetches of workers.
        on_change: told when an issuer's keys have changed, so that what was verified by the old ones is forgotten.
        fetch: asks an address for its set; tests hand in their own.
    """

    def __init__(
        self, clock: Clock, rng: random.Random, on_change: Callable[[], None], *, fetch: Fetch = fetch_jwks
    ) -> None:
        self._clock = clock
        self._rng = rng
        self._on_change = on_change
        self._fetch = fetch
        self._sets: dict[Issuer, _KeySet] = {}

    def on_issuers(self, issuers: Sequence[Issuer]) -> None:
        """Takes up what the directory says. A set that it did not change stays as this worker fetched it."""
        known = {_identity(issuer): key_set for issuer, key_set in self._sets.items()}
        self._sets = {issuer: known.get(_identity(issuer)) or self._new() for issuer in issuers}
        for issuer, key_set in self._sets.items():
            if issuer.jwks is not None and issuer.jwks != key_set.published:
                key_set.published = issuer.jwks
                self._take_up(issuer, key_set, issuer.jwks)

    def keys_of(self, issuer: Issuer) -> tuple[VerifyKey, ...]:
        """The keys as known now, perhaps none."""
        key_set = self._sets.get(issuer)
        return () if key_set is None else key_set.keys

    async def refresh(self, issuer: Issuer) -> bool:
        """Looks for a newer set now, unless that was done a moment ago; True when the keys have changed."""
        key_set = self._sets.get(issuer)
        if key_set is None or issuer.jwks_url is None:
            return False
        if key_set.fetching is None:
            now_s = self._clock.monotonic_s()
            if key_set.asked_s is not None and now_s - key_set.asked_s < MIN_REFRESH_S:
                return False
            self._begin(issuer, key_set)
        assert key_set.fetching is not None
        return await asyncio.shield(key_set.fetching)

    def look(self) -> None:
        """Begins to fetch the sets that are due."""
        now_s = self._clock.monotonic_s()
        for issuer, key_set in self._sets.items():
            if issuer.jwks_url is not None and key_set.fetching is None and now_s >= key_set.due_s:
                self._begin(issuer, key_set)

    async def run(self) -> None:
        """Looks every second until cancelled."""
        while True:
            self.look()
            await asyncio.sleep(LOOK_S)

    async def stop(self) -> None:
        """Ends what is being fetched."""
        tasks = [key_set.fetching for key_set in self._sets.values() if key_set.fetching is not None]
        for task in tasks:
            task.cancel()
        for task in tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task

    def _new(self) -> _KeySet:
        return _KeySet()

    def _begin(self, issuer: Issuer, key_set: _KeySet) -> None:
        key_set.asked_s = self._clock.monotonic_s()
        key_set.fetching = asyncio.create_task(self._renew(issuer, key_set))

    async def _renew(self, issuer: Issuer, key_set: _KeySet) -> bool:
        assert issuer.jwks_url is not None
        wait_s = RETRY_S
        try:
            text = await self._fetch(issuer.jwks_url)
            changed = text != key_set.text and self._take_up(issuer, key_set, text)
            wait_s = TTL_S
        except ServingError as error:
            logger.warning("%s; its %d keys stand as last known", error.message, len(key_set.keys))
            changed = False
        finally:
            key_set.due_s = self._clock.monotonic_s() + wait_s * self._rng.uniform(*JITTER)
            key_set.fetching = None
        return changed

    def _take_up(self, issuer: Issuer, key_set: _KeySet, text: str) -> bool:
        try:
            keys = parse_jwks(text)
        except ServingError as error:
            logger.error(
                "issuer %s: %s; its %d keys stand as last known", issuer.issuer, error.message, len(key_set.keys)
            )
            return False
        key_set.keys, key_set.text = keys, text
        logger.info("issuer %s: %d keys taken up", issuer.issuer, len(keys))
        self._on_change()
        return True


def _identity(issuer: Issuer) -> tuple[str, str, str | None]:
    return issuer.issuer, issuer.audience, issuer.jwks_url
