"""Several signals together: what alarms, what passes, and what stays open."""

from __future__ import annotations

import math
import random

import pytest

from serving.core.family import Family, Signal
from serving.core.sequential import Verdict

SIGNALS = (Signal("errors"), Signal("length", 0.05, two_sided=True), Signal("latency", 0.05))


def fed(values: dict[str, list[float]], num: int, signals: tuple[Signal, ...] = SIGNALS) -> Family:
    family = Family(signals)
    for _ in range(num):
        family.add(values)
    return family


def test_one_signal_that_is_worse_fails_the_family_and_is_named() -> None:
    family = fed({"errors": [0.0], "length": [0.0], "latency": [-1.0]}, 12)
    assert (family.verdict, family.alarmed) == (Verdict.FAIL, {"latency"})
    report = family.report()
    assert report["latency"].verdict is Verdict.FAIL and report["latency"].mean == -1.0
    assert report["errors"].verdict is Verdict.INCONCLUSIVE


@pytest.mark.parametrize(("value", "alarmed"), [(1.0, {"length"}), (-1.0, {"length"})])
def test_a_two_sided_signal_alarms_either_way(value: float, alarmed: set[str]) -> None:
    assert fed({"length": [value]}, 12).alarmed == alarmed
    assert not fed({"errors": [1.0]}, 200).alarmed


def test_all_must_pass_and_silence_is_no_pass() -> None:
    quiet = {"errors": [0.0], "latency": [0.0]}
    assert fed(quiet, 400).verdict is Verdict.INCONCLUSIVE
    assert fed(quiet, 400).passed == {"errors", "latency"}
    assert fed({**quiet, "length": [0.0]}, 400).verdict is Verdict.PASS
    # Within the tolerance on one side only: a rise of 10 points is not within 5.
    assert "length" not in fed({"length": [0.1]}, 2000, (Signal("length", 0.05, two_sided=True),)).passed


def test_a_verdict_reached_stays() -> None:
    family = fed({"errors": [-1.0]}, 12)
    for _ in range(500):
        family.add({"errors": [1.0]})
    assert family.alarmed == {"errors"}


def test_false_alarms_of_the_family_stay_under_alpha() -> None:
    rng = random.Random(7)
    alarmed = 0
    for _ in range(300):
        family = Family(SIGNALS)
        for _ in range(60):
            shared = rng.choice((-1.0, 0.0, 0.0, 1.0))
            family.add({signal.name: [shared if rng.random() < 0.7 else 0.0] for signal in SIGNALS})
        alarmed += bool(family.alarmed)
    assert alarmed <= 300 * 0.05


@pytest.mark.parametrize("signals", [(), (Signal("a"), Signal("a")), (Signal("a", 0.0),), (Signal("a", math.nan),)])
def test_a_family_that_cannot_be_is_refused(signals: tuple[Signal, ...]) -> None:
    with pytest.raises(ValueError, match=r"family|tolerance"):
        Family(signals)


def test_what_lies_outside_or_is_no_signal_is_refused() -> None:
    with pytest.raises(ValueError, match="lies from"):
        Family(SIGNALS).add({"errors": [1.5]})
    with pytest.raises(KeyError):
        Family(SIGNALS).add({"beauty": [0.0]})
