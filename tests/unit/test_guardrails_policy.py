"""Actions of checks: whose word counts, and what is wrong with a policy."""

from __future__ import annotations

import pytest

from serving.core.policies.guardrails import CHECKS, PII, Action, GuardrailSettings, actions, mistakes
from serving.core.tenancy import GuardrailPolicy


@pytest.mark.parametrize(
    ("gateway", "tenant", "check", "action"),
    [
        ({}, {}, "email", Action.FLAG),
        ({}, {}, "toxicity", Action.ALLOW),
        ({"email": "block"}, {}, "email", Action.BLOCK),
        ({"email": "block"}, {"email": "allow"}, "email", Action.ALLOW),
        ({"pii": "redact"}, {}, "iban", Action.REDACT),
        ({"pii": "redact", "iban": "flag"}, {}, "iban", Action.FLAG),
        ({"iban": "flag"}, {"pii": "redact"}, "iban", Action.REDACT),
        ({}, {"toxicity": "redact"}, "toxicity", Action.BLOCK),  # it names no places
        ({}, {"email": "sometimes"}, "email", Action.FLAG),
    ],
)
def test_the_tenants_word_counts_over_the_gateways_over_the_default(gateway, tenant, check, action):
    assert actions(GuardrailSettings(actions=gateway), GuardrailPolicy(tenant))[check] is action


def test_a_pattern_of_the_configuration_is_a_check():
    settings = GuardrailSettings(patterns={"ticket": "T-[0-9]+"}, actions={"ticket": "block"})
    assert actions(settings, GuardrailPolicy())["ticket"] is Action.BLOCK
    assert mistakes(settings) == []


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (GuardrailSettings(actions={"emial": "flag"}), ["'emial'", "did you mean 'email'?"]),
        (GuardrailSettings(actions={"zzzzzz": "flag"}), ["'zzzzzz'", "there are: api_key, bidi"]),
        (GuardrailSettings(actions={"email": "stop"}), ["actions.email", "allow, flag, redact, block"]),
        (GuardrailSettings(actions={"size": "redact"}), ["actions.size", "it can flag or block"]),
        (GuardrailSettings(blocklist=(" ",)), ["blocklist", "empty"]),
        (GuardrailSettings(blocklist=("a" * 129,)), ["longer than 128"]),
        (GuardrailSettings(blocklist=("a\x00b",)), ["cannot be seen"]),
        (GuardrailSettings(patterns={"email": "x"}), ["patterns.email", "built-in"]),
        (GuardrailSettings(actions={"guard_model": "block"}), ["guard_model", "served name"]),
    ],
)
def test_a_mistake_names_its_place(settings, words):
    (found,) = mistakes(settings)
    assert all(word in found for word in words), found


def test_a_tenants_mistakes_are_its_own():
    settings = GuardrailSettings(actions={"emial": "flag"})
    assert mistakes(settings, GuardrailPolicy({"pii": "block"}, ("word",))) == []
    (found,) = mistakes(settings, GuardrailPolicy(blocklist=tuple(f"w{n}" for n in range(2_001))))
    assert "2001 entries" in found


def test_only_what_can_block_by_default_is_what_no_honest_text_holds():
    blocking = {name for name, rule in CHECKS.items() if rule.default is Action.BLOCK}
    assert blocking == {"size", "nul", "blocklist"}
    assert {rule.default for rule in CHECKS.values() if rule.group == PII} == {Action.FLAG}
    assert {rule.default for rule in CHECKS.values() if rule.off_loop} == {Action.ALLOW}
