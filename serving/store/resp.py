"""The store's protocol (RESP2): commands to bytes, bytes to replies, without any I/O.

Source: https://redis.io/docs/latest/develop/reference/protocol-spec/ (RESP2; a connection speaks it unless told else).

    command   an array of bulk strings:  *2\\r\\n$3\\r\\nGET\\r\\n$1\\r\\nk\\r\\n
    reply     +status  -error  :number  $bulk string  *array, nested; $-1 and *-1 are None
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeAlias, Union

from serving.store.connection import StoreUnavailable

Part: TypeAlias = bytes | str | int | float
# An error inside an array stands as a value; one that is the whole reply is raised by the pipe.
Reply: TypeAlias = Union[bytes, int, "StoreRefused", list["Reply"], None]

_CRLF = b"\r\n"
_BULK, _NUMBER, _STATUS, _ARRAY, _ERROR = b"$:+*-"
# Deeper than any reply of a store command; what is deeper is no reply of ours.
_MAX_DEPTH = 16


class StoreRefused(StoreUnavailable):
    """The store answered with an error.

    Attributes:
        reason: the error's first word: `NOSCRIPT`, `WRONGTYPE`, `LOADING`, `ERR` …
    """

    def __init__(self, text: str) -> None:
        super().__init__(f"the store refused: {text}")
        self.reason = text.split(" ", 1)[0]


class BrokenReply(StoreUnavailable):
    """What came is no RESP2: nothing after it could be trusted."""


def encode(parts: Iterable[Part]) -> bytes:
    """One command as the store reads it."""
    words = [part if type(part) is bytes else str(part).encode() for part in parts]
    return b"".join([b"*%d\r\n" % len(words), *[b"$%d\r\n%b\r\n" % (len(word), word) for word in words]])


class ReplyParser:
    """Takes the stream apart as it comes; what is not yet a whole reply waits for the rest."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Reply]:
        """The replies that `data` completes, in order.

        Raises:
            BrokenReply: the stream is not RESP2.
        """
        if self._rest:
            data = self._rest + data
        replies: list[Reply] = []
        at, size = 0, len(data)
        try:
            while at < size:
                reply, at_next = _parse(data, at, 0)
                if at_next < 0:
                    break
                replies.append(reply)
                at = at_next
        except ValueError as error:
            raise BrokenReply(f"the store sent what is no reply: {error}") from error
        self._rest = data[at:] if at < size else b""
        return replies


def _parse(data: bytes, at: int, depth: int) -> tuple[Reply, int]:
    """The reply that begins at `at` and where the next one begins; -1 when it is not whole yet."""
    end = data.find(_CRLF, at)
    if end < 0:
        return None, -1
    kind, head = data[at], data[at + 1 : end]
    after = end + 2
    if kind == _BULK:
        length = int(head)
        if length < 0:
            return None, after
        stop = after + length
        return (data[after:stop], stop + 2) if len(data) >= stop + 2 else (None, -1)
    if kind == _NUMBER:
        return int(head), after
    if kind == _STATUS:
        return head, after
    if kind == _ERROR:
        return StoreRefused(head.decode(errors="replace")), after
    if kind == _ARRAY and depth < _MAX_DEPTH:
        return _parse_array(data, int(head), after, depth)
    raise ValueError(f"a reply begins with {data[at : at + 1]!r}")


def _parse_array(data: bytes, num_items: int, at: int, depth: int) -> tuple[Reply, int]:
    if num_items < 0:
        return None, at
    items: list[Reply] = []
    for _ in range(num_items):
        item, at = _parse(data, at, depth + 1)
        if at < 0:
            return None, -1
        items.append(item)
    return items, at
