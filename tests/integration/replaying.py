"""Clients and runs for the tests of idempotency; as a program, a worker that runs requests until it is killed."""

from __future__ import annotations

import asyncio
import hashlib
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from serving.clock import SystemClock
from serving.core.errors import ServingError
from serving.core.policies.idempotency import ReplaySettings
from serving.core.tenancy import Tenant
from serving.gateway.http_errors import Headers, error_response
from serving.gateway.idempotency import Replays
from serving.gateway.recorder import Owner
from serving.store.connection import connect
from serving.store.idempotency import REPLAYS
from serving.store.pipelined import StorePipe
from serving.store.server import StoreServer

CHAT = "/v1/chat/completions"
SECRET = b"secret of all workers"
TENANT = Tenant("t", models=("*",))
EVENT_STREAM: Headers = [(b"content-type", b"text/event-stream"), (b"x-served-by", b"p; 1; 1/-")]
JSON: Headers = [(b"content-type", b"application/json"), (b"x-request-id", b"first")]
# Times a tenth of the real ones, so that a dead worker is noticed soon.
QUICK = ReplaySettings(lease_s=0.6, flush_s=0.02, poll_s=0.02)


class Client:
    """What was sent to one client."""

    def __init__(self) -> None:
        self.on_pause: Callable[[bool], None] | None = None
        self.is_paused = False
        self.status = 0
        self.headers: dict[bytes, bytes] = {}
        self.body = b""
        self.is_complete = False
        self.is_whole = False

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        self.status, self.headers = status, dict(headers)
        self.body += data

    def write(self, data: bytes) -> None:
        assert not self.is_complete
        self.body += data

    def end(self, data: bytes = b"") -> None:
        self.write(data)
        self.is_complete = True

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        self.start(status, headers)
        self.end(body)
        self.is_whole = True

    def fail(self, error: ServingError, headers: Headers) -> None:
        status, own, body = error_response(error)
        self.whole(status, own + headers, body)

    def pause(self, paused: bool) -> None:
        self.is_paused = paused
        assert self.on_pause is not None
        self.on_pause(paused)


def digest(body: bytes) -> bytes:
    return hashlib.sha256(body).digest()


async def begin(replays: Replays, key: bytes, client: Any, *, body: bytes = b"{}", tenant: Tenant = TENANT) -> Any:
    return await replays.begin(tenant, key, digest(body), CHAT, client, [(b"x-request-id", b"again")])


async def owned(replays: Replays, key: bytes, **fields: Any) -> Owner:
    owner = await begin(replays, key, Client(), **fields)
    assert isinstance(owner, Owner)
    return owner


def worker(url: str, settings: ReplaySettings = QUICK) -> tuple[StorePipe, Replays]:
    pipe = StorePipe(url)
    return pipe, Replays(pipe, SECRET, SystemClock(), settings)


class Two:
    """Two workers on one store."""

    def __init__(self, server: StoreServer, settings: ReplaySettings = QUICK) -> None:
        self.server = server
        self.pipes, self.workers = zip(*(worker(server.url, settings) for _ in range(2)), strict=True)
        self.first: Replays = self.workers[0]
        self.second: Replays = self.workers[1]

    async def close(self) -> None:
        for replays, pipe in zip(self.workers, self.pipes, strict=True):
            await replays.close()
            await pipe.close()

    async def stored(self) -> bytes:
        """Everything that the store holds."""
        client = connect(self.server.url)
        found = b""
        async for key in client.scan_iter(match=f"{REPLAYS}*", count=1000):
            kind = await client.type(key)
            if kind == b"list":
                found += key + b"".join(await client.lrange(key, 0, -1))
            elif kind == b"hash":
                found += key + b"".join(x for pair in (await client.hgetall(key)).items() for x in pair)
            else:
                found += key + (await client.get(key) or b"")
        await client.aclose()
        return found

    async def quota(self, tenant: str = "t") -> int:
        client = connect(self.server.url)
        found = await client.hget(f"{REPLAYS}{tenant}:quota", "all")
        await client.aclose()
        return int(found or 0)


@asynccontextmanager
async def a_store() -> AsyncIterator[StoreServer]:
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as folder:
        server = StoreServer(Path(folder))
        await server.start()
        yield server
        await server.stop()


async def run_until_killed(url: str, num_keys: int) -> None:
    """Has `num_keys` requests in flight: streams that never end, answers that never come, and every third is done."""
    _, replays = worker(url)
    replays.start()
    for number in range(num_keys):
        recorder = (await owned(replays, b"key-%d" % number)).recorder(Client())
        if number % 3 == 0:
            recorder.whole(200, JSON, b"from the first worker: %d" % number)
        elif number % 3 == 1:
            recorder.start(200, EVENT_STREAM)
            recorder.write(b"data: from the first worker\n\n")
    await asyncio.sleep(0.2)
    print("ready", flush=True)
    await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(run_until_killed(sys.argv[1], int(sys.argv[2])))
