"""`POST /v1/moderations` in OpenAI's shape: what the guardrails make of a text, without a request that runs.

Its models are the checks themselves: `workbench-patterns` those that look for patterns, as far as the tenant's policy
has them on, `toxicity` and `guard_model` where this installation can make them. Nothing is refused or changed here.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from serving.core.errors import BadRequest, NotFound
from serving.core.policies.guardrails import Action
from serving.core.tenancy import Tenant
from serving.gateway.guardrails import guard_model
from serving.gateway.guardrails.off_loop import CheckFailed
from serving.gateway.guardrails.scanner import Reading
from serving.gateway.guardrails.screen import Guardrails, unavailable

PATTERNS = "workbench-patterns"
OFF_LOOP_CATEGORIES: Mapping[str, tuple[str, ...]] = {
    "toxicity": ("toxicity",),
    "guard_model": (*guard_model.CATEGORIES.values(), guard_model.OTHER),
}
MAX_INPUTS = 256

Scores = dict[str, float]


async def moderate(guardrails: Guardrails, tenant: Tenant, body: dict[str, Any]) -> dict[str, Any]:
    """The answer to a parsed body: `{id, model, results}`, a result for each input.

    Raises:
        BadRequest: names the field at fault.
        NotFound: no such model; names those that there are.
        Unavailable: the model could not look.
    """
    model = body.get("model", PATTERNS)
    models = [PATTERNS, *(name for name in OFF_LOOP_CATEGORIES if name in guardrails.off_loop)]
    if model not in models:
        raise NotFound(f"no moderation model of this name; there are: {', '.join(models)}", param="model")
    inputs = _inputs(body.get("input"))
    if sum(map(len, inputs)) > guardrails.settings.max_chars:
        raise BadRequest(f"'input' is over the limit of {guardrails.settings.max_chars} characters", param="input")
    if model == PATTERNS:
        scores = await _by_patterns(guardrails, tenant, inputs)
        threshold = 1.0
    else:
        scores = [await _by_model(guardrails, model, text) for text in inputs]
        threshold = guardrails.off_loop[model].threshold
    results = [_result(found, threshold) for found in scores]
    return {"id": f"modr-{secrets.token_hex(12)}", "model": model, "results": results}


def _inputs(value: object) -> list[str]:
    """The texts to judge: one, a list of them, or one of several parts."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and 0 < len(value) <= MAX_INPUTS:
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, dict) and isinstance(item.get("text"), str) for item in value):
            return ["\n".join(item["text"] for item in value)]
    raise BadRequest(
        f"'input' is required: a text, or a list of at most {MAX_INPUTS} texts or of parts {{type: text, text}}; "
        "images are not judged here",
        param="input",
    )


async def _by_patterns(guardrails: Guardrails, tenant: Tenant, inputs: Sequence[str]) -> list[Scores]:
    """1 where a check found something, 0 for the others that are on."""
    ready = guardrails.ready(tenant.guardrails)
    actions = dict.fromkeys(ready.looked_for, Action.FLAG)

    def look(on_loop: bool) -> list[Scores]:
        scores = [dict.fromkeys(actions, 0.0) for _ in inputs]
        reading = Reading(inputs, on_loop=on_loop)
        for scanner in ready.scanners:
            for hit in scanner.scan(reading, actions):
                scores[hit.index][hit.check] = 1.0
        return scores

    return await guardrails.patiently(look)


async def _by_model(guardrails: Guardrails, check: str, text: str) -> Scores:
    scores = dict.fromkeys(OFF_LOOP_CATEGORIES[check], 0.0)
    try:
        found = await guardrails.ask(check, [text])
    except CheckFailed as error:
        raise unavailable(check, error) from error
    for find in found:
        scores[find.category] = max(scores.get(find.category, 0.0), find.score)
    return scores


def _result(scores: Scores, threshold: float) -> dict[str, Any]:
    categories = {name: score >= threshold for name, score in scores.items()}
    return {
        "flagged": any(categories.values()),
        "categories": categories,
        "category_scores": scores,
        "category_applied_input_types": {name: ["text"] for name in scores},
    }
