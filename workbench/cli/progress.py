"""What the stack does, as it happens: a line a change, and on a terminal what is being waited for."""

from __future__ import annotations

import re
import time
from types import TracebackType

from rich.console import Console
from rich.markup import escape
from rich.status import Status

SETTLED = ("ready", "running again", "ended", "done")
REPEAT_S = 5.0
COUNT = re.compile(r"\d+ of \d+|[\d.]+ ?(%|[kMG]?i?B)")


class ProgressBoard:
    """Takes `change(part, what)`; used as a context manager around the work."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._started_s = time.monotonic()
        self._shown: dict[str, tuple[str, float]] = {}
        self._status: Status | None = None

    def __enter__(self) -> ProgressBoard:
        """Shows the waiting line on a terminal."""
        if self._console.is_terminal:
            self._status = self._console.status("starting")
            self._status.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Takes the waiting line away."""
        if self._status is not None:
            self._status.stop()
            self._status = None

    def change(self, part: str, what: str) -> None:
        """Prints a change; one that only counts on (3 of 8, 40 %) at most every `REPEAT_S` seconds."""
        now_s = time.monotonic()
        before, printed_s = self._shown.get(part, ("", -REPEAT_S))
        counts_on = COUNT.sub("", before) == COUNT.sub("", what) and now_s - printed_s < REPEAT_S
        self._shown[part] = (what, printed_s if counts_on else now_s)
        if what != before and not counts_on:
            line = f"[dim]{now_s - self._started_s:6.1f} s[/]  [bold]{part:<20}[/] {escape(what)}"
            self._console.print(line, soft_wrap=True, highlight=False)
        if self._status is not None:
            self._status.update(self._waiting())

    def _waiting(self) -> str:
        waiting = [
            f"{part}: {escape(what.splitlines()[0])}"
            for part, (what, _) in self._shown.items()
            if not what.startswith(SETTLED)
        ]
        return "waiting for " + ", ".join(waiting) if waiting else "all parts are ready"
