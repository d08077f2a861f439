"""Workers are replaced while they serve, and die, without a lost request; a client that does not read is let go."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import psutil
import pytest

from serving.store.routing_table import FileRoutingTable
from tests.gateway.fleets import MODEL, a_pool, a_table
from tests.integration.processes import engine_log, fake_engine, fetch, free_port, gateway_worker, metric, text, until
from tests.integration.workplaces import Workplace, new_workplace, running
from workbench.cli.exits import Exit
from workbench.stack.service import Service, ServiceFailed
from workbench.stack.slots import Slot

CHAT = "/v1/chat/completions"
NUM_STREAMS = 40
STREAM_S = 3.0


def request(model: str, **fields: Any) -> bytes:
    body = orjson.dumps(
        {"model": model, "messages": [{"role": "user", "content": "one two"}], "max_tokens": 4} | fields
    )
    return b"POST %b HTTP/1.1\r\nhost: g\r\ncontent-length: %d\r\n\r\n%b" % (CHAT.encode(), len(body), body)


@dataclass
class Client:
    """A client that keeps its connection until the server closes it, and never asks a second time.

    As HTTP libraries do, it looks whether a kept connection was closed before it asks on it.
    """

    port: int
    failures: list[str] = field(default_factory=list)
    num_answers: int = 0
    num_kept: int = 0
    num_told_to_go: int = 0
    _streams: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None

    async def ask(self, sent: bytes, *, keep: bool = True) -> bytes:
        """The answer's body; what goes wrong is written down."""
        if self._streams is not None and self._streams[0].at_eof():
            self.leave()
        is_kept = self._streams is not None
        try:
            reader, writer = self._streams or await asyncio.open_connection("127.0.0.1", self.port)
            self._streams = (reader, writer)
            writer.write(sent)
            head = await reader.readuntil(b"\r\n\r\n")
            body = await self._body(reader, head)
        except (OSError, asyncio.IncompleteReadError) as error:
            self.failures.append(f"{'kept' if is_kept else 'new'} connection, after {self.num_answers}: {error!r}")
            self.leave()
            return b""
        if not head.startswith(b"HTTP/1.1 200 "):
            self.failures.append(f"{head!r} {body!r}")
        self.num_answers += 1
        self.num_kept += is_kept
        says_close = b"\r\nconnection: close" in head
        self.num_told_to_go += says_close
        if says_close or not keep:
            self.leave()
        return body

    async def _body(self, reader: asyncio.StreamReader, head: bytes) -> bytes:
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length: "):
                return await reader.readexactly(int(line.split()[1]))
        return await reader.readuntil(b"\r\n0\r\n\r\n")

    def leave(self) -> None:
        if self._streams is not None:
            self._streams[1].close()
            self._streams = None


async def keep_asking(client: Client, sent: bytes, pause_s: float, *, keep: bool, over: asyncio.Event) -> None:
    while not over.is_set():
        await client.ask(sent, keep=keep)
        await asyncio.sleep(pause_s)
    client.leave()


@pytest.fixture
def workplace(mlflow_uri: str) -> Iterator[Workplace]:
    with new_workplace() as place:
        place.env["MLFLOW_TRACKING_URI"] = mlflow_uri
        yield place


def gateway_pids(place: Workplace) -> dict[str, int]:
    state = place.state
    return {r.name: r.pid for r in state.processes if r.name.startswith("gateway")} if state else {}


async def restart(place: Workplace) -> tuple[list[dict[str, Any]], set[str]]:
    """What the command says, and all names of gateway workers that the state file held meanwhile."""
    seen: set[str] = set()
    command = asyncio.create_task(place.run("restart", "gateway", "--json", timeout_s=240))
    while not command.done():
        seen |= gateway_pids(place).keys()
        await asyncio.wait([command], timeout=0.2)
    code, output = await command
    assert code == Exit.OK, text(place.folder / "err") + text(place.folder / ".workbench" / "logs" / "gateway-0.log")
    answer = json.loads(output)
    assert answer["part"] == "gateway"
    return answer["replaced"], seen


