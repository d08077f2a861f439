"""What engines counted over a run, set against what the client counted.

    window = await CounterWindow.open(urls)
    …the load…
    counted = await window.close(records, task)      # EngineCount, or Absent(reason)

Read from vLLM's `/metrics`. Counters of several engines (a gateway's replicas) are added up.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from serving.clock import SystemClock
from serving.core.errors import UpstreamError
from serving.core.state import ReplicaSnapshot, Task
from serving.engine.client import EngineClient
from serving.engine.scrape import scrape
from workbench.absent import Absent
from workbench.loadgen import RequestRecord
from workbench.measurement.cell_checks import Counters

SETTLE_TIMEOUT_S = 3.0
POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class EngineCount:
    """Growth of the engines' counters over the run; `gap` says how it differs from the client's sums, if it does."""

    num_prompt_tokens: int
    num_output_tokens: int
    prefix_cache_hit_frac: float
    gap: str | None = None


@dataclass(frozen=True, slots=True)
class CounterWindow:
    """The counters as they stood before the run; or why they are not known."""

    urls: tuple[str, ...]
    before: tuple[ReplicaSnapshot, ...] | Absent

    @classmethod
    async def open(cls, urls: Sequence[str]) -> CounterWindow:
        """Reads the counters of all engines at `urls`."""
        return cls(tuple(urls), await _read(urls))

    async def close(self, records: Sequence[RequestRecord], task: Task) -> EngineCount | Absent:
        """Reads them again until they agree with the records, or a few seconds long: engines count late."""
        if isinstance(self.before, Absent):
            return self.before
        if any(record.is_prompt_estimated for record in records if record.ok):
            return Absent("the server tells no prompt's length, so there is nothing to set its counters against")
        deadline_s = time.monotonic() + SETTLE_TIMEOUT_S
        while True:
            after = await _read(self.urls)
            if isinstance(after, Absent):
                return after
            counters = _total([Counters.between(*pair) for pair in zip(self.before, after, strict=True)])
            gap = counters.gap(records, task)
            if gap is None or time.monotonic() >= deadline_s:
                return EngineCount(counters.num_prompt_tokens, counters.num_output_tokens, counters.hit_frac, gap)
            await asyncio.sleep(POLL_S)


async def _read(urls: Sequence[str]) -> tuple[ReplicaSnapshot, ...] | Absent:
    if not urls:
        return Absent("no engine's counters are at hand")
    try:
        return tuple(await asyncio.gather(*map(_snapshot, urls)))
    except UpstreamError as error:
        return Absent(f"no engine counters: {error.message}")


async def _snapshot(url: str) -> ReplicaSnapshot:
    async with EngineClient(url) as client:
        return await scrape(client, url, SystemClock())


def _total(counters: Sequence[Counters]) -> Counters:
    return Counters(
        sum(one.num_prompt_tokens for one in counters),
        sum(one.num_output_tokens for one in counters),
        sum(one.num_queried_tokens for one in counters),
        sum(one.num_hit_tokens for one in counters),
    )


async def offers_counters(url: str) -> bool:
    """Whether vLLM's counters are at hand there: what has them takes vLLM's extras too."""
    return not isinstance(await _read([url]), Absent)
