"""What a client gets when all goes well, against what the engine's own log says."""

from __future__ import annotations

import base64
import struct

import pytest

from serving.core.state import Task
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.gateway.auth import OPEN_TENANT
from serving.gateway.request import CacheSalts
from tests.gateway.fleets import EMBEDDER, MODEL, MakeEngine, MakeGateway, a_pool
from tests.gateway.wire import CHAT, chat, get, metric, post


async def test_a_unary_chat_is_the_engines_answer_byte_for_byte(gateway: Gateway, engine: FakeEngine) -> None:
    answer = await post(gateway, CHAT, chat())
    assert answer.status == 200
    assert answer.text == engine.log.ended[-1].text
    assert answer.json["usage"]["completion_tokens"] == 5
    assert answer.json["model"] == MODEL
    assert answer.headers["x-served-by"] == "pool-a; 1; 1/-"


async def test_a_stream_carries_the_engines_text_and_ends_with_done(gateway: Gateway, engine: FakeEngine) -> None:
    answer = await post(gateway, CHAT, chat(stream=True))
    assert answer.status == 200
    assert answer.headers["content-type"].startswith("text/event-stream")
    assert answer.text == engine.log.ended[-1].text
    assert answer.payloads[-1] == b"[DONE]"


async def test_the_usage_report_reaches_only_the_client_that_asked(gateway: Gateway, engine: FakeEngine) -> None:
    silent = await post(gateway, CHAT, chat(stream=True))
    asked = await post(gateway, CHAT, chat(stream=True, stream_options={"include_usage": True}))
    assert not any("usage" in chunk for chunk in silent.chunks)
    assert asked.chunks[-1]["usage"]["completion_tokens"] == 5
    assert engine.log.ended[-2].body["stream_options"] == {"include_usage": True}


@pytest.mark.parametrize("stream", [False, True])
async def test_tokens_are_counted_as_the_engine_counted_them(
    gateway: Gateway, engine: FakeEngine, stream: bool
) -> None:
    for _ in range(2):
        await post(gateway, CHAT, chat(stream=stream, messages=[{"role": "user", "content": "word " * 40}]))
    truth = list(engine.log.ended)
    labels = {"model": MODEL, "pool": "pool-a"}
    assert metric(gateway, "workbench_prompt_tokens_total", **labels) == sum(r.num_prompt_tokens for r in truth)
    assert metric(gateway, "workbench_output_tokens_total", **labels) == sum(r.num_output_tokens for r in truth)
    assert metric(gateway, "workbench_cached_tokens_total", **labels) == sum(r.num_cached_tokens for r in truth) > 0
    assert metric(gateway, "workbench_inexact_usage_total") == 0
    assert metric(gateway, "workbench_requests_total", status="200", code="ok", **labels) == 2


async def test_continuous_usage_is_not_counted_twice(gateway: Gateway, engine: FakeEngine) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    await post(gateway, CHAT, chat(stream=True, stream_options=options))
    assert engine.log.ended[-1].num_output_tokens == 5
    assert metric(gateway, "workbench_output_tokens_total") == 5


@pytest.mark.parametrize("stream", [False, True])
async def test_completions(gateway: Gateway, engine: FakeEngine, stream: bool) -> None:
    answer = await post(
        gateway, "/v1/completions", {"model": MODEL, "prompt": "once upon", "max_tokens": 4, "stream": stream}
    )
    assert answer.status == 200
    assert answer.text == engine.log.ended[-1].text


async def test_completions_of_token_ids(gateway: Gateway, engine: FakeEngine) -> None:
    answer = await post(gateway, "/v1/completions", {"model": MODEL, "prompt": [3, 1, 4, 1, 5], "max_tokens": 2})
    assert answer.json["usage"]["prompt_tokens"] == 5


