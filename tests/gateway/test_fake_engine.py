"""The fake engine against its promises: vLLM's shapes, and a log that tells the truth."""

from __future__ import annotations

import array
import asyncio
import base64
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
from pydantic import ValidationError

from serving.clock import ManualClock
from serving.engine.client import ConnectFailed, ConnectionLost, EngineClient, UnexpectedStatus
from serving.engine.fake import FakeEngine, FakeSettings
from serving.engine.scrape import scrape
from tests.gateway.talk import CHAT, COMPLETIONS, FAST, HELLO, USAGE, events, kinds, start, stream

EMBEDDINGS = "/v1/embeddings"


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeSettings(**FAST)) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.url) as client:
        yield client


# ---- shapes


async def test_a_chat_stream_has_vllms_shape(engine: FakeEngine, client: EngineClient) -> None:
    out = await stream(client, CHAT, {"model": "m", **HELLO, "max_tokens": 3}, x_request_id="r1")
    role, *tokens, last, usage, done = out
    assert {chunk["object"] for chunk in out[:-1]} == {"chat.completion.chunk"}
    assert {chunk["id"] for chunk in out[:-1]} == {"chatcmpl-r1"}
    assert role["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert [chunk["choices"][0]["finish_reason"] for chunk in tokens] == [None, None]
    assert last["choices"][0]["finish_reason"] == "length"
    assert (usage["choices"], done) == ([], "[DONE]")
    expected = {"prompt_tokens": 3, "completion_tokens": 3, "total_tokens": 6}
    assert usage["usage"] == {**expected, "prompt_tokens_details": {"cached_tokens": 0}}
    text = "".join(chunk["choices"][0]["delta"]["content"] for chunk in out[1:4])
    assert (text, len(text.split())) == (engine.log.ended[0].text, 3)


async def test_unary_and_stream_say_the_same(client: EngineClient) -> None:
    chat = await client.post_json(CHAT, {**HELLO, "max_tokens": 3})
    streamed = await stream(client, CHAT, {**HELLO, "max_tokens": 3})
    assert chat["choices"][0]["message"]["content"] == "".join(
        chunk["choices"][0]["delta"]["content"] for chunk in streamed[:4]
    )
    text = await client.post_json(COMPLETIONS, {"prompt": "a b", "max_tokens": 3})
    streamed = await stream(client, COMPLETIONS, {"prompt": "a b", "max_tokens": 3})
    assert text["choices"][0]["text"] == "".join(chunk["choices"][0]["text"] for chunk in streamed[:3])
    assert (text["object"], text["usage"]["total_tokens"]) == ("text_completion", 5)


async def test_without_max_tokens_it_stops_by_itself(engine: FakeEngine, client: EngineClient) -> None:
    answer = await client.post_json(COMPLETIONS, {"prompt": "a"})
    assert answer["choices"][0]["finish_reason"] == engine.log.ended[0].finish_reason == "stop"
    assert answer["usage"]["completion_tokens"] == engine.settings.default_output_tokens


async def test_usage_comes_only_when_asked_for_and_with_every_chunk_when_asked_for(client: EngineClient) -> None:
    body = {"prompt": "a", "max_tokens": 2, "stream": True}
    assert all("usage" not in chunk for chunk in (await events(await start(client, COMPLETIONS, body)))[:-1])
    options = {"include_usage": True, "continuous_usage_stats": True}
    for path, prompt, counts in ((COMPLETIONS, {"prompt": "a"}, [1, 2, 2]), (CHAT, HELLO, [0, 1, 2, 2])):
        out = await stream(client, path, {**prompt, "max_tokens": 2, "stream_options": options})
        assert [chunk["usage"]["completion_tokens"] for chunk in out[:-1]] == counts


async def test_token_ids_on_request(client: EngineClient) -> None:
    role, first, *_ = await stream(client, CHAT, {**HELLO, "max_tokens": 2, "return_token_ids": True})
    assert len(role["prompt_token_ids"]) == 3
    assert len(first["choices"][0]["token_ids"]) == 1
    first, second, *_ = await stream(client, COMPLETIONS, {"prompt": [5, 6], "max_tokens": 2, "return_token_ids": True})
    assert first["choices"][0]["prompt_token_ids"] == [5, 6]
    assert len(second["choices"][0]["token_ids"]) == 1


async def test_the_same_prompt_says_the_same_and_goes_on_where_it_was_cut(client: EngineClient) -> None:
    async def say(path: str = COMPLETIONS, **body: Any) -> list[str]:
        answer = await client.post_json(path, {"max_tokens": 8, **body})
        choice = answer["choices"][0]
        return (choice["text"] if path == COMPLETIONS else choice["message"]["content"]).split()

    words = await say(prompt="a b")
    assert await say(prompt="a b") == words
    assert await say(prompt="a b", seed=1) != words
    assert await say(prompt="a c") != words
    assert await say(prompt="a b " + " ".join(words[:3]), max_tokens=5) == words[3:]
    words = await say(CHAT, **HELLO)
    partial = {"role": "assistant", "content": " ".join(words[:3])}
    going_on = {"messages": [*HELLO["messages"], partial], "continue_final_message": True, "max_tokens": 5}
    assert await say(CHAT, **going_on, add_generation_prompt=False) == words[3:]


async def test_embeddings_depend_on_the_text_alone(engine: FakeEngine, client: EngineClient) -> None:
    answer = await client.post_json("/v1/embeddings", {"model": "m", "input": ["a b", "c"]})
    first, second = (item["embedding"] for item in answer["data"])
    assert (len(first), answer["usage"]["prompt_tokens"]) == (384, 3)
    assert first != second
    assert sum(value * value for value in first) == pytest.approx(1)
    # The OpenAI SDK asks for base64.
    answer = await client.post_json("/v1/embeddings", {"input": "a b", "encoding_format": "base64"})
    decoded = array.array("f", base64.b64decode(answer["data"][0]["embedding"]))
    assert list(decoded) == pytest.approx(first, abs=1e-6)
    assert [log.finish_reason for log in engine.log.ended] == ["stop", "stop"]


async def test_models_tokenize_health_and_unknown_routes(client: EngineClient) -> None:
    models = await client.get_json("/v1/models")
    assert [(card["id"], card["max_model_len"]) for card in models["data"]] == [("m", 4096)]
    assert (await client.post_json("/tokenize", {"prompt": "a b"}))["count"] == 2
    assert (await client.post_json("/tokenize", HELLO))["count"] == 3
    assert await client.get_json("/health") is None
    with pytest.raises(UnexpectedStatus, match="404"):
        await client.get_json("/v2")


@pytest.mark.parametrize(
    ("body", "status", "match"),
    [
        (b"{", 400, "no JSON"),
        (b"[]", 400, "no JSON object"),
        ({"model": "other", "prompt": "a"}, 404, "does not exist"),
        ({"prompt": ["a", "b"]}, 400, "one text or one list"),
        ({"prompt": "a", "max_tokens": 0}, 400, "at least 1"),
        ({"prompt": "a " * 4095, "max_tokens": 2}, 400, "maximum context length is 4096"),
        ({"prompt": "a", "cache_salt": ""}, 400, "non-empty"),
        ({"prompt": "a", "stream_options": {"include_usage": True}}, 400, "stream=True"),
        ({"prompt": "a", "fake": {"no_such": 1}}, 400, "no_such"),
    ],
)
async def test_bad_bodies_are_refused(client: EngineClient, body: Any, status: int, match: str) -> None:
    raw = body if isinstance(body, bytes) else orjson.dumps(body)
    response = await client.request("POST", COMPLETIONS, body=raw)
    assert response.status == status
    error = orjson.loads(await response.read())["error"]
    assert (error["code"], match in error["message"]) == (status, True)


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"prompt": "a", "seed": 1.5}, "seed"),
        (COMPLETIONS, {"prompt": "a", "priority": "first"}, "priority"),
        (COMPLETIONS, {"prompt": "a", "cache_salt": 5}, "cache_salt"),
        (COMPLETIONS, {"prompt": "a", "stream": True, "stream_options": [1]}, "stream_options"),
        (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [5]}]}, "messages"),
        (CHAT, {"messages": [{"role": "user", "content": [{"text": 5}]}]}, "messages"),
        (EMBEDDINGS, {"input": "a", "dimensions": -1}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 0}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": 2**31 - 1}, "dimensions"),
        (EMBEDDINGS, {"input": "a", "dimensions": "8"}, "dimensions"),
        (EMBEDDINGS, {"input": [["a"]]}, "input"),
    ],
)
async def test_a_field_of_a_wrong_kind_is_refused(
    engine: FakeEngine, client: EngineClient, path: str, fields: dict[str, Any], param: str
) -> None:
    response = await start(client, path, fields)
    assert response.status == 400
    assert orjson.loads(await response.read())["error"]["param"] == param
    assert not engine.log.active


