"""What a simulated fleet is asked: the traces that come along, drawn by shares, at a rate."""

from __future__ import annotations

from collections import Counter

import pytest
from pydantic import ValidationError

from workbench.sim.fleet import FleetSpec, load_fleet
from workbench.sim.workload import workload

FLEET = load_fleet()


def test_a_trace_is_drawn_by_the_shares_and_scaled_to_a_rate():
    drawn = workload(FLEET, "no_sharing", seed=1)
    assert drawn == workload(FLEET, "no_sharing", seed=1)
    assert drawn != workload(FLEET, "no_sharing", seed=2)
    models = Counter(request.model for request in drawn.requests)
    assert {name: round(models[name] / 6000, 1) for name in FLEET.mix} == {
        "llama-8b": 0.7,
        "qwen-32b": 0.2,
        "llama-70b": 0.1,
    }
    scaled = drawn.at_rate(50.0)
    assert scaled.requests[-1].at_s == pytest.approx(6000 / 50.0)
    assert [r.num_output_tokens for r in scaled.requests] == [r.num_output_tokens for r in drawn.requests]
    with pytest.raises(ValueError, match="above 0"):
        drawn.at_rate(0.0)


def test_mooncake_brings_its_shared_blocks():
    drawn = workload(FLEET, "mooncake", seed=1, max_requests=300)
    assert drawn.block_tokens == 512
    assert drawn.requests[0].blocks[0] == drawn.requests[1].blocks[0]
    assert all(request.num_prompt_tokens <= FLEET.max_prompt_tokens for request in drawn.requests)


def test_what_is_no_trace_or_no_fleet_is_refused():
    with pytest.raises(ValueError, match="no trace 'azure'; there are azure_conversation"):
        workload(FLEET, "azure", seed=1)
    given = FLEET.model_dump(by_alias=True)
    for change, message in (
        ({"mix": {"llama-8b": 0.5, "qwen-32b": 0.2, "llama-70b": 0.1}}, "add up to"),
        ({"mix": {"llama-8b": 1.0}}, "same models"),
        ({"pools": {"gpt": ()}}, "no model 'gpt'"),
        ({"unknown": 1}, "unknown"),
    ):
        with pytest.raises(ValidationError, match=message):
            FleetSpec.model_validate({**given, **change})
