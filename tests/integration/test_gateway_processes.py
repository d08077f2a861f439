"""Two gateway workers on one port, a real store and a fake engine: what holds when tables change and parts die."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import openai
import orjson
import pytest
import pytest_asyncio

from serving.core.errors import UpstreamError
from serving.core.state import RoutingTable
from serving.store.connection import connect
from serving.store.routing_table import FileRoutingTable, StoreRoutingTable
from serving.store.server import StoreServer
from tests.gateway.fleets import MODEL, a_pool, a_table
from tests.integration.processes import (
    Process,
    engine_log,
    fake_engine,
    fetch,
    free_port,
    gateway_worker,
    metric,
    process,
    until,
)

CHAT = "/v1/chat/completions"


def chat(**fields: Any) -> bytes:
    messages = [{"role": "user", "content": "one two three"}]
    return orjson.dumps({"model": MODEL, "messages": messages, "max_tokens": 5, **fields})


@dataclass
class Stack:
    url: str
    port: int
    engine_url: str
    workers: list[Process]
    store: StoreServer
    table_path: Path
    env: dict[str, str]

    def table(self, epoch: int) -> RoutingTable:
        return a_table(a_pool(f"pool-{epoch}", {"r1": self.engine_url}), epoch=epoch)

    async def publish(self, epoch: int) -> None:
        client = connect(self.store.url)
        await StoreRoutingTable(client).publish(self.table(epoch))
        await client.aclose()
        await FileRoutingTable(self.table_path).publish(self.table(epoch))

    async def until_counted(self, number: int) -> None:
        """A request is counted right after its answer was sent, so a reader may be faster."""

        async def counted() -> bool:
            return await metric(self.url, "workbench_requests_total", status="200") == number

        await until(counted, f"{number} requests to be counted", timeout_s=5.0)

    async def answers(self, number: int) -> list[tuple[int, dict[bytes, bytes], bytes]]:
        return await asyncio.gather(*(fetch(self.url, "POST", CHAT, chat()) for _ in range(number)))


@pytest_asyncio.fixture
async def stack(tmp_path: Path) -> AsyncIterator[Stack]:
    store = StoreServer(tmp_path / "store")
    table_path = tmp_path / "routing-table.json"
    env = {
        "WORKBENCH_GATEWAY_REDIS_URL": store.url,
        "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(table_path),
        "WORKBENCH_GATEWAY_CACHE_SALT_SECRET": "secret",
        "WORKBENCH_GATEWAY_REPLAY_SECRET": "secret",
        "WORKBENCH_GATEWAY_METRICS_DIR": str(tmp_path / "metrics"),
    }
    port = free_port()
    async with AsyncExitStack() as parts:
        await store.start()
        parts.push_async_callback(store.stop)
        engine_url = await parts.enter_async_context(fake_engine(tmp_path, "--model", MODEL, "--ttft-ms", "5"))
        built = Stack(f"http://127.0.0.1:{port}", port, engine_url, [], store, table_path, env)
        await built.publish(1)
        for number in range(2):
            worker = gateway_worker(port, tmp_path / f"worker-{number}.log", env)
            built.workers.append(await parts.enter_async_context(worker))
        yield built


async def test_a_new_table_is_taken_up_by_every_worker_within_two_seconds(stack: Stack) -> None:
    async def all_have_it() -> bool:
        return await metric(stack.url, "workbench_routing_table_epoch") == 2  # the lowest of the workers

    await stack.publish(2)
    assert await until(all_have_it, "epoch 2 in all workers", timeout_s=5.0) <= 2.0
    answers = await stack.answers(12)
    assert {(status, headers[b"x-served-by"]) for status, headers, _ in answers} == {(200, b"pool-2; 1; 2/-")}


async def test_any_workers_metrics_show_all_workers(stack: Stack) -> None:
    await stack.answers(20)
    await stack.until_counted(20)
    counts = {await metric(stack.url, "workbench_requests_total", status="200") for _ in range(6)}
    assert counts == {20.0}
    assert await metric(stack.url, "workbench_output_tokens_total") == 100.0


async def test_with_the_store_dead_requests_are_served_and_a_new_worker_starts(stack: Stack, tmp_path: Path) -> None:
    assert stack.store.pid is not None
    os.kill(stack.store.pid, signal.SIGKILL)
    await stack.store.stop()
    assert {status for status, _, _ in await stack.answers(20)} == {200}

    async def knows() -> bool:
        return await metric(stack.url, "workbench_store_up") == 0

    await until(knows, "the workers to see the store's death", timeout_s=5.0)
    await FileRoutingTable(stack.table_path).publish(stack.table(2))
    async with gateway_worker(port := free_port(), tmp_path / "late.log", stack.env):
        status, headers, _ = await fetch(f"http://127.0.0.1:{port}", "POST", CHAT, chat())
        assert (status, headers[b"x-served-by"]) == (200, b"pool-2; 1; 2/-")
    assert {status for status, _, _ in await stack.answers(20)} == {200}


async def test_a_killed_worker_takes_only_its_own_requests_with_it(stack: Stack) -> None:
    await stack.answers(10)
    await stack.until_counted(10)
    os.kill(stack.workers[0].pid, signal.SIGKILL)
    await stack.workers[0].ended()
    assert {status for status, _, _ in await stack.answers(20)} == {200}
    await stack.until_counted(30)  # its counts stay
    assert _pids_with_gauges(Path(stack.env["WORKBENCH_GATEWAY_METRICS_DIR"])) == {str(stack.workers[1].pid)}


async def test_after_kill_9_of_a_worker_each_request_with_a_key_is_answered_once(stack: Stack) -> None:
    body = chat(stream=True, max_tokens=30, fake={"itl_ms": 20.0})

    async def until_answered(key: str) -> bytes:
        """What a client does that has lost its connection: it sends the same again."""
        while True:
            try:
                status, _, answer = await fetch(stack.url, "POST", CHAT, body, idempotency_key=key)
            except UpstreamError:
                status, answer = 0, b""
            if status == 200 and answer.endswith(b"data: [DONE]\n\n"):
                return answer
            await asyncio.sleep(0.1)

    keys = [f"key-{number}" for number in range(50)]
    clients = [asyncio.create_task(until_answered(key)) for key in keys]
    await asyncio.sleep(0.4)
    os.kill(stack.workers[0].pid, signal.SIGKILL)
    answers = await asyncio.wait_for(asyncio.gather(*clients), 30.0)
    for key, answer in zip(keys, answers, strict=True):
        status, headers, again = await fetch(stack.url, "POST", CHAT, body, idempotency_key=key)
        assert (status, headers[b"idempotent-replayed"], again) == (200, b"true", answer)
    ends = [request["finish_reason"] for request in await engine_log(stack.engine_url)]
    assert ends.count("length") == 50
    assert 0 < ends.count("abort") < 50


@pytest.mark.parametrize(
    ("stream", "fake"),
    [
        pytest.param(True, {"hang": True}, id="before-the-head"),
        pytest.param(True, {"ttft_ms": 60_000}, id="before-the-first-chunk"),
        pytest.param(True, {"hang_after_tokens": 3}, id="mid-stream"),
        pytest.param(False, {"ttft_ms": 60_000}, id="unary"),
    ],
)
async def test_a_client_that_leaves_aborts_the_engine_within_a_second(stack: Stack, stream: bool, fake: Any) -> None:
    body = chat(stream=stream, max_tokens=50, fake=fake)
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    head = f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n"
    writer.write(head.encode() + body)
    num_tokens = fake.get("hang_after_tokens", 0)

    async def engine_has_it() -> bool:
        return any(r["num_output_tokens"] == num_tokens for r in await engine_log(stack.engine_url))

    await until(engine_has_it, "the engine to have the request")
    if num_tokens:
        await reader.readuntil(b"data: ")
    left_at_s = perf_counter()
    writer.close()

    async def aborted() -> bool:
        return any(r["finish_reason"] == "abort" for r in await engine_log(stack.engine_url))

    await until(aborted, "the abort", timeout_s=5.0)
    (request,) = [r for r in await engine_log(stack.engine_url) if r["finish_reason"] == "abort"]
    assert 0 <= request["aborted_at_s"] - left_at_s <= 1.0

    async def counted() -> bool:
        return await metric(stack.url, "workbench_clients_gone_total") == 1

    await until(counted, "the departure to be counted", timeout_s=5.0)


@pytest.mark.parametrize("announced", [True, False])
async def test_a_body_of_50_mb_is_refused_and_never_held(stack: Stack, announced: bool) -> None:
    size = 50 * 2**20
    peaks_before = [_peak_bytes(worker.pid) for worker in stack.workers]
    reader, writer = await asyncio.open_connection("127.0.0.1", stack.port)
    framing = f"content-length: {size}" if announced else "transfer-encoding: chunked"
    writer.write(f"POST {CHAT} HTTP/1.1\r\nhost: x\r\n{framing}\r\n\r\n".encode())
    piece = b"x" * 2**16
    begun_s = perf_counter()

    async def send() -> None:
        for _ in range(size // len(piece)):
            writer.write(piece if announced else b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()

    sending = asyncio.create_task(send())
    head = await asyncio.wait_for(reader.readuntil(b"\r\n\r\n"), 5.0)
    assert head.startswith(b"HTTP/1.1 413")
    assert b"body_too_large" in await asyncio.wait_for(reader.read(), 10.0)
    assert perf_counter() - begun_s < 10.0
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    writer.close()
    for worker, before in zip(stack.workers, peaks_before, strict=True):
        assert _peak_bytes(worker.pid) - before < 24 * 2**20
    assert {status for status, _, _ in await stack.answers(4)} == {200}


async def test_a_worker_that_is_stopped_finishes_what_it_has(stack: Stack) -> None:
    async def stream() -> bytes:
        status, _, body = await fetch(stack.url, "POST", CHAT, chat(stream=True, max_tokens=40, fake={"itl_ms": 25}))
        assert status == 200
        return body

    streams = [asyncio.create_task(stream()) for _ in range(8)]

    async def all_begun() -> bool:
        return sum(1 for r in await engine_log(stack.engine_url) if r["num_output_tokens"]) == 8

    await until(all_begun, "all streams to begin")
    for worker in stack.workers:
        os.kill(worker.pid, signal.SIGTERM)
    assert all(body.endswith(b"data: [DONE]\n\n") for body in await asyncio.gather(*streams))
    assert [await worker.ended() for worker in stack.workers] == [0, 0]


async def test_the_openai_sdk(stack: Stack) -> None:
    async with openai.AsyncOpenAI(base_url=f"{stack.url}/v1", api_key="-", max_retries=0) as client:
        messages: Any = [{"role": "user", "content": "one two three"}]
        whole = await client.chat.completions.create(model=MODEL, messages=messages, max_tokens=5)
        chunks = [
            chunk
            async for chunk in await client.chat.completions.create(
                model=f"{MODEL}@1", messages=messages, max_tokens=5, stream=True, stream_options={"include_usage": True}
            )
        ]
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-1].usage == whole.usage
        assert [model.id async for model in client.models.list()] == ["embedder", MODEL]
        with pytest.raises(openai.NotFoundError, match="there are: embedder, m"):
            await client.chat.completions.create(model="gpt-4", messages=messages)
        broken: Any = {"fake": {"die_after_tokens": 2}}
        with pytest.raises(openai.APIError, match="closed the connection"):
            async for _ in await client.chat.completions.create(
                model=MODEL, messages=messages, max_tokens=5, stream=True, extra_body=broken
            ):
                pass


async def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    env = {"WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(tmp_path / "table.json")}
    async with process(["-m", "serving.gateway", "--port", str(port)], tmp_path / "worker.log", env) as worker:
        assert await worker.ended() == 1
    assert f"port {port} on 127.0.0.1 is taken" in worker.log.read_text()
    server.close()
    await server.wait_closed()


@pytest.mark.parametrize(
    ("env", "status", "word"),
    [
        ({"WORKBENCH_GATEWAY_PROT": "1"}, 2, "did you mean WORKBENCH_GATEWAY_PORT"),
        ({"WORKBENCH_GATEWAY_MAX_BODY_BYTES": "many"}, 2, "max_body_bytes"),
        ({}, 1, "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH"),
    ],
)
async def test_wrong_settings_are_named(tmp_path: Path, env: dict[str, str], status: int, word: str) -> None:
    arguments = ["-m", "serving.gateway", "--port", str(free_port())]
    async with process(arguments, tmp_path / "worker.log", env) as worker:
        assert await worker.ended() == status
    assert word in worker.log.read_text()


def _pids_with_gauges(folder: Path) -> set[str]:
    return {file.stem.rpartition("_")[2] for file in folder.glob("gauge_live*")}


def _peak_bytes(pid: int) -> int:
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmHWM")
