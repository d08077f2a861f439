"""Cron lines: whether one is right, when it falls due. Times are this machine's local time, as cron's are."""

from __future__ import annotations

from datetime import datetime

from cronsim import CronSim, CronSimError

NUM_FIELDS = 5
SLACK_S = 90.0
"""cron starts a job within the minute, and a clock that is set may be a little before it."""


class BadCronLine(ValueError):
    """Not five fields that fall due some day; the message says what is wrong."""


def check(line: str) -> str:
    """The line with single spaces.

    Raises:
        BadCronLine: cron would refuse it, or it never falls due.
    """
    fields = line.split()
    if len(fields) != NUM_FIELDS:
        hint = "; write @daily as `0 0 * * *`" if line.startswith("@") else ""
        raise BadCronLine(f"{line!r} has {len(fields)} fields, not minute hour day month weekday{hint}")
    clean = " ".join(fields)
    try:
        next(CronSim(clean, datetime(2026, 1, 1)))
    except (CronSimError, StopIteration) as error:
        raise BadCronLine(f"{line!r}: {str(error).lower() or 'it never falls due'}") from None
    return clean


def next_due_s(line: str, now_s: float) -> float:
    """The first time after `now_s`, as Unix time."""
    return next(CronSim(line, datetime.fromtimestamp(now_s))).timestamp()


def last_due_s(line: str, now_s: float) -> float:
    """The last time before `now_s`, as Unix time."""
    return next(CronSim(line, datetime.fromtimestamp(now_s), reverse=True)).timestamp()


def missed_s(line: str, *, now_s: float, since_s: float, grace_s: float, last_began_s: float | None) -> float | None:
    """When the newest run was due that never came; None when it came, or may still.

    Args:
        line: the cron line.
        now_s: Unix time.
        since_s: when the schedule began: what was due before counts for nothing.
        grace_s: how late a run may begin.
        last_began_s: when the newest run began, None when there was none.
    """
    due_s = last_due_s(line, now_s - grace_s)
    if due_s <= since_s or (last_began_s is not None and last_began_s >= due_s - SLACK_S):
        return None
    return due_s
