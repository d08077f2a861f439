"""A canary's own traffic as evidence: what alarms, what does not, and what counts once."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from serving.core.canary import AGAIN, FINISH, LENGTH, THUMBS, CanaryTests, Kind, Observation


def an_answer(session: int, version: str, at_s: float, **changes: object) -> Observation:
    seen = Observation(
        Kind.REQUEST, version, f"s{session}", at_s, f"p{session}", False, "stop", 100, latency_s=0.2, usd=0.001
    )
    return replace(seen, **changes)  # type: ignore[arg-type]


def traffic(num: int, share: float, **bad: object) -> list[Observation]:
    """A session a second, one request each; those of the candidate with `bad`."""
    rng = random.Random(3)
    found = []
    for number in range(num):
        is_candidate = rng.random() < share
        changes = dict(bad) if is_candidate else {}
        noise = {"num_output_tokens": rng.randint(50, 200), "latency_s": rng.uniform(0.1, 0.4)}
        found.append(an_answer(number, "2" if is_candidate else "1", float(number), **{**noise, **changes}))
    return found


def fed(observations: list[Observation]) -> CanaryTests:
    tests = CanaryTests("1", "2")
    for one in observations:
        tests.add(one)
    return tests


def test_equal_versions_raise_no_alarm_and_pairs_are_counted() -> None:
    tests = fed(traffic(3000, 0.25))
    assert not tests.signals.alarmed
    assert 600 < tests.signals.num_pairs < 900


@pytest.mark.parametrize(
    ("bad", "signal"),
    [
        ({"failed": True}, "errors"),
        ({"finish_reason": "content_filter"}, "refusals"),
        ({"num_output_tokens": 0}, LENGTH),
        ({"num_output_tokens": 4000}, LENGTH),
        ({"finish_reason": "length"}, FINISH),
        ({"latency_s": 5.0}, "latency"),
        ({"usd": 0.1}, "cost"),
    ],
)
def test_a_bad_candidate_is_found_at_5_percent(bad: dict[str, object], signal: str) -> None:
    tests = fed(traffic(1500, 0.05, **bad))
    assert signal in tests.signals.alarmed


def test_the_same_observations_give_the_same_evidence() -> None:
    seen = traffic(800, 0.3)
    assert fed(seen).report() == fed(seen).report()


def test_one_busy_session_is_one_pair() -> None:
    whale = [an_answer(1, "2", 0.01 * number, failed=True) for number in range(5000)]
    others = [an_answer(1000 + number, "1", 60.0 + number) for number in range(50)]
    signals = fed(whale + others).signals
    assert (signals.alarmed, signals.num_pairs) == ((), 1)


def test_asking_the_same_again_counts_against_the_answer() -> None:
    seen = []
    for number in range(400):
        version = "2" if number % 2 else "1"
        seen.append(an_answer(number, version, float(number)))
        if version == "2":
            seen.append(an_answer(number, version, number + 0.5))
    assert AGAIN in fed(seen).signals.alarmed


def test_thumbs_are_paired_by_session_and_count_once() -> None:
    tests = CanaryTests("1", "2")
    for number in range(60):
        version = "2" if number % 2 else "1"
        vote = Observation(Kind.THUMB, version, f"s{number}", float(number), thumb=version == "1")
        tests.add(vote)
        tests.add(vote)
    assert THUMBS in tests.signals.alarmed
    assert tests.report()[THUMBS].num_pairs == 30


def test_mirrored_requests_are_pairs_whichever_end_comes_first() -> None:
    tests = CanaryTests("1", "2")
    for number in range(40):
        ends = [an_answer(number, v, float(number), kind=Kind.SHADOW, pair=f"q{number}") for v in ("1", "2")]
        ends[1] = replace(ends[1], num_output_tokens=0)
        for one in ends if number % 2 else reversed(ends):
            tests.add(one)
    assert LENGTH in tests.signals.alarmed
    assert tests.signals.num_pairs == 40


def test_a_session_that_changes_its_version_counts_for_the_first() -> None:
    seen = [
        an_answer(0, "1", 0.0),
        an_answer(0, "2", 1.0, failed=True),
        an_answer(1, "2", 2.0),
        an_answer(2, "1", 30.0),
    ]
    report = fed(seen).report()["errors"]
    assert (report.num_pairs, report.mean) == (1, 0.0)