# ---- the log


async def test_the_log_holds_every_write_before_the_client_has_it(engine: FakeEngine, client: EngineClient) -> None:
    response = await start(client, CHAT, {**HELLO, **USAGE, "max_tokens": 4})
    received = [received_at_s async for received_at_s, _ in response.chunks()]
    (log,) = engine.log.ended
    assert kinds(log) == ["head", "role", *["token"] * 4, "usage", "done"]
    assert log.num_output_tokens == 4
    stamps = [response.sent_at_s, log.received_at_s, *(write.at_s for write in log.writes), received[-1]]
    assert stamps == sorted(stamps)
    assert all(write.at_s <= at_s for write, at_s in zip(log.writes[1:], received, strict=False))


async def test_chunks_follow_absolute_deadlines(tmp_path: Path) -> None:
    settings = FakeSettings(**FAST | {"tokens_per_chunk": 4, "ttft_ms": 5}, log=tmp_path / "log.jsonl")
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:
        await asyncio.gather(*[stream(client, COMPLETIONS, {"prompt": f"a {n}", "max_tokens": 18}) for n in range(8)])
    lines = [orjson.loads(line) for line in (tmp_path / "log.jsonl").read_bytes().splitlines()]
    assert len(lines) == 8
    for line in lines:
        writes = [write for write in line["writes"] if write["num_tokens"]]
        assert [write["num_tokens"] for write in writes] == [4, 4, 4, 4, 2]
        for number, write in enumerate(writes):  # never early, by more than the loop's clock resolves
            assert write["at_s"] - line["started_at_s"] > 0.005 + number * 0.004 - 0.0015
        assert (line["num_prompt_tokens"], line["finish_reason"]) == (2, "length")


