"""Texts made to cost: what looking takes grows with their length and no faster, and on the loop it has a bound."""

from __future__ import annotations

import pytest

from serving.core.policies.guardrails import CHECKS, Action
from serving.gateway.guardrails.patterns import built_in
from serving.gateway.guardrails.scanner import Laborious, Reading, Scanner

SCANNER = Scanner(built_in())
UNITS = {
    "cards": "4111 1111 1111 1112 ",
    "ibans": "DE89370400440532013001 ",
    "addresses": "10.0.0.1 ",
    "at signs": "a@",
    "dots": "a.a.a@a.",
    "phones": "+1 (((((((((( ",
    "keys": "sk-",
    "full width": "４１１１ ",
    "marks": "a\u0301\u0302\u0303\u0304 ",
    "digits": "1",
    "tags": "\U000e0061 ",
}


class Counting(Reading):
    """Counts what it is told to spend."""

    spent_us = 0.0

    def spend(self, cost_us: float) -> None:
        self.spent_us += cost_us


def effort_us(text: str, action: Action) -> float:
    reading = Counting([text])
    SCANNER.scan(reading, dict.fromkeys(CHECKS, action))
    return reading.spent_us


@pytest.mark.parametrize("action", [Action.FLAG, Action.REDACT])
@pytest.mark.parametrize("unit", UNITS.values(), ids=UNITS.keys())
def test_effort_is_linear_in_the_text(unit: str, action: Action):
    short, long = unit * (4_000 // len(unit)), unit * (32_000 // len(unit))
    assert effort_us(long, action) <= 8.5 * effort_us(short, action) + 200


@pytest.mark.parametrize("unit", ["cards", "ibans", "addresses", "full width"])
def test_what_would_hold_up_the_loop_is_not_done_there(unit: str):
    texts = [UNITS[unit] * 4_000]
    with pytest.raises(Laborious):
        SCANNER.scan(Reading(texts, on_loop=True), dict.fromkeys(CHECKS, Action.FLAG))
    SCANNER.scan(Reading(texts), dict.fromkeys(CHECKS, Action.FLAG))


@pytest.mark.parametrize("text", ["the model said " * 3_000, "größer als " * 4_000, "a\u200db ❤️ " * 3_000])
def test_an_honest_long_prompt_is_read_on_the_loop(text: str):
    assert SCANNER.scan(Reading([text], on_loop=True), dict.fromkeys(CHECKS, Action.FLAG)) == []
