from __future__ import annotations

import random

import pytest

from serving.engine.launchers.local import Backoff


def test_pauses_double_up_to_the_bound() -> None:
    steady = Backoff(first_s=1, factor=2, longest_s=10, jitter_frac=0)
    assert [steady.delay_s(n, random.Random(0)) for n in (1, 2, 3, 4, 5, 10_000)] == [1, 2, 4, 8, 10, 10]


@pytest.mark.parametrize("num_failures", [1, 3, 50])
def test_jitter_stays_within_its_fraction_and_comes_from_the_given_stream(num_failures: int) -> None:
    backoff = Backoff(first_s=1, factor=2, longest_s=60, jitter_frac=0.2)
    middle = min(2.0 ** (num_failures - 1), 60)
    delays = [backoff.delay_s(num_failures, random.Random(seed)) for seed in range(200)]
    assert all(0.8 * middle <= delay <= 1.2 * middle for delay in delays)
    assert len(set(delays)) > 100
    assert delays[7] == backoff.delay_s(num_failures, random.Random(7))
