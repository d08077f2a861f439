"""The HTTP client against servers that say exactly what a test wants them to say."""

from __future__ import annotations

import asyncio
import os
import socket
import ssl
import subprocess
import time
from collections.abc import Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from serving.core.errors import ErrorCode, UpstreamError
from serving.engine.client import ConnectFailed, ConnectionLost, EngineClient, UnexpectedStatus

Handler = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
OK = b"HTTP/1.1 200 OK\r\n"
CHUNKED = OK + b"transfer-encoding: chunked\r\n\r\n"


class Server:
    """Counts connections and requests; `answer` is called with each request's raw head and body."""

    def __init__(self, answer: Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]) -> None:
        self.answer = answer
        self.num_connections = 0
        self.requests: list[tuple[bytes, bytes]] = []
        self.writers: list[asyncio.StreamWriter] = []
        self.tasks: list[asyncio.Task[Any]] = []
        self.was_asked = asyncio.Event()
        self.peer_left = asyncio.Event()
        self.url = ""

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.num_connections += 1
        self.writers.append(writer)
        self.tasks.append(cast("asyncio.Task[Any]", asyncio.current_task()))
        try:
            while True:
                head = await reader.readuntil(b"\r\n\r\n")
                length = 0
                for line in head.split(b"\r\n"):
                    if line.startswith(b"content-length: "):
                        length = int(line.split(b": ")[1])
                body = await reader.readexactly(length)
                self.requests.append((head, body))
                self.was_asked.set()
                await self.answer(head, body, writer)
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            self.peer_left.set()
        finally:
            writer.close()


@asynccontextmanager
async def serve(answer: Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]], **kwargs: Any) -> Any:
    server = Server(answer)
    listener = await asyncio.start_server(server.handle, "127.0.0.1", 0, **kwargs)
    port = listener.sockets[0].getsockname()[1]
    server.url = f"{'https' if kwargs.get('ssl') else 'http'}://localhost:{port}"
    try:
        yield server
    finally:
        listener.close()
        for task in server.tasks:
            task.cancel()
        await asyncio.gather(*server.tasks, return_exceptions=True)