async def test_a_client_that_leaves_is_logged_and_its_place_freed(engine: FakeEngine, client: EngineClient) -> None:
    response = await start(client, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": True})
    async for _ in response.chunks():
        break
    response.abort()
    await engine.wait_until(lambda engine: bool(engine.log.ended))
    (log,) = engine.log.ended
    assert log.finish_reason == "abort"
    assert log.aborted_at_s is not None
    assert log.aborted_at_s >= log.writes[-1].at_s
    assert (engine.scheduler.num_running, engine.log.active) == (0, {})


async def test_a_stopped_engine_is_gone_for_its_clients() -> None:
    engine = FakeEngine(FakeSettings(**FAST))
    await engine.start()
    async with EngineClient(engine.url) as client:
        response = await start(client, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": True})
        await engine.stop()
        with pytest.raises(ConnectionLost):
            await response.read()
        with pytest.raises(ConnectFailed):
            await client.get_json("/health")
    assert engine.log.ended[0].finish_reason == "abort"


# ---- the engine


async def test_requests_beyond_the_limit_wait_their_turn(tmp_path: Path) -> None:
    async with FakeEngine(FakeSettings(**FAST, max_num_seqs=2)) as engine, EngineClient(engine.url) as client:
        holding = [await start(client, COMPLETIONS, {"prompt": "a b", "max_tokens": 4000, **USAGE}) for _ in range(2)]
        waiting = asyncio.create_task(client.post_json(COMPLETIONS, {"prompt": "c", "max_tokens": 2}))
        await engine.wait_until(lambda engine: engine.scheduler.num_waiting == 1)
        snapshot = await scrape(client, "r0", ManualClock(now_s=5.0))
        assert (snapshot.replica_id, snapshot.observed_at_s) == ("r0", 5.0)
        assert (snapshot.num_running, snapshot.num_waiting) == (2, 1)
        assert snapshot.kv_cache_capacity_tokens == engine.settings.kv_cache_capacity_tokens
        assert snapshot.kv_cache_usage_frac > 0
        holding[0].abort()
        await waiting
        holding[1].abort()
        await engine.wait_until(lambda engine: not engine.log.active)
        snapshot = await scrape(client, "r0", ManualClock())
        assert (snapshot.num_running, snapshot.num_waiting, snapshot.kv_cache_usage_frac) == (0, 0, 0)
        assert snapshot.num_output_tokens_total == sum(log.num_output_tokens for log in engine.log.ended)


async def test_priority_reorders_the_queue() -> None:
    settings = FakeSettings(**FAST, max_num_seqs=1, scheduling_policy="priority")
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:
        holding = await start(client, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": True})
        waiting = []
        for number, priority in enumerate([5, 0, 5, -1]):
            body = {"prompt": "a", "max_tokens": 1, "priority": priority}
            waiting.append(asyncio.create_task(start(client, COMPLETIONS, body, x_request_id=f"r{number}")))
            await engine.wait_until(lambda engine, n=number: engine.scheduler.num_waiting == n + 1)
        holding.abort()
        for response in await asyncio.gather(*waiting):
            await response.read()
        assert [log.id for log in engine.log.ended][1:] == ["r3", "r1", "r0", "r2"]


async def test_kv_cache_bounds_what_runs() -> None:
    settings = FakeSettings(**FAST, max_model_len=64, num_gpu_blocks=8, block_size=16)
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:
        body = {"prompt": "a", "max_tokens": 63, "fake": {"hang_after_tokens": 1}, "stream": True}
        held = [await start(client, COMPLETIONS, body) for _ in range(3)]
        assert (engine.scheduler.num_running, engine.scheduler.num_waiting) == (2, 1)
        held[0].abort()
        await engine.wait_until(lambda engine: engine.scheduler.num_waiting == 0)
    with pytest.raises(ValidationError, match="exceeds the KV cache"):
        FakeSettings(max_model_len=64, num_gpu_blocks=1, block_size=16)


@pytest.mark.parametrize("reject_as", ["status", "event"])
async def test_a_full_queue_turns_away_as_vllm_does(reject_as: str) -> None:
    settings = FakeSettings(**FAST, max_num_seqs=1, max_num_queued_reqs=0, reject_as=reject_as)
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:
        holding = await start(client, COMPLETIONS, {"prompt": "a", "max_tokens": 4000, "stream": True})
        response = await start(client, COMPLETIONS, {"prompt": "a", "stream": True})
        if reject_as == "status":
            assert response.status == 503
            assert orjson.loads(await response.read())["error"]["code"] == 503
        else:
            error, done = await events(response)
            assert (error["error"]["code"], done) == (503, "[DONE]")
        with pytest.raises(UnexpectedStatus, match="503"):
            await client.post_json(COMPLETIONS, {"prompt": "a"})
        holding.abort()
        assert engine.scheduler.num_rejected_total == 2
        assert [log.finish_reason for log in engine.log.ended] == ["error", "error"]


async def test_prefixes_are_cached_within_a_salt_only() -> None:
    settings = FakeSettings(**FAST, block_size=4, prefill_ms_per_token=0.1)
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:

        async def num_cached(prompt: str, salt: str | None = None) -> int:
            answer = await client.post_json(COMPLETIONS, {"prompt": prompt, "max_tokens": 1, "cache_salt": salt})
            return answer["usage"]["prompt_tokens_details"]["cached_tokens"]

        prompt = " ".join(f"w{n}" for n in range(10))
        assert [await num_cached(prompt), await num_cached(prompt), await num_cached(prompt, "s")] == [0, 8, 0]
        assert await num_cached(prompt[:20] + " other words that follow") == 4
        assert await num_cached(" ".join(f"w{n}" for n in range(8))) == 4  # the last token is always computed
        snapshot = await scrape(client, "r0", ManualClock())
        assert snapshot.prefix_cache_hit_tokens_total == 16
        assert snapshot.prefix_cache_queried_tokens_total == sum(log.num_prompt_tokens for log in engine.log.ended)


async def test_a_step_grows_with_what_runs() -> None:
    settings = FakeSettings(**FAST | {"itl_ms": 2}, itl_ms_per_seq=3)
    async with FakeEngine(settings) as engine, EngineClient(engine.url) as client:
        held = await start(client, COMPLETIONS, {"prompt": "a", "stream": True, "fake": {"hang_after_tokens": 0}})
        assert engine.scheduler.step_s == pytest.approx(0.005)
        held.abort()
