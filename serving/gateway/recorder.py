"""The request that runs under an idempotency key, and the writer that copies its answer into the store.

    complete, and final     kept: replayed to who comes again; or not kept: 409 to who comes again
    an error before it      the key is free at once
    cut off, never begun    the key is free when the owner is closed

A run with a key goes on when its client leaves: the client's retry joins it. So a client that stops reading, as one
does whose network has gone, must not hold it up either, as long as the answer is kept.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from serving.core.errors import ServingError
from serving.core.policies.idempotency import ReplaySettings, is_final
from serving.gateway.http_errors import Headers, error_response
from serving.gateway.relay import Writer
from serving.gateway.replay_recording import Recording, Spawn, until_answered
from serving.gateway.replay_seal import Head, Sealer
from serving.store.idempotency import Place, ReplayStore


class Client(Writer, Protocol):
    """The client's own end: an Exchange."""

    def fail(self, error: ServingError, headers: Headers) -> None:
        """Sends an error as a complete response."""
        ...


class Owner:
    """A request that runs under its key. `close()` it when the run is over, however it ended."""

    def __init__(
        self,
        store: ReplayStore,
        place: Place,
        run: bytes,
        settings: ReplaySettings,
        spawn: Spawn,
        sealer: Sealer | None,
    ) -> None:
        """`sealer`: None when the tenant wants no content stored."""
        self._store = store
        self._place = place
        self._run = run
        self._spawn = spawn
        self.settings = settings
        self.on_dropped: Callable[[], None] | None = None
        self._is_over = False
        self._recording: Recording | None = None
        if sealer is not None:
            self._recording = Recording(store, place, run, sealer, settings, spawn, self._dropped)

    @property
    def keeps(self) -> bool:
        """Whether a retry can be given this run's answer. If not, and its client left, nobody will read it."""
        return self._recording is not None and self._recording.keeps

    def recorder(self, client: Client) -> Recorder:
        """A writer that sends to `client` and records what it sends."""
        return Recorder(client, self)

    def close(self) -> None:
        """Frees the key unless the answer is complete. Never waits, never raises."""
        if not self._is_over:
            self._settle(drop=False)

    # ---- called by the recorder

    def add(self, data: bytes) -> None:
        """The next piece of the answer."""
        if self._recording is not None:
            self._recording.add(data)

    def complete(self, data: bytes) -> None:
        """The last piece: the answer is complete."""
        self._is_over = True
        if self._recording is None:
            self._settle(drop=True)
        else:
            self._recording.end(data)

    def free(self) -> None:
        """The answer says to try again."""
        self._settle(drop=False)

    def _dropped(self) -> None:
        if self.on_dropped is not None:
            self.on_dropped()

    def _settle(self, *, drop: bool) -> None:
        self._is_over = True
        if self._recording is not None:
            self._recording.stop()
        self._spawn(self._close(drop))

    async def _close(self, drop: bool) -> None:
        await until_answered(lambda: self._store.close(self._place, self._run, drop=drop))


class Recorder:
    """A Writer between an answer and its client.

    Attributes:
        on_pause: called with True when the engine is to be held up, with False when it may go on.
        is_paused: whether it is held up now.
        status: of the response, also when its client has left; 0 before its head.
    """

    def __init__(self, client: Client, owner: Owner) -> None:
        self.on_pause: Callable[[bool], None] | None = None
        self.is_paused = False
        self.status = 0
        self._client = client
        self._owner = owner
        self._client_paused = client.is_paused
        self._num_unread_bytes = 0
        client.on_pause = self._on_client_pause
        owner.on_dropped = self._weigh

    @property
    def is_started(self) -> bool:
        """Whether a head was sent."""
        return self.status != 0

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Begins a body that comes in chunks, with its first part."""
        self.status = status
        self._client.start(status, headers, data)
        self._owner.add(Head(status, True, headers).encode())
        if data:
            self._owner.add(data)

    def write(self, data: bytes) -> None:
        """Sends a part of it."""
        self._client.write(data)
        self._owner.add(data)
        if self._client_paused:
            self._num_unread_bytes += len(data)
            self._weigh()

    def end(self, data: bytes = b"") -> None:
        """Sends the last part."""
        self._client.end(data)
        self._owner.complete(data)

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete response; one that says to try again frees the key."""
        self._client.whole(status, headers, body)
        self._record_whole(status, headers, body)

    def fail(self, error: ServingError, headers: Headers) -> None:
        """Sends an error as a complete response."""
        self._client.fail(error, headers)
        status, own, body = error_response(error)
        self._record_whole(status, own, body)

    def detach(self) -> bool:
        """The client has left, and holds nothing up any more; True when the run goes on for who comes again."""
        self._client_paused = False
        self._weigh()
        return self._owner.keeps

    def _record_whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.status = status
        if not is_final(status):
            self._owner.free()
            return
        self._owner.complete(Head(status, False, headers).encode() + body)

    def _on_client_pause(self, paused: bool) -> None:
        self._client_paused = paused
        self._num_unread_bytes = 0
        self._weigh()

    def _weigh(self) -> None:
        too_much = not self._owner.keeps or self._num_unread_bytes > self._owner.settings.max_unread_bytes
        paused = self._client_paused and too_much
        if paused != self.is_paused:
            self.is_paused = paused
            if self.on_pause is not None:
                self.on_pause(paused)
