"""A faulty server before a sound engine: some requests are sampled at another temperature, whatever they ask for.

    python -m evals.faulty_proxy FOLDER --upstream http://127.0.0.1:8001 [--port 0] [--seed 0]

FOLDER is what `workbench faults make` wrote for a fault of serving. Prints its URL, then serves on loopback until
Ctrl-C. Attach a pool to it (`launcher: attach`) and the fault is in the fleet. Which requests suffer is drawn by the
seed.
"""

from __future__ import annotations

import argparse
import random
import socket
import sys
from collections.abc import Awaitable, Callable, MutableMapping, Sequence
from pathlib import Path
from typing import Any

import orjson
import uvicorn

from evals.faults import ProxySettings, about
from serving.core.errors import BadRequest, UpstreamError
from serving.engine.client import EngineClient

GENERATES = ("/v1/completions", "/v1/chat/completions")
KEPT_HEADERS = (b"content-type",)
Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]


class FaultyProxy:
    """An ASGI application; the relay of `client`'s answers, byte for byte as they come.

    Attributes:
        num_requests, num_spoiled: of those that generate.
    """

    def __init__(self, client: EngineClient, settings: ProxySettings, rng: random.Random) -> None:
        self.num_requests = 0
        self.num_spoiled = 0
        self._client = client
        self._settings = settings
        self._rng = rng

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        """Serves HTTP; nothing else."""
        if scope["type"] != "http":
            return
        body = self._spoil(scope["path"], await _body(receive))
        query = scope["query_string"]
        path = scope["path"] + (f"?{query.decode('ascii')}" if query else "")
        headers = [pair for pair in scope["headers"] if pair[0] in KEPT_HEADERS]
        try:
            async with await self._client.request(scope["method"], path, headers=headers, body=body) as response:
                kept = [(name, value) for name, value in response.headers.items() if name in KEPT_HEADERS]
                await send({"type": "http.response.start", "status": response.status, "headers": kept})
                async for _, data in response.chunks():
                    await send({"type": "http.response.body", "body": data, "more_body": True})
                await send({"type": "http.response.body", "body": b""})
        except UpstreamError as error:
            await send({"type": "http.response.start", "status": 502, "headers": []})
            await send({"type": "http.response.body", "body": str(error).encode()})

    def _spoil(self, path: str, body: bytes) -> bytes:
        if path not in GENERATES:
            return body
        self.num_requests += 1
        if self._rng.random() >= self._settings.share:
            return body
        try:
            asked = orjson.loads(body)
        except orjson.JSONDecodeError:
            return body  # the engine refuses it in its own words
        self.num_spoiled += 1
        return orjson.dumps({**asked, "temperature": self._settings.temperature})


async def _body(receive: Receive) -> bytes:
    parts = []
    while True:
        message = await receive()
        parts.append(message.get("body", b""))
        if not message.get("more_body"):
            return b"".join(parts)


def main(argv: Sequence[str] | None = None) -> int:
    """Serves until it is ended."""
    parser = argparse.ArgumentParser(prog="python -m evals.faulty_proxy", description="A faulty server.")
    parser.add_argument("folder", type=Path, help="of `workbench faults make`")
    parser.add_argument("--upstream", required=True, help="URL of the sound engine")
    parser.add_argument("--port", type=int, default=0, help="0 takes a free one")
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args(argv)
    try:
        proxy = about(arguments.folder)["proxy"]
    except BadRequest as error:
        parser.error(str(error))
    if proxy is None:
        parser.error(f"{arguments.folder} is a fault of the model: serve the folder itself")
    listening = socket.create_server(("127.0.0.1", arguments.port))
    sys.stdout.write(f"http://127.0.0.1:{listening.getsockname()[1]}\n")
    sys.stdout.flush()
    application = FaultyProxy(EngineClient(arguments.upstream), ProxySettings(**proxy), random.Random(arguments.seed))
    config = uvicorn.Config(application, lifespan="off", log_level="warning")
    uvicorn.Server(config).run(sockets=[listening])
    return 0


if __name__ == "__main__":
    sys.exit(main())
