"""How late the client itself was, and when that makes a run worthless."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from workbench.loadgen.records import RequestRecord
from workbench.stats import quantile

MAX_SEND_LAG_S = 0.05
MAX_LOOP_LAG_S = 0.05
_TICK_S = 0.01


@dataclass(frozen=True, slots=True)
class ClientError:
    """How late this client itself was: what it adds, at most, to the server's latencies.

    Of several processes each figure is the worst one's.

    Attributes:
        send_lag_p99_s: the actual against the intended send.
        loop_lag_p99_s: how late the event loop woke a timer during the run, which bounds how late a stamp can be.
        invalid: why the run must not be believed, None when it may.
        is_real_time: whether the system let the client run at real-time priority (quiet.py).
        num_unsent: requests that came due and were never sent, for as many as are allowed were in flight.
        stamp_error_p99_s: how late it stamped what a known server sent, right before the run (calibration.py).
        cpu_frac: CPU time of the run over its length; near 1 the client is at its end.
        num_processes: that shared the load.
    """

    send_lag_p99_s: float
    loop_lag_p99_s: float
    invalid: str | None = None
    is_real_time: bool = False
    num_unsent: int = 0
    stamp_error_p99_s: float = 0.0
    cpu_frac: float = 0.0
    num_processes: int = 1

    @property
    def stamp_lag_s(self) -> float:
        """How late a stamp can be at P99: the worse of what was measured before the run and during it."""
        return max(self.loop_lag_p99_s, self.stamp_error_p99_s)


def client_error(
    records: list[RequestRecord],
    concurrency: int | None,
    loop_lags_s: list[float],
    is_real_time: bool,
    num_unsent: int,
    stamp_error_p99_s: float = 0.0,
    cpu_frac: float = 0.0,
) -> ClientError:
    """What one process adds, from a run's records and the lags of its loop.

    The first wave of a closed loop of `concurrency` users opens its connections all at once and is warm-up: it doesn't
    count. Nor do requests without an answer there, whose send is their schedule; in an open loop (None) all are held
    to the schedule.
    """
    is_closed = concurrency is not None
    send_lags_s = [r.send_lag_s for r in records[concurrency or 0 :] if r.http_status is not None or not is_closed]
    found = ClientError(
        send_lag_p99_s=quantile(send_lags_s, 0.99) if send_lags_s else 0.0,
        loop_lag_p99_s=quantile(loop_lags_s, 0.99) if loop_lags_s else 0.0,
        is_real_time=is_real_time,
        num_unsent=num_unsent,
        stamp_error_p99_s=stamp_error_p99_s,
        cpu_frac=cpu_frac,
    )
    return replace(found, invalid=_why_invalid(found))


def worst(errors: Sequence[ClientError]) -> ClientError:
    """The error of a client of several processes: each figure of the one that was worst."""
    found = ClientError(
        send_lag_p99_s=max(error.send_lag_p99_s for error in errors),
        loop_lag_p99_s=max(error.loop_lag_p99_s for error in errors),
        is_real_time=all(error.is_real_time for error in errors),
        num_unsent=sum(error.num_unsent for error in errors),
        stamp_error_p99_s=max(error.stamp_error_p99_s for error in errors),
        cpu_frac=max(error.cpu_frac for error in errors),
        num_processes=len(errors),
    )
    return replace(found, invalid=_why_invalid(found))


def _why_invalid(error: ClientError) -> str | None:
    if error.num_unsent:
        return (
            f"the client fell behind: {error.num_unsent} requests came due and were never sent, too many were in flight"
        )
    send_lag_s, loop_lag_s = error.send_lag_p99_s, error.loop_lag_p99_s
    if send_lag_s > MAX_SEND_LAG_S:
        return f"the client fell behind: p99 of its sends was {send_lag_s:.3f} s late (limit {MAX_SEND_LAG_S} s)"
    if loop_lag_s > MAX_LOOP_LAG_S:
        return f"the client was too slow: p99 of its loop was {loop_lag_s:.3f} s late (limit {MAX_LOOP_LAG_S} s)"
    if error.stamp_error_p99_s > MAX_LOOP_LAG_S:
        return (
            f"the client was too slow before the run began: p99 of its stamps was {error.stamp_error_p99_s:.3f} s late "
            f"(limit {MAX_LOOP_LAG_S} s)"
        )
    return None


@asynccontextmanager
async def loop_lag() -> AsyncIterator[list[float]]:
    """Collects how late timers fire while the context is open."""
    lags_s: list[float] = []
    loop = asyncio.get_running_loop()
    timer: asyncio.TimerHandle | None = None

    def tick(due_s: float) -> None:
        nonlocal timer
        now_s = loop.time()
        lags_s.append(max(0.0, now_s - due_s))
        timer = loop.call_at(now_s + _TICK_S, tick, now_s + _TICK_S)

    # A timer and no task: it runs a hundred times a second beside what is measured.
    timer = loop.call_at(loop.time() + _TICK_S, tick, loop.time() + _TICK_S)
    try:
        yield lags_s
    finally:
        if timer is not None:
            timer.cancel()
