"""Is a drift check of a replica due? A pure decision: the shell asks it, and runs the check."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Checked:
    """The last check of a replica: of which engine, and when (seconds of the same clock as `now_s`)."""

    engine: str
    at_s: float


@dataclass(frozen=True, slots=True)
class Due:
    """Whether to check now, and why or why not."""

    now: bool
    why: str


def due(last: Checked | None, engine: str, *, is_idle: bool, now_s: float, every_s: float) -> Due:
    """Decides for one replica.

    Args:
        last: the last check that ended; None before the first.
        engine: what runs now: digest of weights, flags and version.
        is_idle: nobody is served; a check beside traffic would measure another concurrency.
        now_s: time.
        every_s: between checks of the same engine.
    """
    if not is_idle:
        return Due(False, "the replica serves: a check waits until it is idle")
    if last is None:
        return Due(True, "never checked")
    if last.engine != engine:
        return Due(True, "another engine, flags or weights than at the last check")
    if now_s - last.at_s >= every_s:
        return Due(True, f"the last check is {now_s - last.at_s:.0f} s old")
    return Due(False, f"checked {now_s - last.at_s:.0f} s ago")
