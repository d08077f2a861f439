"""The runs of a schedule on disk: the one that is not finished, those that are, and the one that was accepted.

current.json   a run that has begun and not ended: after a kill -9 the next start finds it and goes on with it
runs.jsonl     ended runs, oldest first
accepted.json  the run that later ones are compared with, with its measured cells
seen.json      which missed run was told of, when a start found another run going on
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Any

from workbench.schedule.files import ScheduleBroken, append_json, read_json, read_lines, write_json

RESUME_WITHIN_S = 36 * 3600.0
MAX_ATTEMPTS = 5


class Outcome(StrEnum):
    """How a run ended. `interrupted` and `timed_out` are gone on with; all others are final."""

    OK = "ok"
    REGRESSION = "regression"
    INCONCLUSIVE = "inconclusive"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
    INTERRUPTED = "interrupted"

    @property
    def is_final(self) -> bool:
        """Whether the next start is a new run."""
        return self not in (Outcome.TIMED_OUT, Outcome.INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Run:
    """One run. `began_at_s` is that of its first attempt: what was measured since then belongs to it."""

    run_id: str
    began_at_s: float
    attempt: int = 1
    attempt_began_at_s: float = 0.0
    ended_at_s: float | None = None
    outcome: Outcome | None = None
    reason: str = ""
    notebook: str | None = None
    html: str | None = None
    mlflow_run_id: str | None = None
    num_cells: int = 0
    compared: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Run:
        """The run that `asdict` made plain. Raises ScheduleBroken."""
        try:
            outcome = None if data["outcome"] is None else Outcome(data["outcome"])
            lists = {name: tuple(data[name]) for name in ("compared", "remarks")}
            return cls(**{**data, **lists, "outcome": outcome})
        except (KeyError, TypeError, ValueError) as error:
            raise ScheduleBroken(f"a run of the schedule's history cannot be read: {error!r}") from error


class History:
    """What the folder of a schedule keeps."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, now_s: float, new_id: str) -> Run:
        """The run to do now: a new one, or the next attempt of one that was cut off. The caller holds the lock."""
        cut_off = self.current()
        if cut_off is not None and cut_off.outcome is None:
            cut_off = replace(cut_off, outcome=Outcome.INTERRUPTED, reason="it ended without a word")
        if cut_off is not None:
            is_young = now_s - cut_off.attempt_began_at_s <= RESUME_WITHIN_S
            if is_young and cut_off.attempt < MAX_ATTEMPTS:
                run = Run(cut_off.run_id, cut_off.began_at_s, cut_off.attempt + 1, now_s)
                write_json(self._current, asdict(run))
                return run
            append_json(self._runs, asdict(cut_off))
        run = Run(new_id, now_s, 1, now_s)
        write_json(self._current, asdict(run))
        return run

    def end(self, run: Run) -> None:
        """Keeps how an attempt ended; one that is not final waits to be gone on with."""
        if run.outcome is not None and not run.outcome.is_final:
            write_json(self._current, asdict(run))
            return
        append_json(self._runs, asdict(run))
        self._current.unlink(missing_ok=True)

    def current(self) -> Run | None:
        """The run that has not ended for good."""
        data = read_json(self._current)
        return None if data is None else Run.from_json(data)

    def runs(self) -> list[Run]:
        """Ended runs, oldest first."""
        return [Run.from_json(data) for data in read_lines(self._runs)]

    def last(self) -> Run | None:
        """The newest run, ended or not."""
        runs = self.runs()
        return self.current() or (runs[-1] if runs else None)

    def last_began_s(self) -> float | None:
        """When a run last began, or a start found one going on."""
        last = self.last()
        times = [self.seen().get("skipped_at_s"), None if last is None else last.attempt_began_at_s]
        known = [time_s for time_s in times if time_s is not None]
        return max(known) if known else None

    def accept(self, run: Run, cells: Sequence[Mapping[str, Any]]) -> None:
        """Makes a run the one that later ones are compared with."""
        write_json(self.folder / "accepted.json", {"run": asdict(run), "cells": list(cells)})

    def accepted(self) -> tuple[Run, list[dict[str, Any]]] | None:
        """The accepted run and its cells; None when there is none yet."""
        data = read_json(self.folder / "accepted.json")
        return None if data is None else (Run.from_json(data["run"]), data["cells"])

    def keep_cells(self, run: Run, cells: Sequence[Mapping[str, Any]]) -> None:
        """Keeps the newest run's cells, so that it can be accepted later by hand."""
        write_json(self.folder / "newest.json", {"run": asdict(run), "cells": list(cells)})

    def newest(self) -> tuple[Run, list[dict[str, Any]]] | None:
        """The newest run that measured anything, and its cells."""
        data = read_json(self.folder / "newest.json")
        return None if data is None else (Run.from_json(data["run"]), data["cells"])

    def seen(self) -> dict[str, Any]:
        """What was noticed beside runs."""
        return read_json(self.folder / "seen.json") or {}

    def see(self, **what: float) -> None:
        """Notices something."""
        write_json(self.folder / "seen.json", self.seen() | what)

    @property
    def _current(self) -> Path:
        return self.folder / "current.json"

    @property
    def _runs(self) -> Path:
        return self.folder / "runs.jsonl"
