"""One contract for every clock, and what only the manual one can do."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from serving.clock import ManualClock, SystemClock
from serving.core.ports import Clock


@pytest.mark.parametrize("make", [SystemClock, ManualClock])
def test_contract(make: Callable[[], Clock]) -> None:
    clock = make()
    assert clock.now_s() > 1_600_000_000
    first_s = clock.monotonic_s()
    assert clock.monotonic_s() >= first_s


def test_the_manual_clock_moves_when_told() -> None:
    clock = ManualClock(now_s=100.0)
    assert (clock.now_s(), clock.monotonic_s()) == (100.0, 0.0)
    clock.advance(2.5)
    assert (clock.now_s(), clock.monotonic_s()) == (102.5, 2.5)
    clock.advance(0)
    for wrong_s in (-1.0, float("nan")):
        with pytest.raises(ValueError, match="does not go back"):
            clock.advance(wrong_s)
