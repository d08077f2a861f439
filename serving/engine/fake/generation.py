"""One request for text in the fake engine, from the queue to its last event: a chain of timers.

    begin ─▶ (head) ─▶ waiting ─▶ first step after ttft ─▶ step ─▶ … ─▶ last step ─▶ (usage) ─▶ ([DONE])

Each deadline is the one before plus a step's time, whenever the timer really fired. A request that does not stream
goes the same way and writes once at the end. Leaving at any point goes to `_on_client_left`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from time import perf_counter
from typing import Any

import orjson

from serving.engine.fake.agenda import Agenda, Entry
from serving.engine.fake.http import HttpConnection
from serving.engine.fake.language import block_hashes
from serving.engine.fake.openai import Answer, Generate, Kind, error_body
from serving.engine.fake.scheduler import ScheduledRequest, Scheduler
from serving.engine.fake.settings import FakeSettings, Faults, RejectAs
from serving.engine.fake.write_log import RequestLog, Write, WriteKind

QUEUE_FULL = "The request queue is full. Please retry later."


class Generation:
    """Runs one request.

    Args:
        paused: holds this object while it is paused by a fault.
        on_change: called after every write, for those who wait on the engine's log.
        on_end: called once with the finish reason.
    """

    def __init__(
        self,
        request: Generate,
        *,
        connection: HttpConnection,
        log: RequestLog,
        settings: FakeSettings,
        faults: Faults,
        scheduler: Scheduler,
        agenda: Agenda,
        paused: set[Generation],
        on_change: Callable[[], None],
        on_end: Callable[[RequestLog, str], None],
    ) -> None:
        self._request = request
        self._connection = connection
        self._log = log
        self._settings = settings
        self._faults = faults
        self._scheduler = scheduler
        self._agenda = agenda
        self._paused = paused
        self._pauses_after = faults.pause_after_tokens
        self._on_change = on_change
        self._on_end = on_end
        self._loop = asyncio.get_running_loop()
        self._answer = Answer(request, log.id, settings)
        self._tokens_per_chunk = faults.tokens_per_chunk or settings.tokens_per_chunk
        self._num_tokens = 0 if faults.no_token else len(request.tokens)
        self._num_emitted = 0
        self._deadline_s = 0.0
        self._step_timer: Entry | None = None
        self._other_timers: list[asyncio.TimerHandle] = []  # a few at most; those that fired stay
        self._is_released = False
        self._scheduled = ScheduledRequest(
            num_prompt_tokens=len(request.prompt_words),
            num_output_tokens=len(request.tokens),
            start=self._on_start,
            priority=request.priority,
            blocks=block_hashes(request.prompt_words, settings.block_size, request.cache_salt),
        )

    def begin(self) -> None:
        """Takes the request in, or turns it away."""
        self._connection.on_lost = self._on_client_left
        self._is_released = True  # as long as the scheduler doesn't have it
        if not self._faults.hang:
            self._after(self._faults.head_late_ms, self._submit)

    def _submit(self) -> None:
        if not self._scheduler.submit(self._scheduled):
            self._turn_away()
            return
        # The scheduler may have started it by now: that set a timer and wrote nothing, so the head comes first.
        self._is_released = False
        if self._request.stream:
            self._write(WriteKind.HEAD, self._connection.begin_stream)
            if self._faults.role_at_once and self._request.kind is Kind.CHAT:
                self._write_role()

    def _turn_away(self) -> None:
        body = error_body(503, QUEUE_FULL)
        if self._request.stream and self._settings.reject_as is RejectAs.EVENT:
            self._write(WriteKind.HEAD, self._connection.begin_stream)
            self._fail_by_event(body)
        else:
            self._log.status = 503
            self._write(WriteKind.BODY, lambda: self._connection.respond_json(503, body))
            self._end("error")

    def _on_start(self) -> None:
        """The scheduler lets it run: the prompt is processed, then decoding begins."""
        self._log.started_at_s = perf_counter()
        self._log.num_cached_tokens = self._answer.num_cached_tokens = self._scheduled.num_cached_tokens
        base_ms = self._settings.ttft_ms if self._faults.ttft_ms is None else self._faults.ttft_ms
        num_computed = self._scheduled.num_prompt_tokens - self._scheduled.num_cached_tokens
        prefill_ms = base_ms + num_computed * self._settings.prefill_ms_per_token
        self._deadline_s = self._loop.time() + prefill_ms / 1000
        self._step_timer = self._agenda.at(self._deadline_s, self._on_first_step)

    def _on_first_step(self) -> None:
        has_role = self._request.stream and self._request.kind is Kind.CHAT
        if has_role and not self._faults.role_at_once and self._faults.error_after_tokens != 0:
            self._after(self._faults.role_late_ms, self._write_role)
        if self._num_tokens == 0:
            self._finish_without_token()
        elif not self._breaks_here():
            self._step()

    def _step(self) -> None:
        begin = self._num_emitted
        end = self._num_emitted = min(begin + self._tokens_per_chunk, self._num_tokens)
        self._scheduler.grow(self._scheduled, end - begin)
        is_last = end == self._num_tokens
        if self._request.stream:
            self._write_tokens(begin, end, is_last)
        if self._breaks_here():
            return
        if is_last:
            self._finish()
            return
        if self._pauses_after is not None and end >= self._pauses_after:
            self._paused.add(self)
            return
        self._schedule_step()

    def _schedule_step(self) -> None:
        self._deadline_s += self._step_s() * self._tokens_per_chunk
        self._step_timer = self._agenda.at(self._deadline_s, self._step)

    def resume(self) -> None:
        """Goes on from a pause; the next step takes its time from now."""
        self._paused.discard(self)
        self._pauses_after = None
        self._deadline_s = self._loop.time()
        self._schedule_step()

    def _step_s(self) -> float:
        return self._scheduler.step_s if self._faults.itl_ms is None else self._faults.itl_ms / 1000

    def _breaks_here(self) -> bool:
        """Applies the fault that is due after the tokens emitted so far, if one is."""
        faults, emitted = self._faults, self._num_emitted
        if faults.die_after_tokens is not None and emitted >= faults.die_after_tokens:
            self._connection.abort()
            self._end("died")
        elif faults.error_after_tokens is not None and emitted >= faults.error_after_tokens:
            self._fail_by_event(error_body(faults.error_code, "The engine failed."))
        else:
            return faults.hang_after_tokens is not None and emitted >= faults.hang_after_tokens
        return True

    def _fail_by_event(self, body: dict[str, Any]) -> None:
        """An error inside an answer that began with status 200: an event and [DONE], or a body where nothing went."""
        if self._request.stream:
            self._write(WriteKind.ERROR, lambda: self._connection.send_event(orjson.dumps(body)))
            self._write(WriteKind.DONE, lambda: self._connection.send_event(b"[DONE]", is_last=True))
        else:
            self._log.status = body["error"]["code"]
            self._write(WriteKind.BODY, lambda: self._connection.respond_json(self._log.status, body))
        self._end("error")

    def _finish_without_token(self) -> None:
        """Ends under status 200 with a finish reason and no token."""
        if self._request.stream:
            self._write_tokens(0, 0, is_last=True)
        self._finish()

    def _finish(self) -> None:
        """All tokens are out: the engine's work is done, what is left is to say so."""
        self._log.text = self._request.text(0, self._num_emitted)
        self._release(self._request.finish_reason)
        if not self._request.stream:
            body = self._answer.body(self._num_emitted, num_reasoning_tokens=self._faults.reasoning_tokens)
            self._write(WriteKind.BODY, lambda: self._connection.respond_json(200, body), self._num_emitted)
            self._end(self._request.finish_reason)
        elif self._request.include_usage:
            self._after(self._faults.usage_late_ms, self._write_usage)
        else:
            self._after(self._faults.done_late_ms, self._write_done)

    # ---- writing

    def _write(self, kind: WriteKind, write: Callable[[], None], num_tokens: int = 0) -> None:
        self._log.writes.append(Write(perf_counter(), num_tokens, kind))
        write()
        self._on_change()

    def _write_role(self) -> None:
        data = orjson.dumps(self._answer.role_chunk())
        self._write(WriteKind.ROLE, lambda: self._connection.send_event(data))

    def _write_tokens(self, begin: int, end: int, is_last: bool) -> None:
        finish = self._request.finish_reason if is_last else None
        is_reasoning = begin < self._faults.reasoning_tokens
        data = orjson.dumps(self._answer.token_chunk(begin, end, finish=finish, is_reasoning=is_reasoning))
        self._write(WriteKind.TOKEN, lambda: self._connection.send_event(data), end - begin)

    def _write_usage(self) -> None:
        data = orjson.dumps(self._answer.usage_chunk(self._num_emitted))
        self._write(WriteKind.USAGE, lambda: self._connection.send_event(data))
        self._after(self._faults.done_late_ms, self._write_done)

    def _write_done(self) -> None:
        self._write(WriteKind.DONE, lambda: self._connection.send_event(b"[DONE]", is_last=True))
        self._end(self._request.finish_reason)

    # ---- ending

    def _on_client_left(self) -> None:
        self._log.aborted_at_s = perf_counter()
        self._log.text = self._request.text(0, self._num_emitted)
        self._end("abort")

    def _release(self, finish_reason: str) -> None:
        if not self._is_released:
            self._is_released = True
            self._scheduler.release(self._scheduled, finish_reason)

    def _end(self, finish_reason: str) -> None:
        self._paused.discard(self)
        if self._step_timer is not None:
            self._step_timer.cancel()
        for timer in self._other_timers:
            timer.cancel()
        self._release(finish_reason)
        self._on_end(self._log, finish_reason)

    def _after(self, delay_ms: float, callback: Callable[[], None]) -> None:
        """Calls back later, or at once without a delay: an event that is not late goes out in the same turn."""
        if delay_ms == 0:
            callback()
        else:
            self._other_timers.append(self._loop.call_later(delay_ms / 1000, callback))
