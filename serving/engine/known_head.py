"""A message's head that the parser has judged, by which the next one on the same connection is known again.

On a kept connection heads differ in their content-length, and often in nothing else. A message that came in one piece
with the bytes of the last head, and with as much body as its own length says, needs no parser: what these bytes mean
was found before. Whatever differs is parsed.
"""

from __future__ import annotations

from collections.abc import Mapping

Fields = Mapping[bytes, bytes]

MAX_MISSES = 16
"""Heads in a row, each unlike the one before, after which a connection gives up keeping them."""

_LENGTH = b"content-length"
_LINE = b"\r\n" + _LENGTH + b":"
_END = b"\r\n\r\n"


class KnownHead:
    """One head.

    Attributes:
        fields: of the head, but for its length; names in lower case.
    """

    __slots__ = ("_begin", "_end", "_num_begin", "_num_end", "fields")

    def __init__(self, begin: bytes, end: bytes, fields: Fields) -> None:
        """`begin` and `end`: what stands before and after the digits of the length, `end` up to the body."""
        self.fields = fields
        self._begin = begin
        self._end = end
        self._num_begin = len(begin)
        self._num_end = len(end)

    def body_in(self, data: bytes) -> bytes | None:
        """The body, when `data` is this head with another length and as much body; else None."""
        stop = data.find(b"\r", self._num_begin)
        if stop < 0 or not data.startswith(self._begin) or not data.startswith(self._end, stop):
            return None
        body = data[stop + self._num_end :]
        return body if data[self._num_begin : stop] == b"%d" % len(body) else None


def known_head(data: bytes, fields: Fields) -> KnownHead | None:
    """The head of the one message that `data` is, with the fields that the parser found in it; None without a length.

    What it gives is right only when the parser found that message whole, and nothing else, in `data`.
    """
    length = fields.get(_LENGTH)
    end = data.find(_END)
    if length is None or end < 0 or len(data) - end - len(_END) != int(length):
        return None
    head = data[:end].lower()
    at = head.find(_LINE)
    digits = data.find(length, at + len(_LINE))
    if at < 0 or head.count(_LINE) != 1 or data[at + len(_LINE) : digits].strip(b" \t"):
        return None
    stop = digits + len(length)
    if not data.startswith(b"\r\n", stop) or length != b"%d" % int(length):
        return None
    rest = {name: value for name, value in fields.items() if name != _LENGTH}
    return KnownHead(data[:digits], data[stop : end + len(_END)], rest)
