from __future__ import annotations

from collections.abc import Callable

import pytest

from workbench.tuning.halving import Flags, Trial, Try, Tuned, TuningPlan, describe, grid, next_step

NINE = grid({"max_num_batched_tokens": [256, 512, 1024], "block_size": [16, 32, 64]}, {"block_size": 32})


def play(plan: TuningPlan, goodput_of: Callable[[Flags], float | None], half: float = 0.01) -> tuple[Tuned, list[Try]]:
    trials: list[Trial] = []
    asked: list[Try] = []
    while isinstance(step := next_step(plan, trials), Try):
        asked.append(step)
        value = goodput_of(step.flags)
        if value is None:
            trials.append(Trial(step.flags, step.rung, None, failure="did not start"))
        else:
            trials.append(Trial(step.flags, step.rung, value, max(0.0, value - half), value + half))
    return step, asked


def test_the_grid_begins_with_what_is_in_use() -> None:
    assert len(NINE) == 9
    assert NINE[0] == (("block_size", 32), ("max_num_batched_tokens", 256))
    with pytest.raises(ValueError, match="cannot be tuned"):
        grid({"colour": [1]})
    assert describe((("enable_chunked_prefill", True),)) == "enable_chunked_prefill=true"


def test_the_better_ones_are_measured_again_and_longer() -> None:
    found, asked = play(TuningPlan(NINE, min_requests=100), lambda flags: float(dict(flags)["max_num_batched_tokens"]))
    assert [step.num_requests for step in asked[:9]] == [100] * 9
    assert {step.num_requests for step in asked[9:]} == {300, 900}
    assert found.best is not None and dict(found.best.flags)["max_num_batched_tokens"] == 1024
    assert "+300.0% against the one in use" in found.reason


def test_a_border_that_noise_leaves_open_keeps_more() -> None:
    _, clear = play(TuningPlan(NINE), lambda flags: float(NINE.index(flags)), half=0.01)
    _, noisy = play(TuningPlan(NINE), lambda flags: float(NINE.index(flags)), half=5.0)
    assert len(noisy) > len(clear)


def test_what_does_not_start_is_out_and_nothing_at_all_says_so() -> None:
    found, asked = play(TuningPlan(NINE), lambda flags: None if dict(flags)["block_size"] == 64 else 1.0)
    assert all(dict(step.flags)["block_size"] != 64 for step in asked if step.rung > 0)
    assert (found.best is not None and "no difference" in found.reason) or "one in use" in found.reason
    nothing, _ = play(TuningPlan(NINE), lambda flags: None)
    assert nothing.best is None and "no configuration" in nothing.reason


def test_a_plan_without_a_choice_is_refused() -> None:
    with pytest.raises(ValueError, match="two configurations"):
        TuningPlan(NINE[:1])
    with pytest.raises(ValueError, match="eta"):
        TuningPlan(NINE, eta=1)
    with pytest.raises(ValueError, match="no figure"):
        Trial(NINE[0], 0, float("nan"))


def test_the_bracket_is_known_before() -> None:
    assert TuningPlan(NINE).max_cells == 9 + 3 + 1
