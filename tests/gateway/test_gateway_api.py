"""What the gateway offers beside OpenAI's three routes, and who may have it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import orjson
import pytest

from serving.core.policies.guardrails import GuardrailSettings, OnFailure
from serving.core.state import Tier
from serving.core.tenancy import ApiKey, AuthMode, GuardrailPolicy, Limits, Tenant, TenantDirectory
from serving.engine.fake import FakeEngine
from serving.engine.fake.settings import ServerFaults
from serving.gateway.app import Gateway
from serving.gateway.request import CacheSalts
from serving.metering.events import Waste
from serving.metering.segments import read_events
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.tenants import FileTenantDirectory
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool
from tests.gateway.wire import CHAT, Exchange, begin_post, chat, get, metric, post

GENERATE = "/v1/generate"


async def test_generate_continues_a_text(gateway: Gateway) -> None:
    answer = await post(gateway, GENERATE, {"model": "m", "text": "one two three", "max_tokens": 4})
    assert answer.status == 200
    said = answer.json
    assert set(said) == {"id", "text", "model", "version", "adapter", "finish_reason", "usage"}
    assert (said["model"], said["version"], said["finish_reason"]) == ("m", "1", "length")
    assert said["usage"] | {"usd": None} == {
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
        "num_output_tokens": 4,
        "usd": None,
    }
    assert said["text"]


async def test_generate_streams_texts_and_then_what_it_came_to(gateway: Gateway) -> None:
    messages = [{"role": "user", "content": "one two three"}]
    body = {"model": "m", "version": "1", "messages": messages, "max_tokens": 4, "stream": True, "tier": "batch"}
    answer = await post(gateway, GENERATE, body)
    assert answer.payloads[-1] == b"[DONE]"
    *texts, last = answer.chunks
    assert all(set(chunk) == {"text"} for chunk in texts)
    assert last["usage"]["num_output_tokens"] == 4
    whole = await post(gateway, GENERATE, {k: v for k, v in body.items() if k != "stream"})
    assert whole.json["text"] == "".join(chunk["text"] for chunk in texts)


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "m"}, "text"),
        ({"model": "m", "text": "a", "messages": []}, "text"),
        ({"model": "m", "text": "a", "max_token": 3}, "max_token"),
        ({"model": "m", "text": "a", "tier": "gold"}, "tier"),
        ({"model": "m@1", "version": "1", "text": "a"}, "version"),
        ({"model": "m", "text": 3}, "text"),
    ],
)
async def test_generate_names_the_field_at_fault(gateway: Gateway, body: dict[str, object], param: str) -> None:
    answer = await post(gateway, GENERATE, body)
    assert (answer.status, answer.json["error"]["param"]) == (400, param)


async def test_generate_of_an_engine_that_breaks_off_ends_in_an_error(
    make_engine: MakeEngine, make_gateway: MakeGateway
) -> None:
    engine = await make_engine()
    engine.faults = ServerFaults(die_after_tokens=2)
    gateway = await make_gateway(a_pool("p", {"r": engine.url}))
    answer = await post(gateway, GENERATE, {"model": "m", "text": "a b", "max_tokens": 5, "stream": True})
    assert answer.payloads[-1] != b"[DONE]"
    assert answer.chunks[-1]["error"]["code"] == "upstream_error"


async def test_tokenize_counts_and_costs_nothing(gateway: Gateway) -> None:
    answer = await post(gateway, "/tokenize", {"model": "m", "prompt": "one two three"})
    assert (answer.status, answer.json["count"]) == (200, 3)
    assert metric(gateway, "workbench_prompt_tokens_total") == 0


async def test_responses_of_an_engine_without_them_are_a_clear_404(gateway: Gateway) -> None:
    answer = await post(gateway, "/v1/responses", {"model": "m", "input": "hi"})
    assert (answer.status, answer.json["error"]["code"]) == (404, "route_not_found")
    assert "/v1/responses" in answer.json["error"]["message"]


@pytest.mark.parametrize("field", ["previous_response_id", "background", "store"])
async def test_responses_are_not_kept(gateway: Gateway, field: str) -> None:
    answer = await post(gateway, "/v1/responses", {"model": "m", "input": "hi", field: "x"})
    assert (answer.status, answer.json["error"]["param"]) == (400, field)


async def test_moderations_judge_without_a_run(gateway: Gateway, engine: FakeEngine) -> None:
    answer = await post(gateway, "/v1/moderations", {"input": ["mail jo@example.org", "a cat"]})
    assert [result["flagged"] for result in answer.json["results"]] == [True, False]
    assert answer.json["results"][0]["categories"]["email"] is True
    assert not engine.log.ended


async def test_a_slow_first_token_is_bridged_by_comments(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(ttft_ms=120.0)
    gateway = await make_gateway(a_pool("p", {"r": engine.url}), sse_keep_alive_s=0.04)
    answer = await post(gateway, CHAT, chat(stream=True))
    assert answer.body.startswith(b": keep-alive\n\n")
    assert answer.payloads[-1] == b"[DONE]"
    assert answer.headers["x-served-by"].startswith("p; 1;")
    unary = await post(gateway, CHAT, chat())
    assert unary.json["choices"]


async def test_a_failure_after_a_comment_is_an_event(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(ttft_ms=100.0)
    gateway = await make_gateway(a_pool("p", {"r": engine.url}), sse_keep_alive_s=0.04)
    answer = await post(gateway, CHAT, chat(stream=True, fake={"die_after_tokens": 1}))
    assert (answer.status, answer.chunks[-1]["error"]["type"]) == (200, "upstream_error")


async def test_a_deadline_stops_the_engine(make_engine: MakeEngine, make_gateway: MakeGateway) -> None:
    engine = await make_engine(ttft_ms=5_000.0)
    gateway = await make_gateway(a_pool("p", {"r": engine.url}))
    answer = await post(gateway, CHAT, chat(), [(b"x-request-timeout-ms", b"50")])
    assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")
    assert metric(gateway, "workbench_requests_total", code="deadline_exceeded") == 1
    (asked,) = [*engine.log.ended, *engine.log.active.values()]
    assert asked.headers[b"x-request-timeout-ms"] == b"50"
    wrong = await post(gateway, CHAT, chat(), [(b"x-request-timeout-ms", b"soon")])
    assert wrong.status == 400


async def test_what_a_deadline_cut_off_is_counted(
    make_engine: MakeEngine, make_gateway: MakeGateway, tmp_path: Path
) -> None:
    engine = await make_engine(ttft_ms=5_000.0)
    tenant = Tenant("t", models=("m",), limits=Limits(tokens_per_minute=100))
    gateway, (key,) = await with_tenants(make_gateway, engine, tmp_path, tenant, usage_dir=tmp_path / "usage")
    asked = [(b"authorization", key), (b"x-request-timeout-ms", b"50")]
    assert (await post(gateway, CHAT, chat(max_tokens=40), asked)).status == 504
    (event,) = read_events(tmp_path / "usage")
    assert (event.waste, event.num_prompt_tokens > 0, event.exact) == (Waste.ABANDONED, True, False)
    refused = await post(gateway, CHAT, chat(max_tokens=60), asked)  # 40 and the prompt are still taken
    assert refused.status == 429
    unknown = await post(gateway, CHAT, chat(model="x"), asked)
    assert (unknown.status, unknown.headers["x-ratelimit-limit-tokens"]) == (404, "100")


async def test_moderations_are_requests_of_keys_for_inference(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    tenant = Tenant("t", models=("m",), limits=Limits(requests_per_minute=1))
    gateway, (key,) = await with_tenants(make_gateway, engine, tmp_path, tenant)
    statuses = [
        (await post(gateway, "/v1/moderations", {"input": "a"}, [(b"authorization", key)])).status for _ in range(2)
    ]
    assert statuses == [200, 429]


async def test_every_answer_has_its_request_id(gateway: Gateway) -> None:
    for path in ("/v1/models", "/health", "/nowhere"):
        assert (await get(gateway, path, headers=[(b"x-request-id", b"mine")])).headers["x-request-id"] == "mine"


async def test_a_trace_goes_on_in_the_engine(gateway: Gateway, engine: FakeEngine) -> None:
    trace = b"00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    await post(gateway, CHAT, chat(), [(b"traceparent", trace)])
    assert engine.log.ended[-1].headers[b"traceparent"] == trace
    for broken in (b"00-%032d-00f067aa0ba902b7-01" % 0, b"ff" + trace[2:], b"mine"):
        assert (await post(gateway, CHAT, chat(), [(b"traceparent", broken)])).status == 200
        assert b"traceparent" not in engine.log.ended[-1].headers


async def test_every_answer_to_a_key_with_limits_tells_them(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    tenant = Tenant("t", models=("m",), limits=Limits(requests_per_minute=5))
    gateway, (key,) = await with_tenants(make_gateway, engine, tmp_path, tenant)
    mine = [(b"authorization", key)]
    assert (await post(gateway, CHAT, chat(), mine)).headers["x-ratelimit-remaining-requests"] == "4"
    for path, status in (("/v1/models", 200), ("/v1/models/m", 200), ("/v1/models/n", 404)):
        answer = await get(gateway, path, headers=mine)
        assert (answer.status, answer.headers["x-ratelimit-remaining-requests"]) == (status, "4")
    assert not any(name.startswith("x-ratelimit") for name in (await get(gateway, "/v1/models")).headers)


async def test_pages_of_other_origins(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    gateway = await make_gateway(a_pool("p", {"r": engine.url}), cors_origins=("https://app.example",))
    asked = [(b"origin", b"https://app.example"), (b"access-control-request-method", b"POST")]
    preflight = await Exchange(gateway, "OPTIONS", CHAT, headers=asked).start().done()
    assert preflight.headers["access-control-allow-origin"] == "https://app.example"
    answer = await post(gateway, CHAT, chat(), [(b"origin", b"https://app.example")])
    assert answer.headers["access-control-allow-origin"] == "https://app.example"
    assert "x-request-id" in answer.headers["access-control-expose-headers"]
    too_many = [(b"origin", b"https://app.example"), *((b"x-%d" % number, b"") for number in range(200))]
    refused = await post(gateway, CHAT, chat(), too_many)
    assert (refused.status, refused.headers["access-control-allow-origin"]) == (431, "https://app.example")
    stranger = await post(gateway, CHAT, chat(), [(b"origin", b"https://evil.example")])
    assert "access-control-allow-origin" not in stranger.headers


async def with_tenants(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path, *tenants: Tenant, **settings: Any
) -> tuple[Gateway, list[bytes]]:
    """A gateway that requires keys, and a key for each tenant."""
    keys, headers = [], []
    for tenant in tenants:
        key_id = new_key_id()
        key = new_key(key_id)
        keys.append(ApiKey(key_id, tenant.tenant_id, key_sha256(key), 0.0))
        headers.append(f"Bearer {key}".encode())
    path = tmp_path / "tenants.json"
    await FileTenantDirectory(path).publish(TenantDirectory(1, 0.0, tenants, tuple(keys)))
    pool = a_pool("p", {"r": engine.url})
    return await make_gateway(pool, auth=AuthMode.REQUIRED, tenants_path=path, **settings), headers


async def test_grants_decide_and_tenants_are_kept_apart(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    both = Tenant("both", models=("m", "embedder"), tiers=tuple(Tier))
    other = Tenant("other", models=("embedder",))
    gateway, (key, other_key) = await with_tenants(make_gateway, engine, tmp_path, both, other)
    assert (await post(gateway, CHAT, chat())).status == 401
    assert (await post(gateway, CHAT, chat(), [(b"authorization", b"Bearer wb-nobody")])).status == 401
    assert (await post(gateway, CHAT, chat(cache_salt="mine"), [(b"authorization", key)])).status == 200
    assert engine.log.ended[-1].body["cache_salt"] == CacheSalts(b"secret").of(both)
    assert b"authorization" not in engine.log.ended[-1].headers
    refused = await post(gateway, CHAT, chat(), [(b"authorization", other_key)])
    unknown = await post(gateway, CHAT, chat(model="n"), [(b"authorization", other_key)])
    assert refused.status == unknown.status == 404
    assert refused.json["error"]["message"].replace("'m'", "'n'") == unknown.json["error"]["message"]
    tier = await post(gateway, CHAT, chat(model="embedder", service_tier="flex"), [(b"authorization", other_key)])
    assert tier.status == 403
    models = await get(gateway, "/v1/models", headers=[(b"authorization", other_key)])
    assert [model["id"] for model in models.json["data"]] == ["embedder"]
    assert (await get(gateway, "/v1/models")).status == 401


async def test_a_request_runs_in_a_region_that_its_tenant_grants_or_not_at_all(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    here, there = (Tenant(region, models=("m",), regions=(region,)) for region in ("local", "eu"))
    gateway, (key, other_key) = await with_tenants(make_gateway, engine, tmp_path, here, there)
    assert (await post(gateway, CHAT, chat(), [(b"authorization", key)])).status == 200
    refused = await post(gateway, CHAT, chat(), [(b"authorization", other_key)])
    assert (refused.status, refused.json["error"]["code"]) == (503, "no_replica")
    assert len(engine.log.ended) == 1


async def test_a_refused_body_of_a_stranger_is_told_about_the_key_first(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    gateway, _ = await with_tenants(make_gateway, engine, tmp_path, Tenant("t", models=("*",)))
    assert (await post(gateway, CHAT, b"x" * (9 << 20))).status == 401


async def test_metrics_name_every_model_and_are_for_admins_from_elsewhere(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gateway, (key,) = await with_tenants(make_gateway, engine, tmp_path, Tenant("t", models=("*",)))
    assert (await get(gateway, "/metrics")).status == 200  # from this machine
    monkeypatch.setattr("tests.gateway.wire.PEER", ("192.0.2.1", 1))
    assert (await get(gateway, "/metrics")).status == 401
    assert (await get(gateway, "/metrics", headers=[(b"authorization", key)])).status == 403


async def test_guardrails_run_before_the_engine(make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path) -> None:
    strict = GuardrailPolicy({"email": "block", "phone": "redact"}, ("swordfish",))
    gateway, (key,) = await with_tenants(make_gateway, engine, tmp_path, Tenant("t", ("m",), guardrails=strict))
    asked = [(b"authorization", key)]
    for content in ("mail jo@example.org", "the SWORDFISH"):
        answer = await post(gateway, CHAT, chat(messages=[{"role": "user", "content": content}]), asked)
        assert (answer.status, answer.json["error"]["code"]) == (400, "content_blocked")
        assert content not in orjson.dumps(answer.json).decode()
    assert not engine.log.ended
    await post(gateway, CHAT, chat(messages=[{"role": "user", "content": "call +49 30 1234 5678 90"}]), asked)
    assert engine.log.ended[-1].body["messages"][0]["content"] == "call [PHONE]"
    assert metric(gateway, "workbench_guardrail_finds_total", check="email", outcome="block") == 1


async def test_keys_need_a_store_to_be_idempotent(gateway: Gateway) -> None:
    answer = await post(gateway, CHAT, chat(), [(b"idempotency-key", b"k")])
    assert (answer.status, answer.json["error"]["code"]) == (503, "store_unavailable")


async def test_each_request_that_was_let_in_leaves_one_usage_event(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path
) -> None:
    gateway = await make_gateway(a_pool("p", {"r": engine.url}), usage_dir=tmp_path / "usage")
    await post(gateway, CHAT, chat())
    await post(gateway, CHAT, chat(stream=True, service_tier="flex"), [(b"x-request-id", b"mine")])
    await post(gateway, CHAT, b"no json")
    await post(gateway, CHAT, chat(stream=True, fake={"die_after_tokens": 2}))
    leaving = begin_post(gateway, CHAT, chat(stream=True, fake={"hang_after_tokens": 1}))
    await leaving.until_body(300)
    leaving.leave()
    await leaving.done()
    unary, stream, broken, left = read_events(tmp_path / "usage")
    assert (unary.tenant, unary.model, unary.version, unary.pool, unary.replica) == ("default", "m", "1", "p", "r")
    assert (unary.num_prompt_tokens, unary.num_output_tokens, unary.finish_reason) == (3, 5, "length")
    assert (unary.num_cached_tokens, unary.exact, stream.num_cached_tokens, stream.exact) == (0, True, 0, True)
    assert (stream.request_id, stream.tier, stream.status, stream.waste) == ("mine", "batch", 200, None)
    assert stream.id == engine.log.ended[1].id.removeprefix("chatcmpl-")
    assert (broken.num_output_tokens, broken.waste, broken.exact) == (2, Waste.FAILED, False)
    assert (left.num_output_tokens, left.waste, left.exact) == (1, Waste.ABANDONED, False)
    assert left.ended_at_s >= left.started_at_s


@pytest.mark.parametrize(("on_failure", "status"), [(OnFailure.CLOSED, 503), (OnFailure.OPEN, 200)])
async def test_a_guard_model_is_asked_through_its_pool(
    make_gateway: MakeGateway,
    make_engine: MakeEngine,
    engine: FakeEngine,
    tmp_path: Path,
    on_failure: OnFailure,
    status: int,
) -> None:
    guard = await make_engine()  # its words are no verdict: what that means is the setting's to say
    settings = GuardrailSettings(actions={"guard_model": "block"}, guard_model="m@2", on_failure=on_failure)
    pools = (a_pool("p", {"r": engine.url}), replace(a_pool("g", {"g": guard.url}), version="2"))
    gateway = await make_gateway(*pools, guardrails=settings, usage_dir=tmp_path / "usage")
    answer = await post(gateway, CHAT, chat())
    assert answer.status == status, answer.json
    asked, answered = read_events(tmp_path / "usage")
    assert (asked.tenant, asked.version, asked.status, asked.num_output_tokens) == ("guardrails", "2", 200, 32)
    assert (answered.tenant, answered.model, answered.status) == ("default", "m", status)
    assert guard.log.ended[-1].body["messages"] == [{"role": "user", "content": "one two three"}]
    assert len(engine.log.ended) == (1 if status == 200 else 0)
    assert metric(gateway, "workbench_guardrail_finds_total", check="guard_model", outcome="failed_no_verdict") == 1
