"""The search for the highest load that keeps an SLO, on engines whose capacity is known in closed form."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from benchmarks.slo_search import bars_of, on_batch, on_queue
from workbench.slo.readings import Reading, design_effect, p99_reading, readings_of_metrics, share_reading
from workbench.slo.search import Capacity, Ending, Measure, Probe, SearchPlan, search

TOLERANCE = 0.05


def test_known_capacities_are_found() -> None:
    batch = bars_of("batch", on_batch, 16, judged=False)
    queue = bars_of("queue", on_queue, 4, judged=False)
    assert float(batch[0].value) >= 0.9 and float(queue[0].value) >= 0.5
    assert batch[1].ok and queue[1].ok


def exact(score_of: Callable[[float], float], plan: SearchPlan, se: float = 0.01) -> tuple[Capacity, list[float]]:
    probes: list[Probe] = []
    while isinstance(step := search(plan, probes), Measure):
        probes.append(Probe(step.load, (Reading("ttft_s/p99", score_of(step.load), se),)))
    return step, [probe.load for probe in probes]


def test_a_sudden_knee_is_found() -> None:
    found, loads = exact(lambda load: -1.0 if load <= 57.3 else 2.5, SearchPlan(1, 1, 4096))
    assert found.load == pytest.approx(57.3, rel=TOLERANCE)
    assert len(loads) <= 10


def test_whole_loads_end_between_neighbours() -> None:
    found, _ = exact(lambda load: -1.0 if load <= 3 else 1.0, SearchPlan(1, 1, 256, is_whole=True))
    assert (found.ending, found.load) == (Ending.FOUND, 3.0)


def test_the_search_goes_down_when_the_first_load_breaks() -> None:
    found, loads = exact(lambda load: 0.5 * math.log(load / 5.0), SearchPlan(80, 0.1, 1000))
    assert loads[1] < 80
    assert found.load == pytest.approx(5.0, rel=TOLERANCE)


def test_no_load_keeps_it_and_every_load_keeps_it() -> None:
    never, _ = exact(lambda load: 1.0, SearchPlan(8, 1, 64, is_whole=True))
    assert never.ending is Ending.NEVER_KEPT and never.load is None and "lowest load" in never.reason
    always, _ = exact(lambda load: -1.0, SearchPlan(8, 1, 64, is_whole=True))
    assert (always.ending, always.load) == (Ending.ALWAYS_KEPT, 64)


def test_an_inconclusive_cell_is_measured_again_with_more_requests() -> None:
    plan = SearchPlan(8, 1, 64)
    kept = Probe(8, (Reading("a", -1.0, 0.1),))
    unsure = Probe(16, (Reading("a", -0.01, 0.1),))
    again = search(plan, [kept, unsure])
    assert isinstance(again, Measure)
    assert again.load == 16 and again.effort > 1 and "inconclusive" in again.why


def test_a_sample_that_carries_no_p99_is_said_to_be_too_small() -> None:
    plan, probes = SearchPlan(8, 1, 64), []
    while isinstance(step := search(plan, probes), Measure):
        probes.append(Probe(step.load, (), is_complete=False))
    assert step.ending is Ending.TOO_FEW_REQUESTS
    assert "send more requests" in step.reason


@pytest.mark.parametrize("loads", [(0, 0, 1), (5, 1, 4), (2, 3, 4)])
def test_a_plan_that_cannot_be_searched_is_refused(loads: tuple[float, float, float]) -> None:
    with pytest.raises(ValueError, match="must hold"):
        SearchPlan(*loads)


def test_readings_weigh_what_the_sample_carries() -> None:
    rng = np.random.default_rng(1)
    values = rng.normal(1.0, 0.1, 1000).tolist()
    reading = p99_reading("ttft_s/p99", values, 2.0)
    assert reading is not None and reading.score < 0 and reading.p_kept > 0.999
    assert p99_reading("ttft_s/p99", values[:300], 2.0) is None
    with pytest.raises(ValueError, match="above 0"):
        p99_reading("ttft_s/p99", values, 0.0)
    assert share_reading("good", [True] * 400, 0.99).p_kept > 0.975
    assert 0.5 < share_reading("good", [True] * 100, 0.99).p_kept < 0.975
    assert share_reading("good", [True] * 80 + [False] * 20, 0.99).p_kept < 0.001


def test_requests_that_come_in_bursts_count_for_fewer() -> None:
    rng = np.random.default_rng(1)
    alone = (rng.random(1000) < 0.1).tolist()
    burst = ([True] * 25 + [False] * 225) * 4
    assert design_effect(alone) < 2.5
    assert design_effect(burst) > 10
    assert design_effect([True] * 1000) == 1.0


def test_a_finished_cell_gives_the_readings_that_it_can() -> None:
    metrics = {"ttft_s/p99": 0.5, "tpot_s/p99": 0.02, "slo_good_frac": 1.0}
    readings = readings_of_metrics(
        metrics, {"ttft_s/p99": (0.4, 0.6)}, 400, {"ttft_s/p99": 1.0, "tpot_s/p99": 0.1}, 0.99
    )
    assert [reading.name for reading in readings] == ["ttft_s/p99", "slo_good_frac"]
    assert readings[0].score == pytest.approx(math.log(0.5))
