from __future__ import annotations

from dataclasses import replace

import pytest

from tests.cells import make_cell
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape
from workbench.sweeps.limits import SweepLimits, estimates, saturated

SHAPE = Shape(64, 32)


def spec(concurrency: int, kind: CellKind = CellKind.MIXED) -> CellSpec:
    return CellSpec(kind, SHAPE, concurrency, 8 * concurrency)


def cell(concurrency: int, rate: float, good: float, half: float = 1.0) -> CellResult:
    return make_cell(
        concurrency=concurrency,
        metrics={"output_tokens_per_s_per_gpu": rate, "slo_good_frac": good},
        intervals={
            "output_tokens_per_s_per_gpu": (rate - half, rate + half),
            "slo_good_frac": (good - 0.01, min(1.0, good + 0.01)),
        },
    )


def known(*cells: CellResult) -> dict[str, CellResult]:
    return {one.spec.cell_id: one for one in cells}


def test_higher_loads_are_skipped_once_more_users_bring_nothing_and_the_slo_is_broken() -> None:
    reason = saturated(spec(32), known(cell(8, 160, 1.0), cell(16, 162, 0.6)), 0.99)
    assert reason is not None and "16 in flight brought +1.2% tokens/s over 8" in reason and "60.0%" in reason


@pytest.mark.parametrize(
    "last",
    [
        cell(16, 200, 0.6),  # more throughput
        cell(16, 162, 0.995),  # within the SLO
        cell(16, 162, 0.6, half=40),  # too noisy to tell
        replace(cell(16, 162, 0.6), invalid="warm"),
    ],
)
def test_a_load_that_may_be_of_use_is_measured(last: CellResult) -> None:
    assert saturated(spec(32), known(cell(8, 160, 1.0), last), 0.99) is None


def test_other_shapes_other_kinds_and_the_first_two_loads_are_measured() -> None:
    cells = known(cell(8, 160, 1.0), cell(16, 162, 0.6))
    assert saturated(replace(spec(32), shape=Shape(512, 32)), cells, 0.99) is None
    assert saturated(spec(32, CellKind.PREFILL), cells, 0.99) is None
    assert saturated(spec(16), cells, 0.99) is None


def test_what_was_measured_says_how_long_a_cell_takes() -> None:
    measured = make_cell(concurrency=4, num_requests=40, window_s=20.0)
    like, other = estimates([CellSpec(CellKind.MIXED, SHAPE, 4, 80), spec(8)], [measured])
    assert not like.is_assumed and like.seconds == pytest.approx(40 + 3)
    assert other.is_assumed and 3 < other.seconds <= 123


def test_a_cell_that_no_longer_fits_the_budget_waits() -> None:
    [estimate] = estimates([CellSpec(CellKind.MIXED, SHAPE, 4, 80)], [make_cell(num_requests=40, window_s=20.0)])
    limits = SweepLimits(max_s=60.0)
    assert limits.over_budget(0.0, estimate) is None
    assert "run the sweep again" in str(limits.over_budget(30.0, estimate))
    assert SweepLimits().over_budget(1e9, estimate) is None
    by_money = SweepLimits(max_s=600.0, max_usd=0.001, usd_per_s=0.0001)
    assert by_money.bound_s == pytest.approx(10.0)
    assert "($0.001)" in str(by_money.over_budget(0.0, estimate))
