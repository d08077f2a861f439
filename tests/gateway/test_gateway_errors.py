"""Bad input and failing engines: each gets a clear answer in OpenAI's shape, and none is counted twice."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import orjson
import pytest

from serving.core.state import Replica, ReplicaState, RoutingPolicy
from serving.engine.fake import FakeEngine, ServerFaults
from serving.gateway.app import Gateway
from serving.store.routing_table import CachedRoutingTable, MemoryRoutingTable
from tests.gateway.fleets import EMBEDDER, MODEL, MakeEngine, MakeGateway, a_pool, a_table
from tests.gateway.wire import CHAT, Exchange, chat, get, metric, post

DEAD = "http://127.0.0.1:9"  # the discard port: nobody listens


def without(name: str) -> dict[str, Any]:
    return {key: value for key, value in chat().items() if key != name}


@pytest.mark.parametrize(
    ("body", "code", "param"),
    [
        (b"", "invalid_json", None),
        (b"{", "invalid_json", None),
        (b"[]", "invalid_json", None),
        (b'"text"', "invalid_json", None),
        (b'{"model": "\xff"}', "invalid_json", None),
        (b'{"model": "m", "temperature": NaN}', "invalid_json", None),
        (b'{"model": "m", "model": "n"}', "invalid_json", "model"),
        (b'{"model": "m", "messages": [{"role": "user", "role": "system"}]}', "invalid_json", "role"),
        (b'{"model": "m", "messages": [{"role": "user", "content": "\\ud800"}]}', "invalid_json", None),
        (b"[" * 100_000, "invalid_json", None),
        (b'{"model": "m", "seed": ' + b"1" * 5000 + b"}", "invalid_json", None),
        (b'{"\\ud800": 1, "\\ud800": 2}', "invalid_json", "?"),
        (b'{"model": "m", "temperature": 1e999}', "invalid_json", None),
        (b'{"model": "m", "logit_bias": {"5": -1e999}}', "invalid_json", None),
        (without("model"), "invalid_request", "model"),
        (chat(model=3), "invalid_request", "model"),
        (without("messages"), "invalid_request", "messages"),
        (chat(messages=[]), "invalid_request", "messages"),
        (chat(messages="hello"), "invalid_request", "messages"),
        (chat(messages=["hello"]), "invalid_request", "messages.0"),
        (chat(stream="yes"), "invalid_request", "stream"),
        (chat(stream=True, stream_options=[]), "invalid_request", "stream_options"),
        (chat(max_tokens="many"), "invalid_request", "max_tokens"),
        (chat(max_tokens=True), "invalid_request", "max_tokens"),
        (chat(max_tokens=-1), "invalid_request", "max_tokens"),
        (chat(n=0), "invalid_request", "n"),
        (chat(service_tier="first-class"), "invalid_request", "service_tier"),
        (chat(service_tier=[]), "invalid_request", "service_tier"),
        (chat(priority=-100), "invalid_request", "priority"),
        (chat(kv_transfer_params={"do_remote_prefill": True}), "invalid_request", "kv_transfer_params"),
        (chat(model=EMBEDDER), "invalid_request", "model"),
    ],
)
async def test_a_bad_body_is_a_400_that_names_the_field(
    gateway: Gateway, engine: FakeEngine, body: Any, code: str, param: str | None
) -> None:
    answer = await post(gateway, CHAT, body)
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (400, code, param), error
    assert error["type"] == "invalid_request_error"
    assert answer.headers["x-request-id"]
    assert not engine.log.ended


@pytest.mark.parametrize("prompt", [None, "", [], [1, "a"], [[1], []], [True], {"text": "a"}, 7])
async def test_a_bad_prompt_is_named(gateway: Gateway, prompt: Any) -> None:
    answer = await post(gateway, "/v1/completions", {"model": MODEL, "prompt": prompt, "max_tokens": 1})
    if prompt == "":  # an empty text is the engine's to judge
        assert answer.status == 200
    else:
        assert (answer.status, answer.json["error"]["param"]) == (400, "prompt")


@pytest.mark.parametrize("model", ["nothing", "GPT-4", "org/name", "m@9", "m+adapter", "m@", "ä"])
async def test_an_unknown_model_is_a_404_that_names_those_there_are(gateway: Gateway, model: str) -> None:
    answer = await post(gateway, CHAT, chat(model=model))
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert "+" in model or "m" in error["message"].rpartition("there are:")[2]
    assert metric(gateway, "workbench_requests_total", status="404", model="") == 1


async def test_too_long_a_context_is_the_engines_own_message(gateway: Gateway) -> None:
    answer = await post(gateway, CHAT, chat(max_tokens=100_000, stream=True))
    assert (answer.status, answer.json["error"]["code"]) == (400, "context_length_exceeded")
    assert "maximum context length" in answer.json["error"]["message"]


async def test_an_announced_body_over_the_limit_is_refused_unread(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(max_body_bytes=2048)
    exchange = Exchange(gateway, "POST", CHAT, [b"x" * 4096] * 3, [(b"content-length", b"50000000")]).start()
    await exchange.until_body()
    answer = await exchange.done()
    assert (answer.status, answer.json["error"]["code"]) == (413, "body_too_large")
    assert answer.headers["connection"] == "close"


async def test_a_body_that_grows_over_the_limit_is_not_kept(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(max_body_bytes=2048)
    exchange = Exchange(gateway, "POST", CHAT, [b"x" * 1024] * 1000).start()
    await exchange.until_body()
    assert exchange.num_received <= 4 or exchange.num_received == 1000  # the rest is only drained, after the answer
    assert (await exchange.done()).status == 413


async def test_a_body_of_the_limit_exactly_is_served(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    raw = orjson.dumps(chat())
    body = raw[:-1] + b" " * (2048 - len(raw)) + b"}"
    gateway = await make_gateway(a_pool("pool-a", {"r1": engine.url}), max_body_bytes=2048)
    assert (await post(gateway, CHAT, body)).status == 200
    assert (await post(gateway, CHAT, body + b" ")).status == 413


async def test_without_a_table_nothing_is_served_and_health_says_so(make_gateway: MakeGateway, tmp_path: Any) -> None:
    gateway = await make_gateway(routing_table_path=tmp_path / "none.json")
    health = await get(gateway, "/health")
    assert (health.status, health.headers["retry-after"]) == (503, "1")
    answer = await post(gateway, CHAT, chat())
    assert (answer.status, answer.headers["retry-after"]) == (503, "1")


async def test_no_ready_replica_is_a_503_with_retry_after(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    pool = a_pool("pool-a", {})
    replicas = (Replica("r1", engine.url, ReplicaState.DRAINING), Replica("r2", engine.url, ReplicaState.RESERVED))
    gateway = await make_gateway(replace(pool, replicas=replicas))
    answer = await post(gateway, CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_replica")
    assert int(answer.headers["retry-after"]) >= 1
    assert "1 draining, 1 reserved" in answer.json["error"]["message"]


async def test_a_replica_that_does_not_answer_the_door_is_passed_over(
    make_gateway: MakeGateway, engine: FakeEngine
) -> None:
    gateway = await make_gateway(a_pool("pool-a", {"dead1": DEAD, "dead2": "http://127.0.0.1:1", "r1": engine.url}))
    answers = [await post(gateway, CHAT, chat()) for _ in range(8)]
    assert [answer.status for answer in answers] == [200] * 8
    assert metric(gateway, "workbench_dispatch_retries_total", cause="unreachable") > 0
    assert {replica.num_in_flight for replica in gateway.fleet.replicas} == {0}


async def test_no_reachable_replica_is_a_503(make_gateway: MakeGateway) -> None:
    gateway = await make_gateway(a_pool("pool-a", {f"r{i}": DEAD for i in range(5)}))
    answer = await post(gateway, CHAT, chat())
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_replica")
    assert "could be reached" in answer.json["error"]["message"]
    assert metric(gateway, "workbench_dispatch_retries_total") == 2
    assert {replica.num_in_flight for replica in gateway.fleet.replicas} == {0}


FULL = [
    pytest.param(False, ServerFaults(status=503), id="503"),
    pytest.param(True, ServerFaults(status=503), id="503-stream"),
    pytest.param(True, ServerFaults(error_after_tokens=0, error_code=503), id="200-with-error-event"),
    pytest.param(False, ServerFaults(status=429), id="429"),
]


@pytest.mark.parametrize(("stream", "full"), FULL)
async def test_a_full_queue_is_load_and_another_replica_may_have_room(
    make_engine: MakeEngine, make_gateway: MakeGateway, stream: bool, full: ServerFaults
) -> None:
    busy, free = await make_engine(), await make_engine()
    busy.faults = full
    gateway = await make_gateway(a_pool("pool-a", {"busy": busy.url, "free": free.url}))
    answers = [await post(gateway, CHAT, chat(stream=stream)) for _ in range(6)]
    assert [answer.status for answer in answers] == [200] * 6
    assert all(answer.text == log.text for answer, log in zip(answers, free.log.ended, strict=True))
    assert metric(gateway, "workbench_dispatch_retries_total", cause="busy") > 0


@pytest.mark.parametrize(("stream", "full"), FULL)
async def test_full_queues_everywhere_are_a_429_after_one_more_try(
    make_engine: MakeEngine, make_gateway: MakeGateway, stream: bool, full: ServerFaults
) -> None:
    engines = [await make_engine() for _ in range(4)]
    for engine in engines:
        engine.faults = full
    gateway = await make_gateway(a_pool("pool-a", {f"r{i}": engine.url for i, engine in enumerate(engines)}))
    answer = await post(gateway, CHAT, chat(stream=stream))
    assert (answer.status, answer.json["error"]["code"]) == (429, "overloaded")
    assert int(answer.headers["retry-after"]) >= 1
    assert sum(len(engine.log.ended) for engine in engines) == 2
    assert metric(gateway, "workbench_output_tokens_total") == 0


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("fault", [{"status": 500}, {"die_after_tokens": 0}, {"status": 404}, {"status": 401}])
async def test_a_failing_engine_is_a_502(gateway: Gateway, fault: dict[str, Any], stream: bool) -> None:
    answer = await post(gateway, CHAT, chat(stream=stream, fake=fault))
    if stream and "die_after_tokens" in fault and answer.status == 200:  # the role had been sent
        assert answer.payloads[-1] != b"[DONE]"
        return
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_error")


@pytest.mark.parametrize(
    ("code", "status", "says"),
    [
        (400, 400, "invalid_request"),
        (422, 422, "invalid_request"),
        (401, 502, "upstream_error"),
        (429, 429, "overloaded"),
        (500, 502, "upstream_error"),
        (503, 429, "overloaded"),
    ],
)
async def test_a_200_whose_first_event_is_an_error_becomes_its_real_status(
    gateway: Gateway, engine: FakeEngine, code: int, status: int, says: str
) -> None:
    answer = await post(gateway, CHAT, chat(stream=True, fake={"error_after_tokens": 0, "error_code": code}))
    assert (answer.status, answer.json["error"]["code"]) == (status, says)
    assert answer.headers["content-type"] == "application/json"
    assert [kind for _, _, kind in engine.log.ended[-1].writes][-2:] == ["error", "done"]  # [DONE] too, as vLLM does
    assert metric(gateway, "workbench_requests_total", status=str(status), code=says) == 1


async def test_an_engine_that_never_answers_is_given_up(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    gateway = await make_gateway(a_pool("pool-a", {"r1": engine.url}), upstream_timeout_s=0.05)
    answer = await post(gateway, CHAT, chat(fake={"hang": True}))
    assert (answer.status, answer.json["error"]["code"]) == (502, "upstream_timeout")
    await engine.wait_until(lambda e: e.log.ended[-1].finish_reason == "abort" if e.log.ended else False)


@pytest.mark.parametrize(
    "fault", [{"die_after_tokens": 3}, {"error_after_tokens": 3, "error_code": 500}, {"error_after_tokens": 3}]
)
@pytest.mark.parametrize("path", [CHAT, "/v1/completions"])
async def test_a_stream_that_breaks_ends_in_an_error_event_and_no_done(
    gateway: Gateway, engine: FakeEngine, fault: dict[str, Any], path: str
) -> None:
    body = chat(stream=True, fake=fault) | {"prompt": "one two three"}
    if path != CHAT:
        del body["messages"]
    answer = await post(gateway, path, body)
    assert answer.status == 200
    assert "error" in answer.chunks[-1]
    assert answer.payloads[-1] != b"[DONE]"
    assert set(answer.chunks[-1]["error"]) == {"message", "type", "param", "code"}
    assert len(answer.text.split()) == 3
    assert metric(gateway, "workbench_output_tokens_total") == engine.log.ended[-1].num_output_tokens == 3
    assert metric(gateway, "workbench_prompt_tokens_total") > 0
    assert metric(gateway, "workbench_inexact_usage_total") == 1
    assert metric(gateway, "workbench_requests_total", status="200", code="ok") == 0


async def test_late_and_odd_events_change_nothing(gateway: Gateway, engine: FakeEngine) -> None:
    fault = {"usage_late_ms": 20, "done_late_ms": 20, "role_at_once": True, "tokens_per_chunk": 4}
    answer = await post(gateway, CHAT, chat(stream=True, max_tokens=9, fake=fault))
    assert answer.text == engine.log.ended[-1].text
    assert metric(gateway, "workbench_output_tokens_total") == 9
    assert metric(gateway, "workbench_inexact_usage_total") == 0


async def test_routes_that_are_not_there_answer_in_the_same_shape(gateway: Gateway) -> None:
    missing = await get(gateway, "/v1/nothing")
    assert (missing.status, missing.json["error"]["code"]) == (404, "route_not_found")
    wrong = await get(gateway, CHAT)
    assert (wrong.status, wrong.json["error"]["code"]) == (405, "method_not_allowed")
    unknown = await get(gateway, "/v1/models/nothing")
    assert (unknown.status, unknown.json["error"]["code"]) == (404, "model_not_found")
    assert (wrong.headers["allow"], "allow" in missing.headers) == ("POST", False)
    assert (await post(gateway, "/reset_prefix_cache", {})).status == 404


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/chat/completions/", "/health/"])
async def test_a_slash_too_many_is_another_route(gateway: Gateway, path: str) -> None:
    for answer in (await get(gateway, path), await post(gateway, path, chat())):
        assert (answer.status, answer.json["error"]["code"]) == (404, "route_not_found")


@pytest.mark.parametrize("body", [chat(), chat(stream=True), chat(model="nothing")])
async def test_a_socket_that_closes_under_the_answer_is_no_mistake_of_ours(
    gateway: Gateway, caplog: pytest.LogCaptureFixture, body: dict[str, Any]
) -> None:
    exchange = Exchange(gateway, "POST", CHAT, orjson.dumps(body)).start()
    await exchange.until_sent()
    exchange.wire.close()
    await exchange.done()
    assert metric(gateway, "workbench_requests_total", code="client_gone", status="499") == 1
    assert metric(gateway, "workbench_clients_gone_total") == 1
    assert not [record for record in caplog.records if record.levelname == "ERROR"]


async def test_a_mistake_of_ours_is_a_500_without_details(gateway: Gateway, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise RuntimeError("secret detail")

    monkeypatch.setattr(gateway.fleet, "view", broken)
    answer = await post(gateway, CHAT, chat(), [(b"x-request-id", b"look-me-up")])
    assert (answer.status, answer.json["error"]["code"]) == (500, "internal_error")
    assert b"secret" not in answer.body
    assert "look-me-up" in answer.json["error"]["message"]


async def test_a_table_with_an_unknown_scorer_is_refused_and_the_old_one_kept(
    gateway: Gateway, engine: FakeEngine, caplog: pytest.LogCaptureFixture
) -> None:
    source = MemoryRoutingTable()
    await source.publish(a_table(epoch=2, policy=RoutingPolicy(weights={"astrology": 1.0})))
    cache = CachedRoutingTable([source], gateway.fleet.on_table)
    assert not await cache.refresh()
    assert "astrology" in caplog.text
    assert (await post(gateway, CHAT, chat())).status == 200
