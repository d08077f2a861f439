"""A tenant's policy on a request: flags, redactions, refusals; on the loop and off it."""

from __future__ import annotations

import asyncio
import copy
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serving.core.errors import ContentBlocked, ErrorCode, Overloaded, Unavailable
from serving.core.policies.guardrails import CHECKS, GuardrailSettings, OnFailure
from serving.core.tenancy import GuardrailPolicy, Tenant
from serving.gateway.guardrails.guard_model import GuardModelCheck
from serving.gateway.guardrails.off_loop import CheckFailed, Found
from serving.gateway.guardrails.screen import Guardrails
from serving.gateway.guardrails.screening import Verdict


class Fixed:
    """A check off the loop that always says the same."""

    def __init__(self, name: str, *found: Found, threshold: float = 0.5, delay_s: float = 0.0) -> None:
        self.name = name
        self.threshold = threshold
        self.found = found
        self.delay_s = delay_s
        self.seen: list[str] = []
        self.is_closed = False

    async def find(self, texts: Sequence[str]) -> Sequence[Found]:
        self.seen += texts
        await asyncio.sleep(self.delay_s)
        return self.found

    async def close(self) -> None:
        self.is_closed = True


class Broken(Fixed):
    async def find(self, texts: Sequence[str]) -> Sequence[Found]:
        raise CheckFailed("error", "it failed")


def tenant(*blocklist: str, **actions: str) -> Tenant:
    return Tenant("t", guardrails=GuardrailPolicy(actions, blocklist))


def chat(*texts: str) -> dict[str, Any]:
    return {"model": "m", "messages": [{"role": "user", "content": text} for text in texts]}


def texts_of(body: dict[str, Any]) -> list[str]:
    return [message["content"] for message in body["messages"]]


def test_an_honest_request_passes_untouched():
    body = chat("Name three rivers.", "größer 😀")
    before = copy.deepcopy(body)
    assert Guardrails(GuardrailSettings()).check(tenant(), body) == Verdict()
    assert body == before


def test_what_is_flagged_runs_as_it_came_and_is_counted_once():
    counted: Counter[tuple[str, str]] = Counter()
    guardrails = Guardrails(GuardrailSettings(), count=lambda *what: counted.update([what]))
    body = chat("ann@example.org", "bob@example.org and 8.8.8.8")
    before = copy.deepcopy(body)
    assert guardrails.check(tenant(), body) == Verdict(("email", "ip_address"))
    assert body == before
    assert counted == {("email", "flag"): 1, ("ip_address", "flag"): 1}


def test_what_is_redacted_is_replaced_in_the_body():
    body = chat("I am ann@example.org", "hello", "card 4111 1111 1111 1111")
    verdict = Guardrails(GuardrailSettings()).check(tenant(pii="redact"), body)
    assert verdict == Verdict(("credit_card", "email"), redacted=True)
    assert texts_of(body) == ["I am [EMAIL]", "hello", "card [CREDIT_CARD]"]


@pytest.mark.parametrize(
    ("policy", "body", "check", "param"),
    [
        (tenant(email="block"), chat("hi", "ann@example.org"), "email", "messages"),
        (tenant("secret plan"), {"prompt": "the SECRET  plan"}, "blocklist", "prompt"),
        (tenant(), {"input": ["a", "b\x00c"]}, "nul", "input"),
        (tenant(), {"prompt": "x" * 2_001}, "size", None),
        (tenant(token_ids="block"), {"prompt": [1, 2, 3]}, "token_ids", None),
        (tenant(), chat("a house rule here"), "blocklist", "messages"),
        (tenant(), chat("TICKET-12"), "ticket", "messages"),
    ],
)
def test_a_block_names_the_check_and_the_field_and_never_the_text(policy, body, check, param):
    guardrails = Guardrails(
        GuardrailSettings(
            max_chars=2_000,
            blocklist=("house rule",),
            patterns={"ticket": "TICKET-[0-9]+"},
            actions={"ticket": "block"},
        )
    )
    with pytest.raises(ContentBlocked) as caught:
        guardrails.check(policy, body)
    error = caught.value
    assert (error.status, error.code, error.param) == (400, ErrorCode.CONTENT_BLOCKED, param)
    assert repr(check) in error.message
    for text in ("ann@", "SECRET", "plan", "house", "TICKET-12", "xxx"):
        assert text not in error.message


