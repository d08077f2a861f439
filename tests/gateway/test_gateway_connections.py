"""A worker's sockets: what is no HTTP, too large or too slow is refused in its turn, and nothing waits for ever."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import orjson
import pytest
import uvicorn
from uvicorn.server import ServerState

from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.gateway.hot_protocol import HotProtocol
from serving.gateway.http_protocol import MAX_HEAD_BYTES, MAX_HEADERS
from tests.gateway.wire import CHAT, chat, metric


@asynccontextmanager
async def listening(
    gateway: Gateway, protocol: type[HotProtocol] = HotProtocol, idle_s: float = 75
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    """A client's connection to a worker's socket."""
    config = uvicorn.Config(
        gateway,
        http=HotProtocol,
        proxy_headers=False,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        timeout_keep_alive=idle_s,
    )
    state = ServerState()
    make = partial(protocol, config, state, {})
    async with await asyncio.get_running_loop().create_server(make, "127.0.0.1", 0) as server, asyncio.timeout(10):
        reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
        yield reader, writer
        writer.close()
        for connection in list(state.connections):
            connection.transport.abort()
        await asyncio.sleep(0)  # a transport is gone a turn after that


async def talk(gateway: Gateway, *pieces: bytes, **options: Any) -> bytes:
    """What a worker's socket answers to the bytes, until it closes."""
    async with listening(gateway, **options) as (reader, writer):
        for piece in pieces:
            writer.write(piece)
            await writer.drain()
            await asyncio.sleep(0)
        return await reader.read()


def raw_request(method: bytes, path: str, body: bytes, *headers: bytes) -> bytes:
    lines = [method + b" " + path.encode() + b" HTTP/1.1", b"Host: gateway", *headers]
    return b"\r\n".join([*lines, b"Content-Length: %d" % len(body), b"", body])


OFFER = (b"Connection: Upgrade, HTTP2-Settings", b"Upgrade: h2c", b"HTTP2-Settings: AAMAAABkAAQAoAAAAAIAAAAA")
CLOSE = (b"Connection: Upgrade, close", b"Upgrade: h2c")


async def test_an_offer_of_another_protocol_is_passed_over(gateway: Gateway, engine: FakeEngine) -> None:
    body = orjson.dumps(chat())
    three = raw_request(b"POST", CHAT, body) + raw_request(b"POST", CHAT, body, *OFFER)
    three += raw_request(b"POST", CHAT, body, *CLOSE)
    whole = await talk(gateway, three)
    in_bytes = await talk(gateway, *(three[at : at + 1] for at in range(len(three))))
    for answers in (whole, in_bytes):
        assert answers.count(b"HTTP/1.1 200 ") == answers.count(b"chat.completion") == 3
    assert len(engine.log.ended) == 6
    assert b"HTTP/1.1 200 " in await talk(gateway, raw_request(b"GET", "/health", b"", *CLOSE))
    ask = b"GET /health HTTP/1.1\r\nHost: g\r\nConnection: upgrade\r\nUpgrade: a\r\n\r\n"
    assert (await talk(gateway, ask * 50 + raw_request(b"GET", "/health", b"", *CLOSE))).count(b" 200 ") == 51


async def test_a_tunnel_is_refused(gateway: Gateway) -> None:
    answer = await talk(gateway, b"CONNECT host:443 HTTP/1.1\r\nHost: host:443\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 40")


