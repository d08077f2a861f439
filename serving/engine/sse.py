"""Server-sent events on the wire: split a byte stream into events, take an event's payload.

After https://html.spec.whatwg.org/multipage/server-sent-events.html, for line ends of `\\n` and `\\r\\n`; the
lone `\\r` that the standard also allows is sent by no engine and is not taken for a line end here.
"""

from __future__ import annotations

import re

from serving.core.errors import UpstreamError

MAX_EVENT_BYTES = 8 * 1024 * 1024
DONE = b"[DONE]"
_EVENT_END = re.compile(rb"\n\r?\n")
_END_BYTES = 3  # of the longest end


class EventSplitter:
    """Cuts data that arrives in any pieces into complete events, byte for byte.

    Attributes:
        rest: what has come of an event that is not complete.
    """

    def __init__(self) -> None:
        self.rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Takes more data.

        Returns:
            The events complete by now, raw, each with its trailing blank line.

        Raises:
            UpstreamError: an event is longer than `MAX_EVENT_BYTES`.
        """
        start = max(0, len(self.rest) - _END_BYTES)
        if self.rest:
            data = self.rest + data
        events = []
        begin = 0
        for match in _EVENT_END.finditer(data, start):
            events.append(data[begin : match.end()])
            begin = match.end()
        self.rest = data[begin:]
        if len(self.rest) > MAX_EVENT_BYTES:
            raise UpstreamError(f"the engine sent an event of more than {MAX_EVENT_BYTES} bytes")
        return events


def payload(event: bytes) -> bytes | None:
    """The data of an event: its `data:` lines joined by newlines, or None when it has none (a comment)."""
    if event.startswith(b"data: ") and event.count(b"\n") == 2:  # all that an engine sends, in practice
        return event[6:].rstrip(b"\r\n")
    values = []
    for line in event.split(b"\n"):
        name, _, value = line.removesuffix(b"\r").partition(b":")
        if name == b"data":
            values.append(value.removeprefix(b" "))
    return b"\n".join(values) if values else None
