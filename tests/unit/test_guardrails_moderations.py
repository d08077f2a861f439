"""The moderations endpoint: OpenAI's shape over the same checks."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types import ModerationCreateResponse

from serving.core.errors import BadRequest, NotFound, Unavailable
from serving.core.policies.guardrails import GuardrailSettings
from serving.core.tenancy import GuardrailPolicy, Tenant
from serving.gateway.guardrails.guard_model import GuardModelCheck
from serving.gateway.guardrails.moderations import moderate
from serving.gateway.guardrails.off_loop import Found
from serving.gateway.guardrails.screen import Guardrails
from tests.unit.test_guardrails_screen import Broken, Fixed

TENANT = Tenant("t", guardrails=GuardrailPolicy({"iban": "allow"}, ("banana",)))
GUARDRAILS = Guardrails(GuardrailSettings())


async def results(value: Any, guardrails: Guardrails = GUARDRAILS, **fields: Any) -> list[dict[str, Any]]:
    answer = await moderate(guardrails, TENANT, {"input": value, **fields})
    assert set(answer) == {"id", "model", "results"}
    for result in answer["results"]:
        assert result["categories"].keys() == result["category_scores"].keys()
        assert result["category_applied_input_types"] == {name: ["text"] for name in result["categories"]}
        assert result["flagged"] == any(result["categories"].values())
    found: list[dict[str, Any]] = answer["results"]
    return found


@pytest.mark.parametrize(
    ("value", "flagged"),
    [
        ("hello", [[]]),
        ("mail ann@example.org", [["email"]]),
        (["hello", "a BANANA from 8.8.8.8", ""], [[], ["blocklist", "ip_address"], []]),
        ([{"type": "text", "text": "hello"}, {"type": "text", "text": "ann@example.org"}], [["email"]]),
        ("DE89370400440532013000", [[]]),  # the policy has it off
        ("4111 1111 1111 1112 " * 5_000 + "ann@example.org", [["email"]]),
    ],
)
async def test_patterns(value: Any, flagged: list[list[str]]):
    found = await results(value)
    assert [sorted(name for name, hit in result["categories"].items() if hit) for result in found] == flagged
    assert all("iban" not in result["categories"] and "api_key" in result["categories"] for result in found)


async def test_the_sdk_reads_the_answer():
    answer = await moderate(GUARDRAILS, TENANT, {"input": "ann@example.org", "model": "workbench-patterns"})
    read = ModerationCreateResponse.construct(**answer)  # as the SDK reads: our categories are not OpenAI's
    assert (read.model, read.results[0].flagged) == ("workbench-patterns", True)
    assert read.results[0].categories.model_extra == answer["results"][0]["categories"]


async def test_models_off_the_loop():
    async def ask(text: str) -> str:
        return "unsafe\nS10" if "hate" in text else "safe"

    toxicity = Fixed("toxicity", Found(0, 0.3, "toxicity"), threshold=0.8)
    guardrails = Guardrails(GuardrailSettings(), [toxicity, GuardModelCheck(ask)])
    (mild,) = await results("you", guardrails, model="toxicity")
    assert (mild["flagged"], mild["category_scores"]) == (False, {"toxicity": 0.3})
    kind, hateful = await results(["love", "hate"], guardrails, model="guard_model")
    assert (kind["flagged"], hateful["flagged"], hateful["category_scores"]["hate"]) == (False, True, 1.0)


async def test_a_model_that_cannot_look_is_a_503():
    with pytest.raises(Unavailable):
        await results("you", Guardrails(GuardrailSettings(), [Broken("toxicity")]), model="toxicity")


@pytest.mark.parametrize("model", ["omni-moderation-latest", "toxicity", 3, None])
async def test_an_unknown_model_is_never_another(model: Any):
    with pytest.raises(NotFound, match="there are: workbench-patterns"):
        await results("x", model=model)


@pytest.mark.parametrize(
    "value",
    [None, 3, [], [1], ["a", 1], {}, [{"type": "image_url", "image_url": {"url": "x"}}], ["a"] * 257, "x" * 1_000_001],
)
async def test_a_wrong_input_is_named(value: Any):
    with pytest.raises(BadRequest) as caught:
        await results(value)
    assert caught.value.param == "input"
