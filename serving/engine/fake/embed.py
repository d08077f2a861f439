"""One embeddings request in the fake engine: a place in the scheduler for as long as a prefill takes."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

from serving.engine.fake.generation import QUEUE_FULL
from serving.engine.fake.http import HttpConnection
from serving.engine.fake.openai import error_body
from serving.engine.fake.scheduler import ScheduledRequest, Scheduler
from serving.engine.fake.settings import FakeSettings, Faults
from serving.engine.fake.write_log import RequestLog, Write, WriteKind


class Embedding:
    """Answers with `body`, ready beforehand, once its time has come.

    Args:
        on_end: called once with the finish reason.
    """

    def __init__(
        self,
        body: Any,
        *,
        connection: HttpConnection,
        log: RequestLog,
        settings: FakeSettings,
        faults: Faults,
        scheduler: Scheduler,
        on_end: Callable[[RequestLog, str], None],
    ) -> None:
        self._body = body
        self._connection = connection
        self._log = log
        self._settings = settings
        self._faults = faults
        self._scheduler = scheduler
        self._on_end = on_end
        self._timer: asyncio.TimerHandle | None = None
        self._scheduled = ScheduledRequest(log.num_prompt_tokens, 0, self._on_start)
        self._is_scheduled = False

    def begin(self) -> None:
        """Takes the request in, or turns it away."""
        self._connection.on_lost = self._on_client_left
        if self._faults.hang:
            return
        self._is_scheduled = self._scheduler.submit(self._scheduled)
        if not self._is_scheduled:
            self._log.status = 503
            self._answer(error_body(503, QUEUE_FULL), "error")

    def _on_start(self) -> None:
        self._log.started_at_s = perf_counter()
        base_ms = self._settings.ttft_ms if self._faults.ttft_ms is None else self._faults.ttft_ms
        delay_ms = self._faults.head_late_ms + base_ms
        delay_ms += self._log.num_prompt_tokens * self._settings.prefill_ms_per_token
        self._timer = asyncio.get_running_loop().call_later(delay_ms / 1000, self._on_done)

    def _on_done(self) -> None:
        if self._faults.die_after_tokens is not None:
            self._connection.abort()
            self._end("died")
        else:
            self._scheduler.grow(self._scheduled, 0)
            self._answer(self._body, "stop")

    def _answer(self, body: Any, finish_reason: str) -> None:
        self._log.writes.append(Write(perf_counter(), 0, WriteKind.BODY))
        self._connection.respond_json(self._log.status, body)
        self._end(finish_reason)

    def _on_client_left(self) -> None:
        self._log.aborted_at_s = perf_counter()
        self._end("abort")

    def _end(self, finish_reason: str) -> None:
        if self._timer is not None:
            self._timer.cancel()
        if self._is_scheduled:
            self._is_scheduled = False
            self._scheduler.release(self._scheduled, finish_reason)
        self._on_end(self._log, finish_reason)
