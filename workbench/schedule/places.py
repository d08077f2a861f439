"""Where a configuration's schedules, notebooks and reports lie, and where its alerts go."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from workbench.config import WorkbenchConfig
from workbench.schedule.alerts import Alert, tell
from workbench.schedule.book import Book, Schedule
from workbench.wiring import layout


@dataclass(frozen=True, slots=True)
class Places:
    """Where things lie."""

    config_file: Path
    notebooks_dir: Path
    reports_dir: Path


def book_of(config: WorkbenchConfig) -> Book:
    """The schedules of a configuration's data folder."""
    return Book(layout(config).data_dir / "schedules")


def places_of(config: WorkbenchConfig) -> Places:
    """Notebooks and reports beside workbench.yaml."""
    folder = config.file.parent
    return Places(config.file, folder / "notebooks", folder / "reports")


def send(book: Book, schedule: Schedule, alert: Alert) -> str | None:
    """Tells of an alert; returns why the webhook did not take it."""
    return tell(alert, book.folder / schedule.name / "alerts.jsonl", schedule.webhook, now_s=time.time())
