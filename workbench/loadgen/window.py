"""The steady window of a run and the work that lies in it.

The window begins when the last of the warm-up requests has ended (a closed loop's first wave starts in step
and prefills all at once) and ends with the first request that ends after the last send: until then the load
was as asked.

Work counts by the share of its own time that lies inside: a token by the share of the gap before it, a
prompt by the share of its time to first token. A step of the whole batch at the window's edge then neither
counts twice nor is lost.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from workbench.loadgen.records import RequestRecord


@dataclass(frozen=True, slots=True)
class Window:
    """The steady window and the work of served requests in it, by all units together; totals are floats."""

    start_s: float
    end_s: float
    num_requests: float
    num_prompt_tokens: float
    num_cached_tokens: float
    num_output_tokens: float

    @property
    def length_s(self) -> float:
        """Seconds from start to end."""
        return self.end_s - self.start_s


def steady_window(ordered: Sequence[RequestRecord], num_warm_up: int) -> tuple[float, float] | None:
    """Start and end of the steady window, or None when there is none. `ordered` as they were sent."""
    ends = [left_at_s(record) for record in ordered]
    last_sent_s = max(record.sent_at_s for record in ordered)
    start_s = max(ends[:num_warm_up], default=min(record.sent_at_s for record in ordered))
    end_s = min((end for end in ends if end > last_sent_s), default=last_sent_s)
    return (start_s, end_s) if end_s > start_s else None


def left_at_s(record: RequestRecord) -> float:
    """When the request stopped to be load."""
    ends = (record.end_at_s, record.stream_end_at_s, record.sent_at_s)
    return next(end for end in ends if end is not None)


@dataclass(frozen=True, slots=True)
class Work:
    """Pieces of work, each spread evenly over its own time."""

    amount: npt.NDArray[np.float64]
    start_s: npt.NDArray[np.float64]
    end_s: npt.NDArray[np.float64]

    def between(self, start_s: float, end_s: float) -> float:
        """How much of the work lies in the time from `start_s` to `end_s`."""
        inside_s = np.clip(np.minimum(self.end_s, end_s) - np.maximum(self.start_s, start_s), 0.0, None)
        return float(np.sum(self.amount * inside_s / np.maximum(self.end_s - self.start_s, 1e-9)))


def spread_work(pieces: Iterable[tuple[float, float, float]]) -> Work:
    """Work from (amount, start, end) triples."""
    columns = np.array(list(pieces), dtype=np.float64).reshape(-1, 3).T
    return Work(columns[0], columns[1], columns[2])


def joined(*works: Work) -> Work:
    """Several kinds of work as one."""
    columns = (np.concatenate([getattr(work, name) for work in works]) for name in ("amount", "start_s", "end_s"))
    return Work(*columns)


def request_work(served: Sequence[RequestRecord]) -> Work:
    """Each request over its time from send to end."""
    return spread_work((1.0, record.sent_at_s, left_at_s(record)) for record in served)


def prompt_work(served: Sequence[RequestRecord], *, cached: bool = False) -> Work:
    """Each prompt's tokens (or those found in the cache) over its time to first token."""
    return spread_work(
        (
            (record.num_cached_tokens or 0) if cached else record.num_prompt_tokens,
            record.sent_at_s,
            left_at_s(record) if record.first_token_at_s is None else record.first_token_at_s,
        )
        for record in served
    )


def output_work(served: Sequence[RequestRecord]) -> Work:
    """Each output token over the gap before it."""
    return spread_work(
        (count, start_s, end_s)
        for record in served
        for count, start_s, end_s in zip(
            record.chunk_tokens, (record.sent_at_s, *record.chunk_at_s), record.chunk_at_s, strict=False
        )
    )


def total_work(ordered: Sequence[RequestRecord], window: tuple[float, float]) -> Window:
    """What the served requests did in the window."""
    served = [record for record in ordered if record.ok]
    return Window(
        start_s=window[0],
        end_s=window[1],
        num_requests=request_work(served).between(*window),
        num_prompt_tokens=prompt_work(served).between(*window),
        num_cached_tokens=prompt_work(served, cached=True).between(*window),
        num_output_tokens=output_work(served).between(*window),
    )
