"""Idempotency keys at the door: whoever comes first runs the request, whoever comes again gets its answer.

    claim ──▶ Owner    runs it; its recorder stores the answer while the client gets it
          └─▶ Follow   replays the answer from its start, and goes on live while it still runs
                         └── its worker died, or the key is free ──▶ claim again

Exact over all workers, for every transition is one script in the store. Without the store nothing runs under a key.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from serving.core.errors import ErrorCode, KeyReused, NotReplayable, ServingError, Unavailable, UpstreamError
from serving.core.policies.idempotency import ReplaySettings, StoreWatch, check_key
from serving.core.ports import Clock
from serving.core.tenancy import Tenant
from serving.gateway.http_errors import Headers
from serving.gateway.recorder import Owner
from serving.gateway.relay import Writer
from serving.gateway.replay_recording import until_answered
from serving.gateway.replay_seal import RUN_BYTES, SALT_BYTES, BrokenReplay, Opener, Sealer, TenantKeys
from serving.store.connection import StoreUnavailable
from serving.store.idempotency import Claim, Pipe, Place, ReplayStore, RunState

logger = logging.getLogger(__name__)

RETENTION_KIND = "replays"
"""The kind of data in a tenant's `retention_days` that speaks of stored answers."""
REPLAYED = (b"idempotent-replayed", b"true")
RETRY_AFTER_S = 1.0
CLOSE_TIMEOUT_S = 2.0


class Replays:
    """One worker's hold on idempotency keys."""

    def __init__(
        self,
        pipe: Pipe,
        secret: bytes,
        clock: Clock,
        settings: ReplaySettings | None = None,
        *,
        count: Callable[[str], None] | None = None,
    ) -> None:
        """A worker's; `start()` it.

        Args:
            pipe: to the store.
            secret: of all workers, so that each can read what the others stored.
            clock: for the lease.
            settings: bounds and times.
            count: told what each claim came to, as a label: `owned joined replayed reused not_replayable
                store_unavailable`.
        """
        self.settings = settings or ReplaySettings()
        self.store = ReplayStore(pipe, secrets.token_hex(8), self.settings.lease_s)
        self._keys = TenantKeys(secret)
        self._clock = clock
        self._watch = StoreWatch(self.settings.lease_s)
        self._count = count or (lambda outcome: None)
        self._tasks: set[asyncio.Task[None]] = set()
        self._beating: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Begins to say that this worker is alive."""
        self._beating = asyncio.get_running_loop().create_task(self._keep_beating())

    async def close(self) -> None:
        """Stores what is left to store, for a bounded time, and gives the lease back."""
        if self._tasks:
            await asyncio.wait(self._tasks, timeout=CLOSE_TIMEOUT_S)
        left = [task for task in (self._beating, *self._tasks) if task is not None]
        for task in left:
            task.cancel()
        await asyncio.gather(*left, return_exceptions=True)
        try:
            await self.store.leave()
        except StoreUnavailable:
            logger.warning("the store is away: this worker's idempotency keys are free when its lease has run out")

    @property
    def may_take_over(self) -> bool:
        """Whether a worker whose lease ran out is dead."""
        return self._watch.may_take_over(self._clock.monotonic_s())

    async def begin(
        self, tenant: Tenant, key: bytes, body_digest: bytes, endpoint: str, writer: Writer, headers: Headers
    ) -> Owner | None:
        """The owner, when the request is to be run; None when its answer was sent to `writer`.

        Args:
            tenant: whose key it is.
            key: value of the header Idempotency-Key.
            body_digest: SHA-256 of the request's body.
            endpoint: the route.
            writer: the client.
            headers: of the response, beside those that were stored.

        Raises:
            BadRequest: the key is not well formed.
            KeyReused: it came before with another body or on another route.
            NotReplayable: the request was run and its answer is not there.
            Unavailable: the store does not answer.
            UpstreamError: the run broke off, or its worker died, when a part of its stream was sent on already.
        """
        while True:
            turn = await self.claim(tenant, key, body_digest, endpoint)
            if isinstance(turn, Owner):
                return turn
            if await turn.relay(writer, headers):
                return None

    async def claim(self, tenant: Tenant, key: bytes, body_digest: bytes, endpoint: str) -> Owner | Follow:
        """One turn of `begin`. Raises BadRequest, KeyReused, NotReplayable, Unavailable."""
        check_key(key)
        print_of, who = self._keys.fingerprint, tenant.tenant_id.encode()
        place = Place.of(tenant.tenant_id, print_of(b"key", who, key).hex())
        body = print_of(b"body", who, endpoint.encode(), body_digest)
        try:
            found = await self._claim(tenant, place, body)
        except StoreUnavailable as error:
            self._count("store_unavailable")
            raise away(error) from error
        if found.state is RunState.OWNED:
            self._count("owned")
            return self._owner(tenant, place, found)
        if found.state is RunState.REUSED:
            self._count("reused")
            raise KeyReused(
                "this Idempotency-Key came before with another request: take a new key",
                code=ErrorCode.IDEMPOTENCY_KEY_REUSED,
            )
        if found.state is RunState.DROPPED or not found.kept:
            self._count("not_replayable")
            raise _not_replayable()
        self._count("replayed" if found.state is RunState.FINISHED else "joined")
        opener = Opener(self._keys.of_run(tenant.tenant_id, found.salt, found.run))
        return Follow(self, place, found, opener)

    async def _claim(self, tenant: Tenant, place: Place, body: bytes) -> Claim:
        if not self._watch.holds_lease(self._clock.monotonic_s()):
            await self._beat()
        run = secrets.token_bytes(RUN_BYTES)
        settings = self.settings
        answered = False
        try:
            found = await self.store.claim(
                place,
                body=body,
                run=run,
                new_salt=secrets.token_bytes(SALT_BYTES),
                keeps=tenant.stores_content,
                kept_s=settings.kept_s,
                content_kept_s=settings.content_kept_s(tenant.retention_days.get(RETENTION_KIND)),
                may_take_over=self.may_take_over,
            )
            answered = True
            return found
        finally:
            if not answered:  # it may have been done, and nobody would ever end the run
                self.spawn(self._give_back(place, run))

    async def _give_back(self, place: Place, run: bytes) -> None:
        await until_answered(lambda: self.store.close(place, run, drop=False))

    def _owner(self, tenant: Tenant, place: Place, found: Claim) -> Owner:
        sealer = Sealer(self._keys.of_run(tenant.tenant_id, found.salt, found.run)) if found.kept else None
        return Owner(self.store, place, found.run, self.settings, self.spawn, sealer)

    def spawn(self, work: Coroutine[Any, Any, None]) -> None:
        """Runs `work` on the side; `close()` waits for it."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _keep_beating(self) -> None:
        while True:
            try:
                await self._beat()
            except StoreUnavailable:
                self._watch.on_lost_beat()
                await asyncio.sleep(self._watch.interval_s / 4)
            else:
                await asyncio.sleep(self._watch.interval_s)

    async def _beat(self) -> None:
        began_s = self._clock.monotonic_s()
        await self.store.beat()
        self._watch.on_beat(began_s)


