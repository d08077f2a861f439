"""Talks HTTP to a gateway in this process over a connection in memory: a client that can dawdle and leave."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import httptools
import orjson
import uvicorn
from prometheus_client.parser import text_string_to_metric_families
from uvicorn.server import ServerState

from serving.engine.sse import EventSplitter, payload
from serving.gateway.app import Gateway
from serving.gateway.hot_protocol import HotProtocol

TIMEOUT_S = 10.0
PEER = ("127.0.0.1", 1)
CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": "one two three"}], "max_tokens": 5, **fields}


def metric(gateway: Gateway, name: str, **labels: str) -> float:
    """A metric's value, summed over labels that are not given."""
    return sum(
        sample.value
        for family in text_string_to_metric_families(gateway.metrics.page().decode())
        for sample in family.samples
        if sample.name == name and labels.items() <= sample.labels.items()
    )


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)

    @property
    def payloads(self) -> list[bytes]:
        return [data for event in EventSplitter().feed(self.body) if (data := payload(event)) is not None]

    @property
    def chunks(self) -> list[dict[str, Any]]:
        return [orjson.loads(data) for data in self.payloads if data != b"[DONE]"]

    @property
    def text(self) -> str:
        if not self.headers["content-type"].startswith("text/event-stream"):
            choice = self.json["choices"][0]
            return choice["message"]["content"] if "message" in choice else choice["text"]
        choices = [chunk["choices"][0] for chunk in self.chunks if chunk.get("choices")]
        return "".join(c["delta"].get("content", "") if "delta" in c else c["text"] for c in choices)


class Wire(asyncio.Transport):
    """The server's end of a connection in memory: takes what it writes, and can be filled up or cut."""

    def __init__(self) -> None:
        super().__init__({"peername": PEER, "sockname": ("127.0.0.1", 80)})
        self.written: list[bytes] = []
        self.progress = asyncio.Event()
        self.reading = True
        self._closing = False

    def write(self, data: bytes | bytearray | memoryview) -> None:
        if not self._closing:
            self.written.append(bytes(data))
            self.progress.set()

    def close(self) -> None:
        self._closing = True
        self.progress.set()

    def abort(self) -> None:
        self.close()

    def can_write_eof(self) -> bool:
        return False

    def is_closing(self) -> bool:
        return self._closing

    def pause_reading(self) -> None:
        self.reading = False

    def resume_reading(self) -> None:
        self.reading = True


class _Answering:
    """What httptools tells of a response."""

    def __init__(self) -> None:
        self.parser = httptools.HttpResponseParser(self)
        self.status = 0
        self.headers: dict[str, str] = {}
        self.body = b""
        self.complete = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self.headers[name.decode().lower()] = value.decode()

    def on_headers_complete(self) -> None:
        self.status = self.parser.get_status_code()

    def on_body(self, data: bytes) -> None:
        self.body += data

    def on_message_complete(self) -> None:
        self.complete = self.status >= 200


@dataclass
class Exchange:
    """One request in progress, on a connection of its own, as the worker's protocol class serves it.

    The body is one piece with its length announced, or several that come as HTTP chunks, one a turn of the loop
    while the server reads.
    """

    app: Any
    method: str
    path: str
    body: bytes | Sequence[bytes] = b""
    headers: Sequence[tuple[bytes, bytes]] = ()
    num_received: int = 0

    def start(self) -> Exchange:
        config = uvicorn.Config(
            self.app, http=HotProtocol, proxy_headers=False, ws="none", lifespan="off", log_config=None
        )
        self.state = ServerState()
        self.protocol = HotProtocol(config, self.state, {})
        self.wire = Wire()
        self._answer = _Answering()
        self._num_parsed = 0
        self.protocol.connection_made(self.wire)
        self._send_head()
        self.task = asyncio.create_task(self._talk())
        return self

    def _send_head(self) -> None:
        lines = [f"{self.method} {self.path} HTTP/1.1".encode(), b"host: gateway.test"]
        lines += [name + b": " + value for name, value in self.headers]
        whole = self.body if isinstance(self.body, bytes) else None
        names = {name for name, _ in self.headers}
        self._framed = whole is None and b"content-length" not in names
        if self._framed:
            lines.append(b"transfer-encoding: chunked")
        elif whole is not None and self.method == "POST" and b"content-length" not in names:
            lines.append(b"content-length: %d" % len(whole))
        self.protocol.data_received(b"\r\n".join([*lines, b"", whole or b""]))

    async def _talk(self) -> None:
        if not isinstance(self.body, bytes):
            await self._send_pieces(self.body)
        while not self._parse():
            self.wire.progress.clear()
            await self.wire.progress.wait()

    async def _send_pieces(self, pieces: Sequence[bytes]) -> None:
        for piece in pieces:
            await asyncio.sleep(0)
            if self.wire.is_closing() or self._parse():
                return
            self.num_received += 1
            self.protocol.data_received(b"%x\r\n%b\r\n" % (len(piece), piece) if self._framed else piece)
        if pieces and self._framed:
            self.protocol.data_received(b"0\r\n\r\n")

    def _parse(self) -> bool:
        """Reads what was written; True at the end."""
        for data in self.wire.written[self._num_parsed :]:
            self._num_parsed += 1
            self._answer.parser.feed_data(data)
        return self._answer.complete or self.wire.is_closing()

    def leave(self) -> None:
        """The client closes its connection."""
        self.wire.close()
        self.protocol.connection_lost(None)

    def stop(self) -> None:
        """The server is stopped, and its time to finish is over."""
        for task in self.state.tasks:
            task.cancel()

    async def until_sent(self) -> None:
        """The server has the whole request and has not begun to answer."""
        for _ in range(100):
            if self.state.tasks:
                return
            await asyncio.sleep(0)

    async def until_body(self, num_bytes: int = 1) -> None:
        async with asyncio.timeout(TIMEOUT_S):
            while not self._parse() and len(self._answer.body) < num_bytes:
                self.wire.progress.clear()
                await self.wire.progress.wait()

    async def done(self) -> Answer:
        async with asyncio.timeout(TIMEOUT_S):
            await self.task
            await asyncio.gather(*self.state.tasks, return_exceptions=True)
        return Answer(self._answer.status, self._answer.headers, self._answer.body)

    @property
    def answered(self) -> bool:
        self._parse()
        return self._answer.status != 0


async def get(app: Any, path: str, **options: Any) -> Answer:
    return await Exchange(app, "GET", path, **options).start().done()


def begin_post(app: Any, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> Exchange:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    return Exchange(app, "POST", path, raw, headers).start()


async def post(app: Any, path: str, body: Any, headers: Sequence[tuple[bytes, bytes]] = ()) -> Answer:
    return await begin_post(app, path, body, headers).done()
