"""Fetching key sets over a real socket: redirects, floods, garbage, and answers that come too slowly."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from serving.store import jwks as jwks_module
from serving.store.connection import BrokenDocument, StoreUnavailable
from serving.store.jwks import MAX_JWKS_BYTES, fetch_jwks, in_one_order
from tests.issuers import Signer, jwks

KEY_SET = jwks(Signer("ES256", "k1").entry)
Writer = asyncio.StreamWriter
OK = b"HTTP/1.1 200 OK\r\nconnection: close\r\n"


@pytest.fixture(autouse=True)
def _past_any_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


@asynccontextmanager
async def issuer(answer: Callable[[Writer], Awaitable[None]]) -> AsyncIterator[str]:
    async def serve(reader: asyncio.StreamReader, writer: Writer) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(writer)
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/jwks.json"


def sends(data: bytes) -> Callable[[Writer], Awaitable[None]]:
    async def answer(writer: Writer) -> None:
        writer.write(data)
        await writer.drain()

    return answer


def body(text: str) -> bytes:
    return OK + b"content-length: %d\r\n\r\n" % len(text) + text.encode()


async def test_a_key_set_is_fetched_in_one_order() -> None:
    async with issuer(sends(body(KEY_SET))) as url:
        assert await fetch_jwks(url) == in_one_order(KEY_SET)


@pytest.mark.parametrize(
    ("answer", "error"),
    [
        (b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\n\r\n", StoreUnavailable),
        (b"HTTP/1.1 500 Oh\r\ncontent-length: 0\r\n\r\n", StoreUnavailable),
        (b"", StoreUnavailable),
        (b"not HTTP at all\r\n\r\n", StoreUnavailable),
        (b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 70_000 + b"\r\n\r\n", StoreUnavailable),
        (OK + b"transfer-encoding: chunked\r\n\r\nzz\r\n", StoreUnavailable),
        (OK + b"\r\n" + b" " * (MAX_JWKS_BYTES + 10), BrokenDocument),
        (body("[]"), BrokenDocument),
        (OK + b"\r\n\xff\xfe", BrokenDocument),
        (b"HTTP/1.1 302 Found\r\nlocation: file:///etc/passwd\r\ncontent-length: 0\r\n\r\n", StoreUnavailable),
        (b"HTTP/1.1 302 Found\r\nlocation: ftp://127.0.0.1/x\r\ncontent-length: 0\r\n\r\n", StoreUnavailable),
        (b"HTTP/1.1 302 Found\r\nlocation: /jwks.json\r\ncontent-length: 0\r\n\r\n", StoreUnavailable),
    ],
)
async def test_whatever_else_comes_is_one_of_two_errors(answer: bytes, error: type[Exception]) -> None:
    async with issuer(sends(answer)) as url:
        with pytest.raises(error):
            await fetch_jwks(url)


async def test_nothing_listens_there() -> None:
    with pytest.raises(StoreUnavailable, match="cannot fetch the key set"):
        await fetch_jwks("http://127.0.0.1:9/jwks.json")


async def test_an_answer_that_trickles_ends_with_the_time_for_all_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jwks_module, "FETCH_TIMEOUT_S", 0.3)

    async def trickle(writer: Writer) -> None:
        writer.write(OK + b"\r\n")
        while True:
            writer.write(b" ")
            await writer.drain()
            await asyncio.sleep(0.05)

    async with issuer(trickle) as url:
        began_s = asyncio.get_running_loop().time()
        with pytest.raises(StoreUnavailable, match=r"within|slowly"):
            await fetch_jwks(url)
        assert asyncio.get_running_loop().time() - began_s < 2.0
        await asyncio.to_thread(lambda: None)  # the thread that read is free again, or the loop would not end
