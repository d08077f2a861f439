"""A load client that costs little: raw HTTP/1.1 on kept connections, one protocol object each, nothing parsed twice.

It knows just enough to tell that an answer is whole: a length, or chunks that end with the empty one. Whoever needs
more of an answer takes its bytes. `workbench/loadgen` measures engines; this one only keeps front ends busy.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from time import perf_counter
from typing import cast
from urllib.parse import urlsplit

LAST_CHUNK = b"0\r\n\r\n"
Build = Callable[[int], bytes]


class BrokenAnswer(RuntimeError):
    """An answer was refused, cut off or not what was asked for."""


@dataclass(slots=True)
class Answer:
    """One answer and its times on time.perf_counter. `first_at_s`: the first event, or the body's first byte."""

    sent_at_s: float
    first_at_s: float = 0.0
    ended_at_s: float = 0.0
    status: int = 0
    parts: list[bytes] = field(default_factory=list)

    @property
    def content(self) -> bytes:
        """Head and body as they came, chunk sizes included."""
        return b"".join(self.parts)

    @property
    def ttft_s(self) -> float:
        """Seconds from the send to the first event."""
        return self.first_at_s - self.sent_at_s

    @property
    def e2e_s(self) -> float:
        """Seconds from the send to the last byte."""
        return self.ended_at_s - self.sent_at_s


class Connection(asyncio.Protocol):
    """One kept connection; asks one thing at a time."""

    def __init__(self) -> None:
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._num_left: int | None = None  # of the body; None while the head is not whole, -1 when it is chunked
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Connected."""
        self._transport = cast("asyncio.Transport", transport)

    def ask(self, request: bytes) -> asyncio.Future[Answer]:
        """Sends; the future holds the answer once it is whole.

        Raises:
            BrokenAnswer: in the future, when the connection is closed before.
        """
        self._done = asyncio.get_running_loop().create_future()
        self._num_left, self._tail = None, b""
        self._answer = Answer(perf_counter())
        self._transport.write(request)
        return self._done

    @property
    def received(self) -> bytes:
        """What has come so far of an answer that is not whole yet."""
        return b"" if self._answer is None else self._answer.content

    def data_received(self, data: bytes) -> None:
        """Keeps what came and looks for the end."""
        answer = self._answer
        if answer is None:
            return
        answer.parts.append(data)
        if self._num_left is None:
            data = self._read_head(answer)
        if not answer.first_at_s and data:
            answer.first_at_s = perf_counter()
        if self._num_left == -1:
            self._tail = (self._tail + data[-5:])[-5:]
            if self._tail == LAST_CHUNK:
                self._finish(answer)
        elif self._num_left is not None:
            self._num_left -= len(data)
            if self._num_left <= 0:
                self._finish(answer)

    def _read_head(self, answer: Answer) -> bytes:
        """Takes the head if it is whole; returns what came of the body."""
        head, separator, body = answer.content.partition(b"\r\n\r\n")
        if not separator:
            return b""
        answer.status = int(head[9:12])
        lower = head.lower()
        place = lower.find(b"\r\ncontent-length:")
        self._num_left = -1 if place < 0 else int(lower[place + 17 :].split(b"\r\n", 1)[0])
        return body

    def _finish(self, answer: Answer) -> None:
        answer.ended_at_s = perf_counter()
        self._answer, done = None, self._done
        if done is not None and not done.done():
            done.set_result(answer)

    def connection_lost(self, exc: Exception | None) -> None:
        """Closed by the other side, or by close()."""
        if self._done is not None and not self._done.done():
            self._done.set_exception(BrokenAnswer(f"the connection was closed amid an answer: {exc}"))
            self._done.exception()  # whoever waits gets it; when all stop at the first failure, the others are quiet

    def close(self) -> None:
        """Closes it."""
        self._transport.close()


async def connect(url: str) -> Connection:
    """A connection to the server at `url`.

    Raises:
        OSError: nobody listens.
    """
    parts = urlsplit(url)
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(Connection, parts.hostname or "127.0.0.1", parts.port or 80)
    return connection


def encode(path: str, body: bytes, headers: Sequence[str] = ()) -> bytes:
    """A POST of JSON."""
    lines = [f"POST {path} HTTP/1.1", "host: 127.0.0.1", "content-type: application/json", *headers]
    return "\r\n".join([*lines, f"content-length: {len(body)}", "", ""]).encode("latin-1") + body


async def closed_loop(urls: Sequence[str], build: Build, num_requests: int, concurrency: int) -> list[Answer]:
    """`num_requests` requests, `concurrency` at a time, spread over `urls`; all must be answered with 200.

    Args:
        urls: servers, taken in turn by the connections.
        build: the bytes of request number N.
        num_requests: to send in all.
        concurrency: connections, each with one request at a time.

    Raises:
        BrokenAnswer: one was not.
    """
    return await _run(urls, build, iter(range(num_requests)), concurrency, None)


async def paced(
    urls: Sequence[str], build: Build, num_requests: int, rate_rps: float, concurrency: int = 64
) -> list[Answer]:
    """As closed_loop, but request number N goes out N / `rate_rps` seconds after the start, or when a place is free.

    Raises:
        BrokenAnswer: one was not answered with 200.
    """
    return await _run(urls, build, iter(range(num_requests)), concurrency, rate_rps)


async def _run(
    urls: Sequence[str], build: Build, numbers: Iterator[int], concurrency: int, rate_rps: float | None
) -> list[Answer]:
    connections = [await connect(urls[number % len(urls)]) for number in range(concurrency)]
    answers: list[Answer] = []
    start_s = asyncio.get_running_loop().time()
    due_s = None if rate_rps is None else lambda number: start_s + number / rate_rps
    try:
        async with asyncio.TaskGroup() as users:
            for connection in connections:
                users.create_task(_user(connection, build, numbers, answers, due_s))
    except ExceptionGroup as failures:
        raise failures.exceptions[0] from failures
    finally:
        for connection in connections:
            connection.close()
    return answers


async def _user(
    connection: Connection,
    build: Build,
    numbers: Iterator[int],
    answers: list[Answer],
    due_s: Callable[[int], float] | None,
) -> None:
    for number in numbers:
        if due_s is not None:
            await asyncio.sleep(due_s(number) - asyncio.get_running_loop().time())
        answer = await connection.ask(build(number))
        if answer.status != 200:
            raise BrokenAnswer(f"status {answer.status}: {answer.content[-400:].decode(errors='replace')}")
        answers.append(answer)
