"""How late the client itself was, and when that makes a run worthless."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from workbench.loadgen.arrivals import Arrival, ClosedLoop
from workbench.loadgen.records import RequestRecord
from workbench.stats import quantile

MAX_SEND_LAG_S = 0.05
MAX_LOOP_LAG_S = 0.05
_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class ClientError:
    """How late this client itself was: what it adds, at most, to the server's latencies.

    `send_lag_p99_s` is the actual against the intended send; `loop_lag_p99_s` how late the event loop
    woke a timer during the run, which bounds how late a stamp can be. `invalid` says why the run must
    not be believed, None when it may. `is_real_time`: whether the system let the client run at real-time
    priority (quiet.py). `num_unsent`: requests that came due and were never sent, for as many as are allowed were
    in flight.
    """

    send_lag_p99_s: float
    loop_lag_p99_s: float
    invalid: str | None = None
    is_real_time: bool = False
    num_unsent: int = 0


def client_error(
    records: list[RequestRecord], arrival: Arrival, loop_lags_s: list[float], is_real_time: bool, num_unsent: int
) -> ClientError:
    """What the client adds, from a run's records and the lags of its loop.

    The first wave of a closed loop opens its connections all at once and is warm-up: it doesn't count. Nor do
    requests without an answer there, whose send is their schedule; in an open loop all are held to the schedule.
    """
    is_closed = isinstance(arrival, ClosedLoop)
    counted = records[arrival.concurrency :] if isinstance(arrival, ClosedLoop) else records
    send_lags_s = [record.send_lag_s for record in counted if record.http_status is not None or not is_closed]
    send_lag_s = quantile(send_lags_s, 0.99) if send_lags_s else 0.0
    loop_lag_s = quantile(loop_lags_s, 0.99) if loop_lags_s else 0.0
    invalid = None
    if num_unsent:
        invalid = f"the client fell behind: {num_unsent} requests came due and were never sent, too many were in flight"
    elif send_lag_s > MAX_SEND_LAG_S:
        invalid = f"the client fell behind: p99 of its sends was {send_lag_s:.3f} s late (limit {MAX_SEND_LAG_S} s)"
    elif loop_lag_s > MAX_LOOP_LAG_S:
        invalid = f"the client was too slow: p99 of its loop was {loop_lag_s:.3f} s late (limit {MAX_LOOP_LAG_S} s)"
    return ClientError(send_lag_s, loop_lag_s, invalid, is_real_time, num_unsent)


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """Collects how late timers fire while the context is open."""
    lags_s: list[float] = []

    async def tick() -> None:
        while True:
            due_s = time.perf_counter() + _TICK_S
            await asyncio.sleep(_TICK_S)
            lags_s.append(max(0.0, time.perf_counter() - due_s))

    task = asyncio.create_task(tick())
    try:
        yield lags_s
    finally:
        task.cancel()
