"""Comments on a stream whose first token takes long, so that nobody on the way takes the connection for dead."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from serving.gateway.http_errors import Headers
from serving.gateway.relay import STREAM_HEADERS, Writer

COMMENT = b": keep-alive\n\n"


class KeepAlive:
    """Sends a comment every `interval_s` until `stop()`.

    The first one sends the head too: from then on a failure can't become a status any more and ends the stream as
    an event.
    """

    def __init__(self, writer: Writer, headers: Callable[[], Headers], interval_s: float) -> None:
        """`headers` is asked when the head is sent."""
        self._writer = writer
        self._headers = headers
        self._interval_s = interval_s
        self._timer = asyncio.get_running_loop().call_later(interval_s, self._beat)

    def stop(self) -> None:
        """The stream has begun or ended."""
        self._timer.cancel()

    def _beat(self) -> None:
        if not self._writer.is_started:
            self._writer.start(200, STREAM_HEADERS + self._headers())
        self._writer.write(COMMENT)
        self._timer = asyncio.get_running_loop().call_later(self._interval_s, self._beat)
