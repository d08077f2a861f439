"""Expected output: learned per tenant and model, capped by what the client allows, old answers fading."""

from __future__ import annotations

import math

import pytest

from serving.core.output_lengths import MAX_TENANTS, UNKNOWN_TOKENS, LengthSketch, OutputLengths


def test_before_any_answer_a_guess_within_the_clients_limit():
    lengths = OutputLengths()
    assert lengths.expected("t", "m", None) == UNKNOWN_TOKENS
    assert lengths.expected("t", "m", 7) == 7
    assert lengths.expected("t", "m", 0) == 1


def test_a_tenant_is_known_by_its_own_answers_once_it_has_some():
    lengths = OutputLengths()
    for _ in range(200):
        lengths.add("long", "m", 1000)
        lengths.add("short", "m", 10)
    assert lengths.expected("short", "m", None) < 80
    assert lengths.expected("long", "m", None) > 800
    assert 300 < lengths.expected("new", "m", None) < 700, "a new tenant is taken for the model's"
    assert lengths.expected("long", "m", 64) <= 64
    assert lengths.expected("long", "other", None) == UNKNOWN_TOKENS


def test_the_mean_of_capped_lengths_is_not_the_capped_mean():
    sketch = LengthSketch()
    for _ in range(2000):
        sketch.add(16)
        sketch.add(1024)
    assert sketch.mean(None) == pytest.approx(520, rel=0.02)
    assert sketch.mean(128) == pytest.approx(72, rel=0.02)
    assert (sketch.quantile(0.4), sketch.quantile(0.99)) == (16.0, 1024.0)


def test_old_answers_fade_and_nothing_overflows():
    sketch = LengthSketch()
    for _ in range(20_000):
        sketch.add(2000)
    for _ in range(2000):
        sketch.add(20)
    assert sketch.mean(None) == pytest.approx(19, rel=0.2)
    assert sketch.total == pytest.approx(200, rel=0.01)
    assert math.isnan(LengthSketch().mean(None))
    assert math.isnan(LengthSketch().quantile(0.5))


def test_tenants_are_bounded():
    lengths = OutputLengths()
    for number in range(MAX_TENANTS + 10):
        lengths.add(str(number), "m", 1)
    lengths.add("m0", "m", 1)
    assert lengths.expected("0", "m", None) >= 1
