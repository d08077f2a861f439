"""The end of a worker and of its patience: clients hear that it goes, and one that does not read is let go."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import orjson
import pytest
import uvicorn
from uvicorn.server import ServerState

from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.gateway.hot_protocol import HotProtocol
from serving.gateway.server import Worker
from tests.gateway.test_gateway_connections import raw_request, status_of
from tests.gateway.wire import CHAT, chat, metric

ASK = raw_request(b"POST", CHAT, orjson.dumps(chat()))
HEALTH = b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n"
END = b"\r\n\r\n"


@asynccontextmanager
async def connected(app: Any) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter, HotProtocol]]:
    """A client's connection and the worker's end of it."""
    config = uvicorn.Config(app, http=HotProtocol, proxy_headers=False, ws="none", lifespan="off", log_config=None)
    state = ServerState()
    made: list[HotProtocol] = []

    def make() -> HotProtocol:
        made.append(HotProtocol(config, state, {}))
        return made[0]

    async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        for _ in range(1000):
            if made and made[0].transport is not None:
                break
            await asyncio.sleep(0)
        yield reader, writer, made[0]
        writer.close()
        made[0].transport.abort()
        await asyncio.sleep(0)


async def read_answer(reader: asyncio.StreamReader) -> tuple[bytes, bytes]:
    head = await reader.readuntil(END)
    length = next((line for line in head.split(b"\r\n") if line.startswith(b"content-length: ")), None)
    if length is None:
        return head, await reader.readuntil(b"0" + END)
    return head, await reader.readexactly(int(length.split()[1]))


async def test_an_idle_connection_is_answered_once_more_when_the_worker_ends(gateway: Gateway) -> None:
    for request in (ASK, HEALTH):
        async with connected(gateway) as (reader, writer, protocol):
            for is_ending in (False, True):
                if is_ending:
                    protocol.shutdown()
                writer.write(request)
                head, _ = await read_answer(reader)
                assert status_of(head) == 200
                assert (b"\r\nconnection: close\r\n" in head) is is_ending
            assert await reader.read() == b""


async def test_an_answer_that_has_not_begun_says_that_the_worker_ends(gateway: Gateway, engine: FakeEngine) -> None:
    async with connected(gateway) as (reader, writer, protocol):
        writer.write(raw_request(b"POST", CHAT, orjson.dumps(chat(fake={"ttft_ms": 30}))))
        await engine.wait_until(lambda e: bool(e.log.active))
        protocol.shutdown()
        head, _ = await read_answer(reader)
        assert status_of(head) == 200 and b"\r\nconnection: close\r\n" in head
        assert await reader.read() == b""


async def test_a_stream_ends_and_its_connection_serves_once_more(gateway: Gateway) -> None:
    async with connected(gateway) as (reader, writer, protocol):
        writer.write(raw_request(b"POST", CHAT, orjson.dumps(chat(stream=True, max_tokens=30))))
        head = await reader.readuntil(END)
        protocol.shutdown()
        protocol.shutdown()
        assert b"connection: close" not in head
        assert (await reader.readuntil(b"0" + END)).count(b"data: [DONE]") == 1
        writer.write(ASK)
        head, _ = await read_answer(reader)
        assert status_of(head) == 200 and b"\r\nconnection: close\r\n" in head
        assert await reader.read() == b""


async def test_a_connection_without_a_request_is_closed_after_its_grace(
    gateway: Gateway, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HotProtocol, "drain_grace_s", 0)
    for sent in (b"", ASK):
        async with connected(gateway) as (reader, writer, protocol):
            if sent:
                writer.write(sent)
                await read_answer(reader)
            protocol.shutdown()
            assert await reader.read() == b""


async def test_health_says_that_the_worker_ends(gateway: Gateway) -> None:
    worker = Worker(gateway)
    async with connected(worker) as (reader, writer, protocol):
        writer.write(HEALTH)
        assert status_of((await read_answer(reader))[0]) == 200
        worker.is_ending = True
        protocol.shutdown()
        writer.write(HEALTH)
        head, body = await read_answer(reader)
        assert status_of(head) == 503 and b"\r\nretry-after: 1\r\n" in head
        assert orjson.loads(body)["error"]["message"] == "this worker ends"


async def test_a_client_that_does_not_read_is_let_go(
    gateway: Gateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HotProtocol, "write_timeout_s", 0.1)
    body = orjson.dumps(chat(stream=True, max_tokens=2000, fake={"itl_ms": 0.05, "hang_after_tokens": 1500}))
    async with connected(gateway) as (reader, writer, protocol):
        for transport in (writer.transport, protocol.transport):
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
            transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        protocol.transport.set_write_buffer_limits(high=4096)
        writer.write(raw_request(b"POST", CHAT, body))
        assert status_of(await reader.readuntil(END)) == 200
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        await engine.wait_until(lambda e: bool(e.log.ended))
    assert engine.log.ended[-1].finish_reason == "abort"
    assert metric(gateway, "workbench_clients_gone_total", phase="mid_stream") == 1
    assert metric(gateway, "workbench_requests_in_flight") == 0


async def test_a_client_that_reads_slowly_gets_everything(
    gateway: Gateway, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(HotProtocol, "write_timeout_s", 0.2)
    body = orjson.dumps(chat(stream=True, max_tokens=20))
    async with connected(gateway) as (reader, writer, protocol):
        writer.write(raw_request(b"POST", CHAT, body))
        for _ in range(3):
            protocol.pause_writing()
            await asyncio.sleep(0)
            protocol.resume_writing()
        await reader.readuntil(END)
        assert (await reader.readuntil(b"0" + END)).count(b"data: [DONE]") == 1