async def answer_ok(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
    writer.write(OK + b"content-length: 2\r\nX-One: 1\r\nx-one: 2\r\n\r\nok")


def fixed(raw: bytes, *, close: bool = False) -> Callable[[bytes, bytes, asyncio.StreamWriter], Awaitable[None]]:
    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(raw)
        if close:
            writer.close()

    return answer


async def test_connections_are_kept_and_used_again() -> None:
    async with serve(answer_ok) as server, EngineClient(server.url) as client:
        for _ in range(5):
            response = await client.request("GET", "/health")
            assert (response.status, await response.read()) == (200, b"ok")
            assert response.headers[b"x-one"] == b"1, 2"
            assert response.sent_at_s < response.head_at_s <= time.perf_counter()
        assert server.num_connections == 1
        await asyncio.gather(*[client.get_json("/health") for _ in range(3)], return_exceptions=True)
        assert server.num_connections == 3


async def test_the_request_as_the_engine_sees_it() -> None:
    async with serve(answer_ok) as server, EngineClient(server.url + "/base/") as client:
        response = await client.request("POST", "/v1/x?y=1", headers=[(b"a", b"b")], body=b"{}")
        await response.read()
        head, body = server.requests[0]
        host = server.url.removeprefix("http://").encode()
        assert head == b"POST /base/v1/x?y=1 HTTP/1.1\r\nhost: " + host + b"\r\na: b\r\ncontent-length: 2\r\n\r\n"
        assert body == b"{}"


@pytest.mark.parametrize(
    ("header", "match"),
    [
        ((b"Content-Length", b"3"), "sets"),
        ((b"transfer-encoding", b"chunked"), "sets"),
        ((b"x", b"1\r\ny: 2"), "line break"),
    ],
)
async def test_headers_that_would_break_framing_are_refused(header: tuple[bytes, bytes], match: str) -> None:
    client = EngineClient("http://localhost:1")
    with pytest.raises(ValueError, match=match):
        await client.request("GET", "/", headers=[header])
    with pytest.raises(ValueError, match="HEAD"):
        await client.request("HEAD", "/")


@pytest.mark.parametrize(
    ("raw", "close", "expected", "status"),
    [
        (OK + b"content-length: 3\r\n\r\nabc", False, b"abc", 200),
        (OK + b"content-length: 0\r\n\r\n", False, b"", 200),
        (CHUNKED + b"1\r\na\r\n2;ext=1\r\nbc\r\n0\r\n\r\n", False, b"abc", 200),
        (OK + b"\r\nabc", True, b"abc", 200),
        (OK + b"connection: close\r\n\r\nabc", True, b"abc", 200),
        (b"HTTP/1.0 200 OK\r\n\r\nabc", True, b"abc", 200),
        (b"HTTP/1.1 204 No Content\r\n\r\n", False, b"", 204),
        (b"HTTP/1.1 100 Continue\r\n\r\n" + OK + b"content-length: 1\r\n\r\nx", False, b"x", 200),
        (b"HTTP/1.1 503 Full\r\ncontent-length: 4\r\n\r\nfull", False, b"full", 503),
    ],
)
async def test_every_framing_of_a_body(raw: bytes, close: bool, expected: bytes, status: int) -> None:
    async with serve(fixed(raw, close=close)) as server, EngineClient(server.url) as client:
        for _ in range(2):
            response = await client.request("GET", "/")
            assert (response.status, await response.read()) == (status, expected)
            assert response.is_complete
        assert server.num_connections == (2 if close else 1)


async def test_chunks_come_one_by_one_with_the_time_they_came() -> None:
    go_on = asyncio.Event()

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        writer.write(CHUNKED + b"1\r\na\r\n")
        await go_on.wait()
        writer.write(b"1\r\nb\r\n0\r\n\r\n")

    async with serve(answer) as server, EngineClient(server.url) as client:
        response = await client.request("GET", "/")
        before_s = response.sent_at_s
        seen = []
        async for received_at_s, data in response.chunks():
            assert before_s < received_at_s <= time.perf_counter()
            before_s = received_at_s
            seen.append(data)
            go_on.set()
        assert seen == [b"a", b"b"]


async def test_a_slow_reader_stops_the_socket_and_gets_everything() -> None:
    piece = b"x" * 65536
    num_pieces = 320  # 20 MiB, more than the kernel's buffers and ours hold
    num_written = 0
    waited = asyncio.Event()

    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        nonlocal num_written
        writer.write(CHUNKED)
        for _ in range(num_pieces):
            writer.write(b"10000\r\n" + piece + b"\r\n")
            try:
                await asyncio.wait_for(writer.drain(), 0.2)
            except TimeoutError:
                waited.set()
                await writer.drain()
            num_written += 1
        writer.write(b"0\r\n\r\n")

    async with serve(answer) as server, EngineClient(server.url) as client:
        response = await client.request("GET", "/")
        await asyncio.wait_for(waited.wait(), 10)
        assert num_written < num_pieces
        assert await asyncio.wait_for(response.read(), 20) == piece * num_pieces
        again = await client.request("GET", "/")
        again.abort()


async def test_abort_is_seen_by_the_engine() -> None:
    async with serve(fixed(CHUNKED + b"1\r\na\r\n")) as server, EngineClient(server.url) as client:
        response = await client.request("GET", "/")
        async with response:
            async for _ in response.chunks():
                break
        await asyncio.wait_for(server.peer_left.wait(), 2)
        with pytest.raises(ConnectionLost, match="aborted"):
            await response.read()


async def test_a_cancelled_request_is_aborted() -> None:
    async with serve(fixed(b"")) as server, EngineClient(server.url) as client:
        request = asyncio.create_task(client.request("GET", "/"))
        await asyncio.wait_for(server.was_asked.wait(), 2)
        request.cancel()
        with pytest.raises(asyncio.CancelledError):
            await request
        await asyncio.wait_for(server.peer_left.wait(), 2)


async def test_abort_after_the_end_keeps_the_connection() -> None:
    async with serve(answer_ok) as server, EngineClient(server.url) as client:
        for _ in range(2):
            async with await client.request("GET", "/") as response:
                await response.read()
        assert server.num_connections == 1


@pytest.mark.parametrize(
    ("raw", "received_any"),
    [(b"", False), (b"HTTP/1.1 2", True), (OK + b"content-length: 9\r\n\r\nabc", True), (b"nonsense\r\n\r\n", True)],
)
async def test_a_peer_that_breaks_off(raw: bytes, received_any: bool) -> None:
    async with serve(fixed(raw, close=True)) as server, EngineClient(server.url) as client:
        with pytest.raises(ConnectionLost) as caught:
            await (await client.request("GET", "/")).read()
        assert caught.value.received_any is received_any
        assert caught.value.code == ErrorCode.UPSTREAM_ERROR


async def test_what_came_before_the_loss_is_given_first() -> None:
    async with serve(fixed(CHUNKED + b"1\r\na\r\n", close=True)) as server, EngineClient(server.url) as client:
        response = await client.request("GET", "/")
        seen = []
        with pytest.raises(ConnectionLost):
            async for _, data in response.chunks():
                seen.append(data)
        assert seen == [b"a"]


@pytest.mark.parametrize("raw", [b"", CHUNKED + b"1\r\na\r\n"])
async def test_timeout_covers_head_and_body(raw: bytes) -> None:
    async with serve(fixed(raw)) as server, EngineClient(server.url) as client:
        with pytest.raises(ConnectionLost, match=r"within 0\.05 s") as caught:
            await (await client.request("GET", "/", timeout_s=0.05)).read()
        assert caught.value.code == ErrorCode.UPSTREAM_TIMEOUT
        await asyncio.wait_for(server.peer_left.wait(), 2)


async def test_a_kept_connection_that_the_server_closed_is_not_used() -> None:
    async with serve(answer_ok) as server, EngineClient(server.url) as client:
        await (await client.request("GET", "/")).read()
        # Closed before the client's loop could notice: what a client meets when a close races its request.
        descriptor = server.writers[0].get_extra_info("socket").fileno()
        with socket.socket(fileno=os.dup(descriptor)) as raw_socket:
            raw_socket.shutdown(socket.SHUT_RDWR)
        await (await client.request("POST", "/", body=b"{}")).read()
        assert server.num_connections == 2
        assert len(server.requests) == 2


async def test_data_that_nobody_asked_for_ends_the_connection() -> None:
    async with serve(fixed(OK + b"content-length: 1\r\n\r\na" + OK)) as server, EngineClient(server.url) as client:
        for _ in range(2):
            assert await (await client.request("GET", "/")).read() == b"a"
        assert server.num_connections == 2


async def test_connect_failures() -> None:
    async with serve(answer_ok) as server:
        url = server.url
    with pytest.raises(ConnectFailed, match="cannot connect"):
        await EngineClient(url).request("GET", "/")
    with pytest.raises(ValueError, match="base_url"):
        EngineClient("localhost:80")
    client = EngineClient(url)
    await client.close()
    with pytest.raises(ConnectFailed, match="is closed"):
        await client.request("GET", "/")


async def test_connections_are_bounded_and_freed() -> None:
    async with serve(fixed(CHUNKED)) as server, EngineClient(server.url, max_connections=1) as client:
        response = await client.request("GET", "/")
        with pytest.raises(ConnectFailed, match="all 1 connections"):
            await client.request("GET", "/")
        response.abort()
        await asyncio.sleep(0)
        (await client.request("GET", "/")).abort()


async def test_close_ends_what_is_in_flight() -> None:
    async with serve(fixed(CHUNKED)) as server:
        client = EngineClient(server.url)
        response = await client.request("GET", "/")
        await client.close()
        with pytest.raises(ConnectionLost):
            await response.read()
        await asyncio.wait_for(server.peer_left.wait(), 2)


async def test_json_helpers() -> None:
    async def answer(head: bytes, body: bytes, writer: asyncio.StreamWriter) -> None:
        if head.startswith(b"GET /bad"):
            raw = b"HTTP/1.1 404 Not Found\r\ncontent-length: 4\r\n\r\nnope"
        elif head.startswith(b"GET /text"):
            raw = OK + b"content-length: 4\r\n\r\ntext"
        elif head.startswith(b"GET /none"):
            raw = OK + b"content-length: 0\r\n\r\n"
        else:
            raw = OK + b"content-length: %d\r\n\r\n" % len(body) + body
        writer.write(raw)

    async with serve(answer) as server, EngineClient(server.url) as client:
        assert await client.post_json("/echo", {"a": [1]}) == {"a": [1]}
        assert await client.get_json("/none") is None
        with pytest.raises(UnexpectedStatus, match="404: nope") as caught:
            await client.get_json("/bad")
        assert (caught.value.engine_status, caught.value.body) == (404, b"nope")
        with pytest.raises(UpstreamError, match="no JSON"):
            await client.get_json("/text")
        assert server.num_connections == 1


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    tmp_path = tmp_path_factory.mktemp("tls")
    key, cert = tmp_path / "key.pem", tmp_path / "cert.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-days", "1", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost", "-keyout", str(key), "-out", str(cert)]
    subprocess.run(command, check=True, capture_output=True, timeout=30)
    return key, cert


async def test_https(certificate: tuple[Path, Path]) -> None:
    key, cert = certificate
    server_context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_context.load_cert_chain(cert, key)
    async with serve(answer_ok, ssl=server_context) as server:
        trusting = ssl.create_default_context(cafile=str(cert))
        async with EngineClient(server.url, ssl=trusting) as client:
            for _ in range(2):
                assert await (await client.request("GET", "/")).read() == b"ok"
        async with EngineClient(server.url) as client:
            with pytest.raises(ConnectFailed, match="cannot connect"):
                await client.request("GET", "/")