def test_a_tenants_words_are_no_other_tenants():
    guardrails = Guardrails(GuardrailSettings())
    with pytest.raises(ContentBlocked):
        guardrails.check(tenant("banana"), chat("a banana"))
    assert guardrails.check(tenant("apple"), chat("a banana")) == Verdict()
    assert guardrails.check(tenant("banana", blocklist="flag"), chat("a banana")) == Verdict(("blocklist",))


def test_what_a_redaction_brings_to_light_counts():
    guardrails = Guardrails(GuardrailSettings())
    with pytest.raises(ContentBlocked, match="blocklist"):
        guardrails.check(tenant("banana", nul="redact"), chat("ban\x00ana"))
    body = chat("ann\x00@example.org")
    assert guardrails.check(tenant(nul="redact", email="redact"), body) == Verdict(("email", "nul"), redacted=True)
    assert texts_of(body) == ["[EMAIL]"]


def test_what_cannot_be_redacted_is_blocked():
    tool = {"function": {"parameters": {"properties": {"ann@example.org": {}}}}}
    with pytest.raises(ContentBlocked, match=r"'email': it stands where nothing can be redacted"):
        Guardrails(GuardrailSettings()).check(tenant(email="redact"), {"tools": [tool]})
    hydra = GuardrailSettings(patterns={"hydra": "REDACTED"}, actions={"hydra": "redact"})
    with pytest.raises(ContentBlocked, match="hid more of it"):
        Guardrails(hydra).check(tenant(), chat("REDACTED"))


@given(
    st.lists(
        st.sampled_from(
            [
                "ann@example.org",
                "\x00",
                "8.8.8.8",
                "a",
                "@",
                ".",
                "org",
                "4111111111111111",
                " ",
                "\u200b",
                "\u0301",
                "４",
                "\U000e0061",
                "bad",
                "ᄒ",
                "ᅡ",
                "ᆫ",
            ]
        ),
        max_size=12,
    )
)
@settings(max_examples=200, deadline=None)
def test_nothing_that_is_redacted_is_left(pieces: list[str]):
    guardrails = GUARDRAILS
    policy = EVERYTHING
    body = {"prompt": "".join(pieces)}
    try:
        guardrails.check(policy, body)
    except ContentBlocked:
        return
    after = copy.deepcopy(body)
    assert guardrails.check(policy, body) == Verdict()
    assert body == after


GUARDRAILS = Guardrails(GuardrailSettings())
EVERYTHING = tenant("bad", "한", **{n: "redact" for n, r in CHECKS.items() if r.can_redact and not r.off_loop})


async def test_a_text_made_to_cost_is_read_in_a_thread():
    guardrails = Guardrails(GuardrailSettings())
    body = chat("4111 1111 1111 1112 " * 5_000 + "ann@example.org")
    policy = tenant(pii="redact")
    assert guardrails.check(policy, body) is None
    assert await guardrails.check_slowly(policy, body) == Verdict(("email",), redacted=True)
    assert texts_of(body)[0].endswith(" [EMAIL]")
    with pytest.raises(ContentBlocked):
        await guardrails.check_slowly(tenant(email="block"), chat("4111 1111 1111 1112 " * 5_000 + "ann@example.org"))
    await guardrails.close()


async def test_a_check_off_the_loop_sees_what_the_others_left():
    toxicity, presidio = Fixed("toxicity", Found(0, 0.4)), Fixed("presidio", Found(1, 0.9, "person", ((0, 3),)))
    guardrails = Guardrails(GuardrailSettings(), [toxicity, presidio])
    policy = tenant(email="redact", presidio="redact", toxicity="block")
    body = chat("ann@example.org", "Ann is here")
    assert guardrails.check(policy, body) is None
    assert await guardrails.check_slowly(policy, body) == Verdict(("email", "presidio"), redacted=True)
    assert texts_of(body) == ["[EMAIL]", "[PERSON] is here"]
    assert toxicity.seen == ["[EMAIL]", "Ann is here"]
    await guardrails.close()
    assert toxicity.is_closed


async def test_a_check_off_the_loop_blocks_from_its_threshold():
    policy = tenant(toxicity="block")
    for score, blocks in ((0.79, False), (0.8, True)):
        guardrails = Guardrails(GuardrailSettings(), [Fixed("toxicity", Found(0, score, "rude"), threshold=0.8)])
        if blocks:
            with pytest.raises(ContentBlocked, match="'toxicity': rude"):
                await guardrails.check_slowly(policy, chat("you"))
        else:
            assert await guardrails.check_slowly(policy, chat("you")) == Verdict()


