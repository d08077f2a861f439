"""Runs that never came: found by the cron line, told of once."""

from __future__ import annotations

import time
from collections.abc import Callable

from workbench.schedule.alerts import Alert
from workbench.schedule.book import Book, Schedule
from workbench.schedule.cron import missed_s


def overdue_s(book: Book, schedule: Schedule, now_s: float) -> float | None:
    """When the run was due that never came, as Unix time; None when all is well."""
    if book.is_running(schedule.name):
        return None
    return missed_s(
        schedule.cron,
        now_s=now_s,
        since_s=schedule.created_at_s,
        grace_s=schedule.grace_minutes * 60,
        last_began_s=book.history(schedule.name).last_began_s(),
    )


def tell_once(
    book: Book, schedule: Schedule, due_s: float, alert: Callable[[Schedule, Alert], str | None]
) -> str | None:
    """Alerts of a missed run unless somebody was told of it; one that the webhook did not take is told again.

    Returns:
        Why the webhook did not take it; None when it did, or nothing was to tell.
    """
    history = book.history(schedule.name)
    if history.seen().get("told_of_s") == due_s:
        return None
    due = time.strftime("%Y-%m-%d %H:%M", time.localtime(due_s))
    trouble = alert(schedule, Alert(schedule.name, "overdue", f"the run that was due at {due} never came"))
    if trouble is None:
        history.see(told_of_s=due_s)
    return trouble