async def test_a_restart_loses_no_stream_and_no_request(workplace: Workplace):
    itl_ms = 75
    num_tokens = int(STREAM_S * 1000 / itl_ms)
    stream = request(workplace.model, stream=True, max_tokens=num_tokens, fake={"itl_ms": itl_ms})
    over = asyncio.Event()
    async with running(workplace):
        port = int(workplace.gateway.rpartition(":")[2])
        before = gateway_pids(workplace)
        clients = [Client(port) for _ in range(12)]
        asking = [
            asyncio.create_task(
                # Pauses on both sides of the grace of idle connections, of which many end while one is closed.
                keep_asking(client, request(workplace.model), 0.05 + 0.3 * number, keep=number % 3 != 0, over=over)
            )
            for number, client in enumerate(clients)
        ]
        watchers = [Client(port) for _ in range(NUM_STREAMS)]
        streams = [asyncio.create_task(watcher.ask(stream)) for watcher in watchers]
        await asyncio.sleep(0.5)
        replaced, seen = await restart(workplace)
        bodies = await asyncio.gather(*streams)
        for watcher in watchers:
            watcher.leave()
        await asyncio.sleep(0.5)
        over.set()
        await asyncio.gather(*asking)
        after = gateway_pids(workplace)
        assert [failure for client in (*clients, *watchers) for failure in client.failures] == []
        for body in bodies:
            assert body.count(b"data: ") >= num_tokens and body.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n")
        assert [(one["name"], one["old_pid"], one["new_pid"]) for one in replaced] == [
            (name, before[name], after[name]) for name in ("gateway-0", "gateway-1")
        ]
        assert before.keys() == after.keys()
        assert not set(before.values()) & set(after.values())
        assert any(name.endswith("-successor") for name in seen)
        assert any(name.endswith("-old") for name in seen)
        assert sum(client.num_kept for client in clients) > 20
        assert sum(client.num_told_to_go for client in clients) > 0
    said = text(workplace.folder / "err")
    assert "its successor serves; the old one finishes what it has" in said
    assert (await workplace.run("restart", "gateway"))[0] == Exit.UNAVAILABLE


@dataclass
class Place:
    """One worker's service over a fake engine, with nothing but a file for a store."""

    service: Service
    port: int
    table_path: Path
    engine_url: str

    async def ask(self) -> int:
        body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "one"}], "max_tokens": 2})
        return (await fetch(f"http://127.0.0.1:{self.port}", "POST", CHAT, body))[0]


