"""Talking to a fake engine over HTTP: requests, parsed events, what its log wrote."""

from __future__ import annotations

from typing import Any

import orjson

from serving.engine.client import EngineClient, EngineResponse
from serving.engine.fake import RequestLog
from serving.engine.sse import EventSplitter, payload

FAST: dict[str, Any] = {"model": "m", "ttft_ms": 2, "itl_ms": 1}
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
HELLO = {"messages": [{"role": "user", "content": "hello you there"}]}
USAGE = {"stream": True, "stream_options": {"include_usage": True}}


async def start(client: EngineClient, path: str, body: dict[str, Any], **headers: str) -> EngineResponse:
    pairs = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return await client.request("POST", path, headers=pairs, body=orjson.dumps(body), timeout_s=10)


async def events(response: EngineResponse) -> list[Any]:
    """All events in order, parsed; `[DONE]` stays a text."""
    assert response.status == 200
    splitter = EventSplitter()
    payloads = [payload(event) async for _, data in response.chunks() for event in splitter.feed(data)]
    assert splitter.rest == b""
    return [data.decode() if data == b"[DONE]" else orjson.loads(data or b"") for data in payloads]


async def stream(client: EngineClient, path: str, body: dict[str, Any], **headers: str) -> list[Any]:
    return await events(await start(client, path, {**USAGE, **body}, **headers))


def kinds(log: RequestLog) -> list[str]:
    return [write.kind.value for write in log.writes]
