"""Idempotency: what counts as a key, which answers are final, and when a dead worker's key may be taken over.

    nobody has the key ──▶ running ──▶ finished      its answer is replayed
                             ├──────▶ dropped        its answer was not kept: 409, never a second run
                             ├──────▶ nobody has it  an error, or the run was cut off: a retry runs it again
                             └──────▶ running        its worker is dead: whoever asks next takes it over

The transitions themselves are scripts in the store (`serving/store/idempotency.py`), for they must be atomic over all
workers. Here is what a worker decides alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from serving.core.errors import BadRequest

MAX_KEY_CHARS = 255
_KEY = re.compile(rb"[!-~]{1,%d}" % MAX_KEY_CHARS)

DAY_S = 86_400.0


@dataclass(frozen=True, slots=True)
class ReplaySettings:
    """How answers are kept.

    Attributes:
        kept_s: how long a key protects from running twice, and at most how long its answer is kept.
        lease_s: a worker that was silent for so long is dead, and its keys may be taken over.
        flush_s: at most so long a part of a stream waits before it is stored.
        flush_bytes: so much of a stream is stored at once.
        poll_s: how often whoever follows a running answer looks for more.
        max_answer_bytes: bound on what one answer takes in the store (compressed, sealed).
        max_tenant_bytes: bound on what all answers of a tenant take.
        max_unread_bytes: so much may wait for a client that does not read, before its engine is held up.
    """

    kept_s: float = DAY_S
    lease_s: float = 3.0
    flush_s: float = 0.25
    flush_bytes: int = 16 * 1024
    poll_s: float = 0.1
    max_answer_bytes: int = 2**20
    max_tenant_bytes: int = 64 * 2**20
    max_unread_bytes: int = 2**20

    def content_kept_s(self, retention_days: float | None) -> float:
        """How long an answer's content is kept for a tenant that has said so, or not."""
        return self.kept_s if retention_days is None else min(self.kept_s, retention_days * DAY_S)


def check_key(header: bytes) -> str:
    """The key in the header Idempotency-Key.

    Raises:
        BadRequest: it is empty, too long, or not visible ASCII.
    """
    if _KEY.fullmatch(header) is None:
        raise BadRequest(f"Idempotency-Key must be 1 to {MAX_KEY_CHARS} visible ASCII characters without blanks")
    return header.decode("ascii")


def is_final(status: int) -> bool:
    """Whether a retry shall get this answer again; otherwise the key is free and a retry runs the request.

    An error cost nothing and may have another answer next time: the client mends its request under the same key, a
    limit is raised, a replica is there again. A stream that broke after its head was sent is a 200, and is kept.
    """
    return status < 400


class StoreWatch:
    """What a worker knows of its lease and of the store, from its heartbeats.

    A lease that has run out in the store means that its worker is dead only if the worker could have renewed it. So
    a worker that has not itself reached the store for a whole lease without a gap takes nothing over: after the
    store was away, all get that long to renew.
    """

    def __init__(self, lease_s: float) -> None:
        self._lease_s = lease_s
        self._since_s: float | None = None
        self._last_s: float | None = None

    @property
    def interval_s(self) -> float:
        """Time between two heartbeats; two of three may be lost."""
        return self._lease_s / 3

    def on_beat(self, began_s: float) -> None:
        """A heartbeat that began at `began_s` reached the store."""
        if self._since_s is None or self._last_s is None or began_s - self._last_s > self._lease_s * 2 / 3:
            self._since_s = began_s
        self._last_s = began_s

    def on_lost_beat(self) -> None:
        """The store did not answer."""
        self._since_s = None

    def holds_lease(self, now_s: float) -> bool:
        """Whether the worker counts as alive in the store, with time left for a call."""
        return self._last_s is not None and now_s - self._last_s < self._lease_s * 2 / 3

    def may_take_over(self, now_s: float) -> bool:
        """Whether a lease that has run out means a dead worker."""
        return self.holds_lease(now_s) and self._since_s is not None and now_s - self._since_s >= self._lease_s