@pytest.mark.parametrize(
    ("check", "cause"),
    [
        (Broken("toxicity"), "failed_error"),
        (Fixed("toxicity", delay_s=60.0), "failed_late"),
        (Fixed("presidio"), "failed_missing"),
    ],
)
async def test_a_check_that_cannot_be_made_closes_or_opens(check: Fixed, cause: str):
    counted: Counter[tuple[str, str]] = Counter()
    policy = tenant(toxicity="block")
    closed = GuardrailSettings(off_loop_timeout_s=0.01)
    with pytest.raises(Unavailable, match="'toxicity' could not check") as caught:
        await Guardrails(closed, [check], lambda *what: counted.update([what])).check_slowly(policy, chat("hi"))
    assert (caught.value.status, caught.value.code) == (503, ErrorCode.GUARDRAIL_UNAVAILABLE)
    assert counted == {("toxicity", cause): 1}
    opened = GuardrailSettings(off_loop_timeout_s=0.01, on_failure=OnFailure.OPEN)
    assert await Guardrails(opened, [check]).check_slowly(policy, chat("hi")) == Verdict()


async def test_what_one_check_found_counts_though_another_failed():
    guardrails = Guardrails(GuardrailSettings(), [Broken("toxicity"), Fixed("presidio", Found(0, 1.0, "person"))])
    with pytest.raises(ContentBlocked):
        await guardrails.check_slowly(tenant(toxicity="block", presidio="block"), chat("hi"))


async def test_no_more_wait_than_may():
    guardrails = Guardrails(GuardrailSettings(max_waiting=1), [Fixed("toxicity", delay_s=60.0)])
    policy = tenant(toxicity="block")
    first = asyncio.create_task(guardrails.check_slowly(policy, chat("hi")))
    await asyncio.sleep(0)
    with pytest.raises(Overloaded):
        await guardrails.check_slowly(policy, chat("hi"))
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)
    guardrails.off_loop["toxicity"] = Fixed("toxicity")
    assert await guardrails.check_slowly(policy, chat("hi")) == Verdict()  # the place is free again


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"actions": {"emial": "flag"}}, "did you mean 'email'"),
        ({"actions": {"toxicity": "flag"}}, "actions.toxicity: needs pip install"),
        ({"actions": {"guard_model": "flag"}, "guard_model": "guard"}, "actions.guard_model: needs"),
        ({"patterns": {"mine": "("}}, "mine: not an expression"),
    ],
)
def test_settings_that_cannot_be_kept_are_refused(changes: dict[str, Any], words: str):
    with pytest.raises(ValueError, match=words):
        Guardrails(GuardrailSettings(**changes))


def test_a_policy_is_made_ready_once():
    guardrails = Guardrails(GuardrailSettings())
    policy = tenant("a", "b").guardrails
    assert guardrails.ready(policy) is guardrails.ready(policy)


@pytest.mark.parametrize(
    ("answer", "detail"),
    [
        ("safe", None),
        (" Safe.\n", None),
        ("unsafe\nS1,S10", "violent_crimes"),
        ("unsafe", "unsafe"),
        ("unsafe\nS99", "unsafe"),
    ],
)
async def test_the_guard_models_verdict(answer: str, detail: str | None):
    asked: list[str] = []

    async def ask(text: str) -> str:
        asked.append(text)
        return answer

    guardrails = Guardrails(GuardrailSettings(guard_model="guard"), [GuardModelCheck(ask)])
    policy = tenant(guard_model="block")
    if detail is None:
        assert await guardrails.check_slowly(policy, chat("one", "two")) == Verdict()
    else:
        with pytest.raises(ContentBlocked, match=f"'guard_model': {detail}"):
            await guardrails.check_slowly(policy, chat("one", "two"))
    assert asked == ["one\n\ntwo"]


async def test_a_guard_model_without_a_verdict_or_an_answer_fails():
    async def mumbles(text: str) -> str:
        return "I cannot say"

    async def is_gone(text: str) -> str:
        raise Unavailable("nothing serves it")

    for ask in (mumbles, is_gone):
        guardrails = Guardrails(GuardrailSettings(), [GuardModelCheck(ask)])
        with pytest.raises(Unavailable, match="'guard_model' could not check"):
            await guardrails.check_slowly(tenant(guard_model="block"), chat("hi"))


async def test_a_long_text_is_judged_to_its_end():
    async def ask(text: str) -> str:
        return "unsafe\nS1" if "bomb" in text else "safe"

    guardrails = Guardrails(GuardrailSettings(), [GuardModelCheck(ask)])
    with pytest.raises(ContentBlocked):
        await guardrails.check_slowly(tenant(guard_model="block"), chat("x " * 20_000 + "bomb"))
