"""The faulty proxy before a fake engine: the share that it spoils, and no other request touched."""

from __future__ import annotations

import random
from typing import Any

import orjson
import pytest

from evals.faults import ProxySettings
from evals.faulty_proxy import FaultyProxy
from serving.engine.client import EngineClient
from tests.gateway.fleets import MODEL, MakeEngine

pytestmark = pytest.mark.gateway


async def ask(proxy: FaultyProxy, path: str, body: dict[str, Any]) -> tuple[int, Any]:
    sent: list[dict[str, Any]] = []

    async def receive() -> dict[str, Any]:
        return {"type": "http.request", "body": orjson.dumps(body)}

    async def send(message: Any) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    scope = {"type": "http", "path": path, "query_string": b"", "method": "POST", "headers": headers}
    await proxy(scope, receive, send)
    answer = b"".join(message.get("body", b"") for message in sent)
    return sent[0]["status"], answer


@pytest.mark.parametrize(("share", "least", "most"), [(1.0, 100, 100), (0.2, 8, 35)])
async def test_the_share_is_spoiled(make_engine: MakeEngine, share: float, least: int, most: int):
    engine = await make_engine()
    async with EngineClient(engine.url) as client:
        proxy = FaultyProxy(client, ProxySettings(share, 1.5), random.Random(0))
        for _ in range(100):
            body = {"model": MODEL, "prompt": "a b", "max_tokens": 1}
            status, answer = await ask(proxy, "/v1/completions", body)
            assert status == 200
            assert orjson.loads(answer)["choices"]
        status, answer = await ask(proxy, "/tokenize", {"model": MODEL, "prompt": "a b"})
        assert (status, orjson.loads(answer)["count"]) == (200, 2)
    assert proxy.num_requests == 100
    assert least <= proxy.num_spoiled <= most


async def test_a_dead_engine_is_a_502(make_engine: MakeEngine):
    engine = await make_engine()
    url = engine.url
    await engine.stop()
    async with EngineClient(url) as client:
        proxy = FaultyProxy(client, ProxySettings(1.0, 1.5), random.Random(0))
        status, answer = await ask(proxy, "/v1/completions", {"model": MODEL, "prompt": "a"})
    assert status == 502
    assert answer
