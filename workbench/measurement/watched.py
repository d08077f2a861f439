"""A measurement in MLflow while it is made: a run that follows it, or a word why there is none."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Protocol

from serving.core.errors import ServingError

OnRequests = Callable[[int, int], None]


class LiveMeasurement(Protocol):
    """A run that follows a measurement: `workbench.tracking.LiveRun`."""

    trouble: str | None

    def start(self) -> None:
        """Begins to send."""
        ...

    def on_requests(self, ended: int, planned: int) -> None:
        """Takes how far the measurement is."""
        ...

    def stop(self) -> None:
        """Ends sending; the measurement will be logged into the run."""
        ...

    def abandon(self) -> None:
        """Ends the run: there will be no measurement."""
        ...


@asynccontextmanager
async def watched(
    open_run: Callable[[], LiveMeasurement] | None, on_requests: OnRequests, on_trouble: Callable[[str], None]
) -> AsyncIterator[OnRequests]:
    """What to tell of requests inside the block, so that MLflow hears of them too; its trouble stops nothing.

    Args:
        open_run: makes the run, in a thread; raises ServingError when MLflow is down or refuses. None: no run.
        on_requests: told as well.
        on_trouble: told why MLflow does not follow, or no longer.
    """
    if open_run is None:
        yield on_requests
        return
    try:
        live = await asyncio.to_thread(open_run)
    except ServingError as error:
        on_trouble(error.message)
        yield on_requests
        return

    def tell_both(ended: int, planned: int) -> None:
        live.on_requests(ended, planned)
        on_requests(ended, planned)

    live.start()
    try:
        yield tell_both
    except BaseException:
        await asyncio.to_thread(live.abandon)
        raise
    await asyncio.to_thread(live.stop)
    if live.trouble is not None:
        on_trouble(live.trouble)
