"""What a client sends and gets, and its key, stand in nothing that the gateway writes or shows: planted and looked for.

One worker whose parts are all on, at the most talkative level, with a mistake built in that quotes a request's body.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest_asyncio

from serving.core.tenancy import Tenant, TenantDirectory
from serving.store.connection import connect
from serving.store.routing_table import FileRoutingTable
from serving.store.server import StoreServer
from serving.store.tenants import StoreTenantDirectory
from tests.gateway.fleets import MODEL, a_pool, a_table
from tests.integration.processes import engine_log, fake_engine, fetch, free_port, process, text, until
from workbench.tenants import make_key

PROMPT = "zirkonblau-heron-4471"
SALT = "salt-of-opal-9313"
KEY, KEPT = make_key("acme")
OTHER_KEY, _ = make_key("acme")
CHAT = "/v1/chat/completions"

# A worker with a fault: a request with the field `trip` raises what quotes its whole body.
FAULTY = """
import runpy, sys
from serving.gateway.request import CallBuilder

whole = CallBuilder.build

def build(self, *arguments):
    bodies = [argument for argument in arguments if isinstance(argument, dict) and "trip" in argument]
    if bodies:
        raise ValueError(f"cannot build {bodies[0]}")
    return whole(self, *arguments)

CallBuilder.build = build
runpy.run_module("serving.gateway", run_name="__main__")
"""


@dataclass
class Place:
    url: str
    port: int
    engine_url: str
    store_url: str
    folder: Path

    async def post(self, path: str, body: bytes | Mapping[str, Any], **headers: str) -> tuple[int, bytes]:
        data = body if isinstance(body, bytes) else orjson.dumps(body)
        status, _, answer = await fetch(self.url, "POST", path, data, **{"authorization": f"Bearer {KEY}", **headers})
        return status, answer


def chat(content: str = f"Tell me of {PROMPT}.", **fields: Any) -> dict[str, Any]:
    return {"model": MODEL, "messages": [{"role": "user", "content": content}], "max_tokens": 12, **fields}


@pytest_asyncio.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    store = StoreServer(tmp_path / "store")
    table_path, script = tmp_path / "routing-table.json", tmp_path / "faulty.py"
    script.write_text(FAULTY)
    env = {
        "PYTHONPATH": str(Path(__file__).parents[2]),
        "WORKBENCH_GATEWAY_REDIS_URL": store.url,
        "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(table_path),
        "WORKBENCH_GATEWAY_AUTH": "required",
        "WORKBENCH_GATEWAY_CACHE_SALT_SECRET": SALT,
        "WORKBENCH_GATEWAY_METRICS_DIR": str(tmp_path / "written" / "metrics"),
        "WORKBENCH_GATEWAY_DECISION_LOG_PATH": str(tmp_path / "written" / "decisions"),
        "WORKBENCH_GATEWAY_DECISION_LOG_FRAC": "1",
        "WORKBENCH_GATEWAY_USAGE_DIR": str(tmp_path / "written" / "usage"),
        "WORKBENCH_GATEWAY_LOG_LEVEL": "DEBUG",
        "WORKBENCH_GATEWAY_ACCESS_LOG": "all",
    }
    port = free_port()
    log = tmp_path / "written" / "worker.log"
    log.parent.mkdir()
    async with AsyncExitStack() as parts:
        await store.start()
        parts.push_async_callback(store.stop)
        engine_url = await parts.enter_async_context(fake_engine(tmp_path, "--model", MODEL, "--ttft-ms", "5"))
        client = connect(store.url)
        parts.push_async_callback(client.aclose)
        await StoreTenantDirectory(client).publish(TenantDirectory(1, 0.0, (Tenant("acme", models=(MODEL,)),), (KEPT,)))
        await FileRoutingTable(table_path).publish(a_table(a_pool("pool-1", {"r1": engine_url})))
        worker = await parts.enter_async_context(process([str(script), "--port", str(port)], log, env))

        async def is_up() -> bool:
            assert worker.child.returncode is None, text(log)
            return "Application startup complete" in text(log)

        await until(is_up, "the worker to start")
        yield Place(f"http://127.0.0.1:{port}", port, engine_url, store.url, tmp_path / "written")


async def test_nothing_that_was_planted_is_written_or_shown(place: Place) -> None:
    outputs, refusals = await _provoke(place)
    planted = [PROMPT, SALT, *outputs, KEY.rpartition("_")[2], OTHER_KEY.rpartition("_")[2]]
    assert all(len(word) > 12 for word in planted)
    await _counted(place, "internal_error")
    _, _, metrics = await fetch(place.url, "GET", "/metrics")
    seen = {"metrics": metrics, "refusals": b"\n".join(refusals), **await _stored(place.store_url)}
    seen |= {str(path): path.read_bytes() for path in sorted(place.folder.rglob("*")) if path.is_file()}
    kinds = {Path(name).relative_to(place.folder).parts[0] for name in seen if name.startswith("/")}
    assert kinds == {"worker.log", "metrics", "decisions", "usage"}
    assert "ValueError at " in text(place.folder / "worker.log")  # its place is told, its message not
    leaks = [(name, word) for name, data in seen.items() for word in planted if word.encode() in data]
    assert leaks == []


async def _provoke(place: Place) -> tuple[list[str], list[bytes]]:
    """What was generated, and the answers that are no success."""
    status, whole = await place.post(CHAT, chat())
    assert status == 200
    outputs = [orjson.loads(whole)["choices"][0]["message"]["content"]]
    status, _ = await place.post(CHAT, chat(stream=True))
    assert status == 200
    status, kept = await place.post(CHAT, chat(seed=3), idempotency_key="one-key")
    assert (status, (await place.post(CHAT, chat(seed=3), idempotency_key="one-key"))[1]) == (200, kept)
    outputs.append(orjson.loads(kept)["choices"][0]["message"]["content"])
    status, _ = await place.post(CHAT, chat(f"{PROMPT} ann@example.org"))
    assert status == 200  # flagged
    await _leave(place)
    bare = {"model": MODEL, "prompt": PROMPT}
    expected = [
        (400, "content_blocked", CHAT, chat(f"{PROMPT}\x00"), {}),
        (200, "upstream_error", CHAT, chat(stream=True, fake={"die_after_tokens": 2}), {}),
        (502, "upstream_error", CHAT, chat(fake={"status": 500}), {}),
        (500, "internal_error", CHAT, chat(trip=True), {}),
        (500, "internal_error", CHAT, chat(trip=True, stream=True), {"idempotency_key": "another"}),
        (422, "idempotency_key_reused", CHAT, chat(), {"idempotency_key": "one-key"}),
        (400, "invalid_json", CHAT, b'{"messages": "' + PROMPT.encode() + b'", }', {}),
        (400, "invalid_json", CHAT, PROMPT.encode(), {}),
        (400, "invalid_request", CHAT, {"model": MODEL, "messages": PROMPT}, {}),
        (400, "invalid_request", "/v1/completions", {**bare, "max_tokens": PROMPT}, {}),
        (404, "model_not_found", "/v1/completions", {**bare, "model": "other"}, {}),
        (400, "context_length_exceeded", CHAT, chat(f"{PROMPT} " * 6_000), {}),
        (401, "invalid_api_key", CHAT, chat(), {"authorization": f"Bearer {OTHER_KEY}"}),
    ]
    refusals = []
    for status, code, path, body, headers in expected:
        got, answer = await place.post(path, body, **headers)
        assert (got, code in answer.decode()) == (status, True), (code, got, answer[:300])
        if status != 200:
            refusals.append(answer)
    return outputs, refusals


async def _leave(place: Place) -> None:
    """Leaves in the middle of a stream."""
    body = orjson.dumps(chat(stream=True, fake={"hang_after_tokens": 2}))
    reader, writer = await asyncio.open_connection("127.0.0.1", place.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    await reader.readuntil(b"data: ")
    writer.close()

    async def aborted() -> bool:
        return any(request["finish_reason"] == "abort" for request in await engine_log(place.engine_url))

    await until(aborted, "the abort", timeout_s=5.0)


async def _counted(place: Place, code: str) -> None:
    async def counted() -> bool:
        _, _, page = await fetch(place.url, "GET", "/metrics")
        return f'code="{code}"' in page.decode()

    await until(counted, f"{code} to be counted", timeout_s=5.0)


async def _stored(url: str) -> dict[str, bytes]:
    """Every key of the store with its value, as the store writes it down."""
    client = connect(url)
    try:
        names = [name async for name in client.scan_iter()]
        return {f"store {name!r}": repr(name).encode() + (await client.dump(name) or b"") for name in names}
    finally:
        await client.aclose()
