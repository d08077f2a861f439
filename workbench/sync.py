"""Running asynchronous work from plain calls, also where an event loop already runs (JupyterLab)."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import Future
from threading import Thread
from typing import Any, TypeVar

T = TypeVar("T")


def run_sync(work: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Runs `work()` to its end on a loop of its own, in a thread of its own, and returns its result.

    A KeyboardInterrupt in the caller (Ctrl-C, JupyterLab's stop button) cancels the work, waits until it has
    cleaned up after itself, and goes on up.
    """
    done: Future[T] = Future()
    started: Future[tuple[asyncio.AbstractEventLoop, asyncio.Task[T]]] = Future()

    async def tell_and_work() -> T:
        task = asyncio.create_task(work())
        started.set_result((asyncio.get_running_loop(), task))
        return await task

    def run() -> None:
        try:
            done.set_result(asyncio.run(tell_and_work()))
        except BaseException as error:  # noqa: BLE001 - whatever it is, it is raised in the caller's thread
            done.set_exception(error)

    thread = Thread(target=run, name="workbench-sync", daemon=True)
    thread.start()
    try:
        return done.result()
    except KeyboardInterrupt:
        loop, task = started.result()
        if not done.done():
            loop.call_soon_threadsafe(task.cancel)
        raise
    finally:
        thread.join()