async def test_embeddings(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(model=EMBEDDER)
    gateway = await make_gateway(a_pool("pool-e", {"e1": engine.url}, model=EMBEDDER, task=Task.EMBED))
    body = {"model": EMBEDDER, "input": ["a cat", "a dog and more"]}
    plain = await post(gateway, "/v1/embeddings", body)
    packed = await post(gateway, "/v1/embeddings", {**body, "encoding_format": "base64"})
    assert plain.status == packed.status == 200
    vectors = [item["embedding"] for item in plain.json["data"]]
    unpacked = [struct.unpack("8f", base64.b64decode(item["embedding"])) for item in packed.json["data"]]
    assert vectors == [pytest.approx(vector, abs=1e-6) for vector in unpacked]
    assert metric(gateway, "workbench_prompt_tokens_total", model=EMBEDDER) == 2 * 6


async def test_a_model_with_its_version_reaches_the_engine_by_its_name(gateway: Gateway, engine: FakeEngine) -> None:
    answer = await post(gateway, CHAT, chat(model=f"{MODEL}@1"))
    assert answer.status == 200
    assert engine.log.ended[-1].body["model"] == MODEL


async def test_the_salt_is_ours_and_unknown_fields_pass(gateway: Gateway, engine: FakeEngine) -> None:
    await post(gateway, CHAT, chat(cache_salt="somebody-elses", user="u", temperature=0.5))
    body = engine.log.ended[-1].body
    assert body["cache_salt"] == CacheSalts(b"secret").of(OPEN_TENANT)
    assert (body["user"], body["temperature"]) == ("u", 0.5)


@pytest.mark.parametrize(
    ("service_tier", "priority"), [("priority", -1), ("default", None), ("auto", None), (None, None), ("flex", 1)]
)
async def test_the_service_tier_becomes_the_engines_priority(
    gateway: Gateway, engine: FakeEngine, service_tier: str | None, priority: int | None
) -> None:
    await post(gateway, CHAT, chat(service_tier=service_tier))
    body = engine.log.ended[-1].body
    assert body.get("priority") == priority
    assert "service_tier" not in body


async def test_a_sane_request_id_is_echoed_and_never_shared_with_the_engine(
    gateway: Gateway, engine: FakeEngine
) -> None:
    first = await post(gateway, CHAT, chat(), [(b"x-request-id", b"mine-1")])
    second = await post(gateway, CHAT, chat(), [(b"x-request-id", b"mine-1")])
    assert first.headers["x-request-id"] == second.headers["x-request-id"] == "mine-1"
    assert engine.log.ended[-1].id != engine.log.ended[-2].id


@pytest.mark.parametrize("given", [b"a b", b"x" * 129, b"", b"caf\xe9"])
async def test_any_other_request_id_is_replaced(gateway: Gateway, given: bytes) -> None:
    answer = await post(gateway, CHAT, chat(), [(b"x-request-id", given)])
    assert answer.headers["x-request-id"] != given.decode("latin-1")


async def test_models_are_listed_with_their_versions(gateway: Gateway) -> None:
    listed = (await get(gateway, "/v1/models")).json
    assert [(m["id"], m["champion"], m["versions"]) for m in listed["data"]] == [
        (EMBEDDER, "1", ["1"]),
        (MODEL, "1", ["1", "2"]),
    ]
    assert (await get(gateway, f"/v1/models/{MODEL}@2")).json["id"] == f"{MODEL}@2"


async def test_nothing_is_in_flight_afterwards(gateway: Gateway) -> None:
    await post(gateway, CHAT, chat(stream=True))
    await post(gateway, CHAT, chat())
    assert [replica.num_in_flight for replica in gateway.fleet.replicas] == [0]
    assert metric(gateway, "workbench_requests_in_flight") == 0


SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"type": "function", "function": {"name": "weather", "description": "of a city", "parameters": SCHEMA}}
PASSED = {
    "/v1/chat/completions": {
        "messages": [
            {"role": "system", "content": "be brief"},
            {"role": "user", "content": [{"type": "text", "text": "one two"}]},
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "c1", "type": "function", "function": {"name": "weather", "arguments": '{"city": "Ü"}'}}
                ],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "rain"},
        ],
        "tools": [WEATHER],
        "tool_choice": "auto",
        "response_format": {"type": "json_schema", "json_schema": {"name": "where", "schema": SCHEMA}},
        "logprobs": True,
        "top_logprobs": 3,
        "n": 1,
        "seed": 7,
        "stop": ["\n", "end"],
        "max_completion_tokens": 4,
        "temperature": 0.25,
        "top_p": 0.5,
        "presence_penalty": 0.5,
        "frequency_penalty": -0.5,
        "logit_bias": {"5": -1.0},
        "user": "somebody",
        "chat_template_kwargs": {"enable_thinking": False},
    },
    "/v1/completions": {
        "prompt": [5, 6, 7],
        "echo": True,
        "logprobs": 2,
        "n": 1,
        "seed": 7,
        "stop": "end",
        "suffix": None,
        "max_tokens": 4,
        "min_tokens": 2,
        "prompt_logprobs": 1,
    },
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PASSED)
async def test_what_the_gateway_does_not_set_reaches_the_engine_as_it_was_sent(
    gateway: Gateway, engine: FakeEngine, path: str, stream: bool
) -> None:
    asked = PASSED[path] | ({"stream": True, "stream_options": {"continuous_usage_stats": True}} if stream else {})
    answer = await post(gateway, path, {"model": MODEL, **asked})
    assert answer.status == 200, answer.body
    got = engine.log.ended[-1].body
    ours = {"model": MODEL, "cache_salt": CacheSalts(b"secret").of(OPEN_TENANT)}
    if stream:
        ours["stream_options"] = {"continuous_usage_stats": True, "include_usage": True}
    assert got == asked | ours