async def test_a_client_that_pipelines_and_leaves_stops_the_request_that_runs(
    gateway: Gateway, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    body = orjson.dumps(chat(fake={"ttft_ms": 60_000}))
    async with listening(gateway) as (_, writer):
        writer.write(raw_request(b"POST", CHAT, body) * 3)
        await engine.wait_until(lambda e: bool(e.log.active))
        writer.transport.abort()
        await engine.wait_until(lambda e: bool(e.log.ended) and e.log.ended[-1].finish_reason == "abort")
    assert metric(gateway, "workbench_requests_total", code="client_gone", status="499") == 1
    assert len(engine.log.ended) == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


class Hasty(HotProtocol):
    """Has no patience."""

    head_timeout_s = 0.05
    body_idle_timeout_s = 0.05


def status_of(answer: bytes) -> int:
    return int(answer.split(b" ", 2)[1])


def error_of(answer: bytes) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert b"\r\nconnection: close" in head and b"\r\nx-request-id: " in head
    assert b"\r\ncontent-length: %d" % len(body) in head
    error: dict[str, Any] = orjson.loads(body)["error"]
    return error


def a_head(num_headers: int, value: bytes = b"v") -> bytes:
    return b"".join(b"x-%d: %b\r\n" % (number, value) for number in range(num_headers))


GET = b"GET /health HTTP/1.1\r\nConnection: close\r\nhost: g\r\n"
POST = b"POST /v1/chat/completions HTTP/1.1\r\nhost: g\r\n"
AT_MOST = b"x: " + b"v" * (MAX_HEAD_BYTES - 200) + b"\r\n"
TOO_MUCH = b"x: " + b"v" * MAX_HEAD_BYTES + b"\r\n"


def pieces_of(data: bytes, size: int) -> list[bytes]:
    return [data[at : at + size] for at in range(0, len(data), size)]


@pytest.mark.parametrize("size", [1_000_000, 10_000, 999])
@pytest.mark.parametrize(
    ("request_", "status"),
    [
        (GET + a_head(MAX_HEADERS - 2) + b"\r\n", 200),
        (GET + AT_MOST + b"\r\n", 200),
        (GET + a_head(MAX_HEADERS - 1) + b"\r\n", 431),
        (GET + TOO_MUCH + b"\r\n", 431),
        (POST + TOO_MUCH + b"\r\n", 431),
        (GET + a_head(2_000, b"v" * 40) + b"\r\n", 431),
        (b"GET /" + b"a" * MAX_HEAD_BYTES + b" HTTP/1.1\r\nhost: g\r\n\r\n", 431),
    ],
)
async def test_a_head_over_the_bounds_is_a_431(gateway: Gateway, request_: bytes, status: int, size: int) -> None:
    answer = await talk(gateway, *pieces_of(request_, size))
    assert status_of(answer) == status
    if status != 200:
        assert error_of(answer)["code"] == "invalid_request"


async def test_a_head_or_a_trailer_that_never_ends_is_cut_off(gateway: Gateway) -> None:
    for start in (GET + b"x: ", GET, POST + b"transfer-encoding: chunked\r\n\r\n0\r\nx: "):
        async with listening(gateway) as (reader, writer):
            writer.write(start)
            answering = asyncio.create_task(reader.readuntil(b"\r\n\r\n"))
            num_bytes = 0
            while not answering.done() and num_bytes < 16 * MAX_HEAD_BYTES:
                writer.write(b"a: b\r\n" * 1000 if start == GET else b"v" * 10_000)
                num_bytes += 10_000
                await writer.drain()
                await asyncio.sleep(0)
            assert status_of(await answering) in (400, 431)


async def test_chunks_of_hardly_a_byte_are_read_and_framing_without_a_body_is_not(
    gateway: Gateway, engine: FakeEngine
) -> None:
    start = POST + b"connection: close\r\ntransfer-encoding: chunked\r\n\r\n"
    body = orjson.dumps(chat(messages=[{"role": "user", "content": "word " * 4_000}]))
    ones = b"".join(b"1\r\n%c\r\n" % byte for byte in body) + b"0\r\n\r\n"
    assert status_of(await talk(gateway, start, *pieces_of(ones, 10_000))) == 200
    empty = b"1;" + b"extension" * 400_000
    async with listening(gateway) as (reader, writer):
        writer.write(start + empty)
        assert status_of(await reader.readuntil(b"\r\n\r\n")) == 400


async def test_trailers_do_not_become_headers(gateway: Gateway) -> None:
    body = orjson.dumps(chat())
    request = POST + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n%x\r\n%b\r\n0\r\n" % (len(body), body)
    answer = await talk(gateway, request + b"x-request-id: from-a-trailer\r\n\r\n")
    assert status_of(answer) == 200 and b"from-a-trailer" not in answer


@pytest.mark.parametrize("start", [b"G", GET, b"GET /health", GET + b"x: " + b"v" * 5000, POST])
async def test_a_head_that_does_not_come_to_its_end_is_a_408(gateway: Gateway, start: bytes) -> None:
    answer = await talk(gateway, start, protocol=Hasty)
    assert status_of(answer) == 408 and "head" in error_of(answer)["message"]


async def test_a_head_in_drops_has_no_more_time_than_another(gateway: Gateway) -> None:
    async with listening(gateway, Hasty) as (reader, writer):
        answering = asyncio.create_task(reader.read())
        for number in range(1000):
            writer.write(b"GET "[number : number + 1] or b" ")
            await asyncio.wait([answering], timeout=0.01)
            if answering.done():
                break
        assert status_of(await answering) == 408


async def test_a_body_that_stops_is_a_408_and_counted_like_any_answer(gateway: Gateway) -> None:
    for framing in (b"content-length: 100\r\n\r\n{", b"transfer-encoding: chunked\r\n\r\n5\r\n{"):
        async with listening(gateway, Hasty) as (reader, writer):
            writer.write(POST + framing)
            head = await reader.readuntil(b"\r\n\r\n")
        assert status_of(head) == 408 and b"x-request-id" in head
    assert metric(gateway, "workbench_requests_total", status="408") == 2
    assert metric(gateway, "workbench_requests_in_flight") == 0


async def test_a_body_in_drops_is_waited_for(gateway: Gateway) -> None:
    body = orjson.dumps(chat())
    head = POST + b"connection: close\r\ncontent-length: %d\r\n\r\n" % len(body)
    async with listening(gateway, Hasty) as (reader, writer):
        reading = asyncio.create_task(reader.read())
        for piece in (head, *pieces_of(body, 8)):
            writer.write(piece)
            await asyncio.wait([reading], timeout=0.02)
        assert status_of(await reading) == 200


@pytest.mark.parametrize("sent", [b"", b"\r\n\r\n", raw_request(b"GET", "/health", b"")])
async def test_an_idle_connection_is_closed(gateway: Gateway, sent: bytes) -> None:
    async with listening(gateway, Hasty, idle_s=0.05) as (reader, writer):
        writer.write(sent)
        answer = await reader.read()
    assert answer == b"" or status_of(answer) == 200


async def test_a_body_that_nobody_reads_does_not_hold_a_connection_open(gateway: Gateway) -> None:
    async with listening(gateway, Hasty) as (reader, writer):
        writer.write(b"GET /health HTTP/1.1\r\nhost: g\r\ncontent-length: 10\r\n\r\n")
        assert status_of(await reader.read()) == 200


@pytest.mark.parametrize(
    "bad", [b"nonsense\r\n\r\n", GET + TOO_MUCH + b"\r\n", b"GET http://x HTTP/1.1\r\n\r\n", b"GET /"]
)
@pytest.mark.parametrize("stream", [False, True])
async def test_what_is_refused_waits_for_the_answers_before_it(gateway: Gateway, bad: bytes, stream: bool) -> None:
    body = orjson.dumps(chat(stream=stream, max_tokens=3))
    answers = await talk(gateway, raw_request(b"POST", CHAT, body) * 2 + bad, protocol=Hasty)
    first, second, refusal = answers.split(b"HTTP/1.1 ")[1:]
    assert first.startswith(b"200 ") and second.startswith(b"200 ")
    if stream:
        assert first.count(b"[DONE]") == second.count(b"[DONE]") == 1
    assert refusal.startswith((b"400 ", b"431 ", b"408 ")) and refusal.endswith(b"}}")


async def test_broken_chunks_of_a_waiting_request_leave_the_answers_before_it_whole(gateway: Gateway) -> None:
    good = raw_request(b"POST", CHAT, orjson.dumps(chat()))
    broken = b"transfer-encoding: chunked\r\n\r\nnonsense\r\n"
    for bad in (POST + broken, b"POST /health HTTP/1.1\r\nhost: g\r\n" + broken):
        async with listening(gateway) as (reader, writer):
            writer.write(good + bad)
            first = await reader.readuntil(b"\r\n\r\n")
            assert status_of(first) == 200
            rest = await reader.readuntil(b"\r\n\r\n")
            assert b"HTTP/1.1 400 " in rest


@pytest.mark.parametrize("target", [b"http://gateway", b"//", b"/\xff", b"gateway:80", b"*"])
async def test_a_target_that_is_no_path_is_the_clients_mistake(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, target: bytes
) -> None:
    for method in (b"GET", b"POST", b"OPTIONS"):
        answer = await talk(gateway, method + b" " + target + b" HTTP/1.1\r\nhost: g\r\nconnection: close\r\n\r\n")
        assert status_of(answer) in (400, 404, 405)
    assert not [record for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.parametrize("where", ["_hot_path", "_begin_exchange"])
async def test_a_mistake_of_ours_while_reading_is_a_500_and_its_place_is_logged(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    secret = "a client's words"

    def broken(*_: object) -> None:
        raise KeyError(secret)

    monkeypatch.setattr(Hasty, where, broken)
    answer = await talk(gateway, raw_request(b"POST", CHAT, orjson.dumps(chat())), protocol=Hasty)
    assert status_of(answer) == 500 and error_of(answer)["code"] == "internal_error"
    logged = "".join(record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR)
    assert "KeyError" in logged and "in broken" in logged
    assert secret.encode() not in answer and secret not in logged
