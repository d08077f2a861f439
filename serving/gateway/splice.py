"""Tokens of a stream that pass from the engine's socket to the client's as they came, chunk framing included.

What an engine sends for a token differs from the last one's in the token alone. So the bytes around the first token are
kept, and whatever comes in exactly these bytes, as one chunk, is a token and nothing else: no end, usage or error.
Everything else is not taken, and goes the way on which it is parsed.
"""

from __future__ import annotations

import re
from collections.abc import Callable

MAX_LESSONS = 4
"""Events learned from in a stream: reasoning, then text. An engine that writes each in its own way is not followed."""

# Inside a JSON text every quote is escaped, and no line ends.
_TOKEN = re.compile(rb'"(?:content|text|reasoning|reasoning_content)":"((?:[^"\\]|\\.)+)"')
_NEVER = b"\0"


class TokenSplice:
    """Takes the chunks of one stream that are a token in known bytes.

    Args:
        write: sends chunks to the client as they are.

    Attributes:
        num_tokens: taken since this was last set to 0.
        lessons_left: events from which it may still learn.
    """

    def __init__(self, write: Callable[[bytes], None]) -> None:
        self.num_tokens = 0
        self.lessons_left = MAX_LESSONS
        self._write = write
        self._head = self._tail = _NEVER
        self._num_quotes = self._num_bytes = 0

    def learn(self, event: bytes) -> None:
        """Learns what surrounds the token in `event`: one whole event whose one choice goes on, without usage."""
        self.lessons_left -= 1
        found = _TOKEN.search(event)
        if found is None or b'"token_ids":[' in event:
            return
        start, end = found.span(1)
        self._head = b"\r\n" + event[:start]
        self._tail = event[end:] + b"\r\n"
        self._num_quotes = self._head.count(b'"') + self._tail.count(b'"')
        self._num_bytes = len(event) - (end - start)

    def take(self, data: bytes) -> bool:
        """Sends `data` when it is chunks with a token each in the bytes known. It has to begin where a chunk begins."""
        at = data.find(b"\r\n")
        size = len(data) - at - 4
        if (
            size > self._num_bytes
            and data.startswith(self._head, at)
            and data.endswith(self._tail)
            and data.count(b'"') == self._num_quotes
            and data.startswith(b"%x\r" % size)
        ):
            self.num_tokens += 1
            self._write(data)
            return True
        return data.endswith(self._tail) and self._take_many(data)

    def _take_many(self, data: bytes) -> bool:
        """As `take`, of chunks that came together: all of them, or none."""
        *chunks, rest = data.split(self._tail)
        if rest or data.count(b'"') != self._num_quotes * len(chunks):
            return False
        num_tail = len(self._tail) - 4  # of the bytes that a chunk's size counts, less the line end after the size
        for chunk in chunks:
            at = chunk.find(b"\r\n")
            size = len(chunk) - at + num_tail
            if size <= self._num_bytes or not chunk.startswith(self._head, at) or not chunk.startswith(b"%x\r" % size):
                return False
        self.num_tokens += len(chunks)
        self._write(data)
        return True

    def stop(self) -> None:
        """Takes nothing any more: the answer is at its end."""
        self.lessons_left = 0
        self._head = _NEVER