@asynccontextmanager
async def a_place(folder: Path, **timeouts: float) -> AsyncIterator[Place]:
    async with AsyncExitStack() as parts:
        url = await parts.enter_async_context(fake_engine(folder, "--model", MODEL, "--ttft-ms", "5"))
        table_path, port = folder / "table.json", free_port()
        await FileRoutingTable(table_path).publish(a_table(a_pool("pool", {"r1": url})))
        env = {"WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(table_path), "WORKBENCH_GATEWAY_CACHE_SALT_SECRET": "s"}
        command = [sys.executable, "-m", "serving.gateway", "--port", str(port)]
        service = Service("gateway-0", command, folder / "log", slot=Slot("127.0.0.1", port), env=env, **timeouts)
        await service.start()
        parts.push_async_callback(service.stop)
        yield Place(service, port, table_path, url)


async def test_what_waits_for_a_worker_that_dies_is_served_by_its_successor(tmp_path: Path):
    async with a_place(tmp_path) as place:
        assert await place.ask() == 200
        pid = place.service.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        asking = [asyncio.create_task(place.ask()) for _ in range(20)]
        await asyncio.sleep(0.3)
        os.kill(pid, signal.SIGKILL)

        async def is_dead() -> bool:
            return not place.service.is_alive

        await until(is_dead, "the worker to die")
        await place.service.start()
        assert await asyncio.gather(*asking) == [200] * 20


async def test_a_successor_that_does_not_come_up_leaves_the_old_one(tmp_path: Path):
    async with a_place(tmp_path, start_timeout_s=8.0) as place:
        pid = place.service.pid
        place.table_path.rename(tmp_path / "away")
        over = asyncio.Event()
        clients = [Client(place.port) for _ in range(2)]
        asking = [
            asyncio.create_task(keep_asking(client, request(MODEL), 0.02, keep=keep, over=over))
            for client, keep in zip(clients, (True, False), strict=True)
        ]
        with pytest.raises(ServiceFailed, match="gateway-0 was not ready within 8 s"):
            await place.service.replace()
        over.set()
        await asyncio.gather(*asking)
        assert place.service.pid == pid
        assert place.service.others == []
        assert [client.failures for client in clients] == [[], []]
        assert all(client.num_answers > 20 for client in clients)


async def test_a_replacement_that_is_cut_short_leaves_nothing_behind(tmp_path: Path):
    async with a_place(tmp_path) as place:
        replacing = asyncio.create_task(place.service.replace())

        async def has_two() -> bool:
            return bool(place.service.others)

        await until(has_two, "the successor to start")
        replacing.cancel()
        await asyncio.wait([replacing])
        pids = [pid for _, pid in place.service.others]
        assert place.service.is_ready and len(pids) == 1
        await place.service.stop()
        assert not any(psutil.pid_exists(pid) for pid in pids)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", place.port)


async def test_new_connections_are_refused_at_once_when_the_only_worker_ends(tmp_path: Path):
    async with a_place(tmp_path) as place:
        kept = Client(place.port)
        await kept.ask(request(MODEL))
        stream = Client(place.port)
        streaming = asyncio.create_task(stream.ask(request(MODEL, stream=True, max_tokens=40, fake={"itl_ms": 50})))
        await asyncio.sleep(0.5)
        ending = asyncio.create_task(place.service.stop())
        await asyncio.sleep(0.3)
        with pytest.raises(OSError):
            await asyncio.open_connection("127.0.0.1", place.port)
        await kept.ask(b"GET /health HTTP/1.1\r\nhost: g\r\n\r\n")
        assert "503" in kept.failures[0] and "this worker ends" in kept.failures[0]
        assert (await streaming).count(b"[DONE]") == 1 and stream.failures == []
        stream.leave()
        await ending


async def test_a_client_that_does_not_read_is_let_go(tmp_path: Path):
    async with AsyncExitStack() as parts:
        engine = await parts.enter_async_context(
            fake_engine(
                tmp_path,
                "--model",
                MODEL,
                "--max-model-len",
                "1000000",
                "--num-gpu-blocks",
                "65536",
                "--itl-ms",
                "0",
                "--ttft-ms",
                "1",
            )
        )
        table_path, port = tmp_path / "table.json", free_port()
        await FileRoutingTable(table_path).publish(a_table(a_pool("pool", {"r1": engine})))
        env = {
            "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(table_path),
            "WORKBENCH_GATEWAY_WRITE_TIMEOUT_S": "1",
            "WORKBENCH_GATEWAY_METRICS_DIR": str(tmp_path / "metrics"),
        }
        await parts.enter_async_context(gateway_worker(port, tmp_path / "worker.log", env))
        client = socket.socket()
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", port))
        client.sendall(request(MODEL, stream=True, max_tokens=900_000))

        async def is_counted() -> bool:
            return await metric(f"http://127.0.0.1:{port}", "workbench_clients_gone_total") == 1

        await until(is_counted, "the client to be counted as gone", timeout_s=60.0)
        client.close()
        (asked,) = await engine_log(engine)
        assert asked["finish_reason"] == "abort"