class Follow:
    """An answer that another request of the same key has, or is being given."""

    def __init__(self, replays: Replays, place: Place, found: Claim, opener: Opener) -> None:
        self._replays = replays
        self._place = place
        self._run = found.run
        self._next: tuple[RunState, Sequence[bytes]] = (found.state, found.parts)
        self._opener = opener
        self._is_begun = False
        self._held: list[bytes] = []
        self._may_write = asyncio.Event()

    async def relay(self, writer: Writer, headers: Headers) -> bool:
        """Sends the answer to its end; False when it has none, nothing was sent, and the key can be claimed again.

        Raises:
            NotReplayable: the answer became too large, was purged or cannot be read.
            Unavailable: the store does not answer.
            UpstreamError: the run broke off, or its worker died, and a part of its stream was sent.
        """
        self._may_write.set()
        while True:
            state, parts = self._next
            body = self._open(parts)
            if state is RunState.FINISHED:
                self._finish(writer, headers, body)
                return True
            if state is RunState.DROPPED:
                raise _not_replayable()
            if state is not RunState.RUNNING:
                if not self._is_begun:
                    return False
                raise UpstreamError("the run that was followed broke off: send the request again with the same key")
            self._send(writer, headers, body)
            await asyncio.sleep(self._replays.settings.poll_s)
            if not self._may_write.is_set():
                await self._may_write.wait()
            self._next = await self._read()

    def _open(self, parts: Sequence[bytes]) -> bytes:
        try:
            return self._opener.body(parts)
        except BrokenReplay as error:
            logger.error("%s: do all workers have the same secret?", error.message)
            raise _not_replayable() from error

    def _send(self, writer: Writer, headers: Headers, body: bytes) -> None:
        """Sends a piece of a stream; holds that of a whole answer."""
        head = self._opener.head
        if head is None or not head.is_stream:
            self._held.append(body)
            return
        if not self._is_begun:
            self._is_begun = True
            writer.start(head.status, [*head.headers, *headers, REPLAYED])
            writer.on_pause = self._on_pause
            self._on_pause(writer.is_paused)
        if body:
            writer.write(body)

    def _finish(self, writer: Writer, headers: Headers, body: bytes) -> None:
        head = self._opener.head
        if head is None:
            raise _not_replayable()
        if head.is_stream:
            self._send(writer, headers, b"")
            writer.end(body)
        else:
            writer.whole(head.status, [*head.headers, *headers, REPLAYED], b"".join((*self._held, body)))

    def _on_pause(self, paused: bool) -> None:
        if paused:
            self._may_write.clear()
        else:
            self._may_write.set()

    async def _read(self) -> tuple[RunState, Sequence[bytes]]:
        """The next parts; a store that is away for less than a lease is waited for."""
        try:
            return await self._read_once()
        except StoreUnavailable as error:
            try:
                async with asyncio.timeout(self._replays.settings.lease_s):
                    return await until_answered(self._read_once)
            except TimeoutError:
                raise away(error) from error

    async def _read_once(self) -> tuple[RunState, Sequence[bytes]]:
        replays = self._replays
        return await replays.store.read(
            self._place, self._run, self._opener.num_parts, may_take_over=replays.may_take_over
        )


def away(cause: Exception) -> Unavailable:
    """The answer to a request with a key when the store does not answer."""
    reason = cause.message if isinstance(cause, ServingError) else "it does not answer"
    return Unavailable(
        f"a request with an Idempotency-Key is not run without the store ({reason})",
        code=ErrorCode.STORE_UNAVAILABLE,
        retry_after_s=RETRY_AFTER_S,
    )


def _not_replayable() -> NotReplayable:
    return NotReplayable(
        "the request with this Idempotency-Key was run, or runs, and its answer is not kept: take a new key to run it"
    )
