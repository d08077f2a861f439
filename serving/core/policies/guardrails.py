"""What a guardrail's finding leads to: the checks by name, their default actions, and whose word counts.

    built-in default  <  the gateway's setting  <  the tenant's policy

Inside each of them the name of a check stands over the name of its group (`pii`). An action of `allow` turns a check
off. Defaults block where no honest text is hit and flag where false positives would hurt: a flagged request runs, and
is counted.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from difflib import get_close_matches
from enum import StrEnum

from serving.core.tenancy import GuardrailPolicy

MAX_TERM_CHARS = 128
MAX_TENANT_TERMS = 2_000


class Action(StrEnum):
    """What happens to a request in which a check found something, from the mildest."""

    ALLOW = "allow"
    FLAG = "flag"
    REDACT = "redact"
    BLOCK = "block"

    @property
    def severity(self) -> int:
        """Higher is stricter."""
        return _SEVERITIES[self]


_SEVERITIES = {Action.ALLOW: 0, Action.FLAG: 1, Action.REDACT: 2, Action.BLOCK: 3}


class OnFailure(StrEnum):
    """What a check off the loop that could not be made (late, full, broken) means for the request."""

    CLOSED = "closed"
    OPEN = "open"


@dataclass(frozen=True, slots=True)
class CheckRule:
    """A check as policies see it. One that finds no places in a text can't redact."""

    default: Action
    can_redact: bool = True
    group: str | None = None
    off_loop: bool = False


PII = "pii"
CHECKS: Mapping[str, CheckRule] = {
    "size": CheckRule(Action.BLOCK, can_redact=False),
    "nul": CheckRule(Action.BLOCK),
    "control_characters": CheckRule(Action.FLAG),
    "bidi": CheckRule(Action.FLAG),
    "invisible_text": CheckRule(Action.REDACT),
    "template_tokens": CheckRule(Action.FLAG),
    "token_ids": CheckRule(Action.FLAG, can_redact=False),
    "blocklist": CheckRule(Action.BLOCK),
    "email": CheckRule(Action.FLAG, group=PII),
    "phone": CheckRule(Action.FLAG, group=PII),
    "credit_card": CheckRule(Action.FLAG, group=PII),
    "iban": CheckRule(Action.FLAG, group=PII),
    "ip_address": CheckRule(Action.FLAG, group=PII),
    "api_key": CheckRule(Action.FLAG, group=PII),
    "toxicity": CheckRule(Action.ALLOW, can_redact=False, off_loop=True),
    "presidio": CheckRule(Action.ALLOW, off_loop=True),
    "guard_model": CheckRule(Action.ALLOW, can_redact=False, off_loop=True),
}
PATTERN_RULE = CheckRule(Action.FLAG)
"""A pattern of the configuration is a check of its own name."""


@dataclass(frozen=True, slots=True)
class GuardrailSettings:
    """The gateway's guardrails. Sizes in characters, times in seconds.

    Attributes:
        actions: by check, over the built-in defaults.
        blocklist: words and phrases for all tenants; a tenant's own come on top.
        patterns: regular expressions (RE2) by the name of the check that each becomes.
        max_chars: most characters of all texts of a request.
        toxicity_threshold, presidio_threshold: scores from 0 to 1 from which something counts as found.
        presidio_entities: what presidio looks for; empty is all that it knows.
        guard_model: served name of the model that the check `guard_model` asks.
        off_loop_timeout_s: how long the checks off the loop may take together.
        on_failure: what a check that could not be made means.
        workers: processes that run the toxicity model and presidio.
        max_waiting: requests that may wait for a check off the loop.
    """

    actions: dict[str, str] = field(default_factory=dict)
    blocklist: tuple[str, ...] = ()
    patterns: dict[str, str] = field(default_factory=dict)
    max_chars: int = 1_000_000
    toxicity_threshold: float = 0.8
    presidio_threshold: float = 0.5
    presidio_entities: tuple[str, ...] = ()
    guard_model: str | None = None
    off_loop_timeout_s: float = 2.0
    on_failure: OnFailure = OnFailure.CLOSED
    workers: int = 1
    max_waiting: int = 64


def rules(settings: GuardrailSettings) -> dict[str, CheckRule]:
    """Every check that there is: the built-in ones and the configuration's patterns."""
    return {**CHECKS, **dict.fromkeys(settings.patterns, PATTERN_RULE)}


def actions(settings: GuardrailSettings, policy: GuardrailPolicy) -> dict[str, Action]:
    """The action of each check for a tenant. Names and actions that nobody knows count for nothing here;
    `mistakes` finds them where they are written.
    """
    layers = (settings.actions, policy.actions)
    return {name: _action(name, rule, layers) for name, rule in rules(settings).items()}


def _action(name: str, rule: CheckRule, layers: Iterable[Mapping[str, str]]) -> Action:
    action = rule.default
    for layer in layers:
        given = layer.get(name) or layer.get(rule.group or "")
        if given in _SEVERITIES:
            action = Action(given)
    if action is Action.REDACT and not rule.can_redact:
        return Action.BLOCK
    return action


def mistakes(settings: GuardrailSettings, policy: GuardrailPolicy | None = None) -> list[str]:
    """What is wrong with the gateway's settings or, when given, with a tenant's policy; each names its place."""
    known = rules(settings)
    given = settings.actions if policy is None else policy.actions
    terms = settings.blocklist if policy is None else policy.blocklist
    found = [mistake for name, action in given.items() for mistake in _action_mistakes(known, name, action)]
    found += [f"blocklist: {mistake}" for term in terms for mistake in _term_mistakes(term)]
    if policy is not None and len(terms) > MAX_TENANT_TERMS:
        found.append(f"blocklist: {len(terms)} entries; a tenant has at most {MAX_TENANT_TERMS}")
    if policy is None:
        found += [
            f"patterns.{name}: this is the name of a built-in check" for name in settings.patterns if name in CHECKS
        ]
        if actions(settings, GuardrailPolicy())["guard_model"] is not Action.ALLOW and settings.guard_model is None:
            found.append("actions.guard_model: needs guard_model, the served name of the model to ask")
    return found


def _action_mistakes(known: Mapping[str, CheckRule], name: str, action: str) -> Iterable[str]:
    groups = {rule.group for rule in known.values() if rule.group is not None}
    if name not in known and name not in groups:
        near = get_close_matches(name, [*known, *groups], n=1, cutoff=0.5)
        hint = f"did you mean {near[0]!r}?" if near else f"there are: {', '.join(sorted([*known, *groups]))}"
        yield f"actions: unknown check {name!r}; {hint}"
    elif action not in _SEVERITIES:
        yield f"actions.{name}: {action!r} is none of {', '.join(Action)}"
    elif action == Action.REDACT and name in known and not known[name].can_redact:
        yield f"actions.{name}: finds no places in a text, so it cannot redact; it can flag or block"


def _term_mistakes(term: str) -> Iterable[str]:
    if not term.strip():
        yield "an entry is empty"
    elif len(term) > MAX_TERM_CHARS:
        yield f"{term[:20]!r}… is longer than {MAX_TERM_CHARS} characters"
    elif any(not character.isprintable() for character in term):
        yield f"{term!r} holds a character that cannot be seen"
