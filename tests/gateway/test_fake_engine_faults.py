"""Every fault of the fake engine, seen by a client and by its own log."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import orjson
import pytest

from serving.engine.client import ConnectionLost, EngineClient, UnexpectedStatus
from serving.engine.fake import FakeEngine, FakeSettings, ServerFaults, WriteKind
from tests.gateway.talk import CHAT, COMPLETIONS, FAST, HELLO, USAGE, kinds, start, stream


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeSettings(**FAST)) as engine:
        yield engine


@pytest.fixture
async def client(engine: FakeEngine) -> AsyncIterator[EngineClient]:
    async with EngineClient(engine.url) as client:
        yield client


@pytest.mark.parametrize(("status", "retry_after_s"), [(503, None), (429, 2), (500, None)])
async def test_an_error_status(client: EngineClient, status: int, retry_after_s: int | None) -> None:
    fault = {"status": status, "retry_after_s": retry_after_s}
    response = await start(client, CHAT, {**HELLO, **USAGE, "fake": fault})
    assert response.status == status
    assert orjson.loads(await response.read())["error"]["code"] == status
    assert response.headers.get(b"retry-after") == (b"2" if retry_after_s else None)


@pytest.mark.parametrize("num_tokens", [0, 2])
async def test_an_error_event_under_status_200(engine: FakeEngine, client: EngineClient, num_tokens: int) -> None:
    out = await stream(client, CHAT, {**HELLO, "fake": {"error_after_tokens": num_tokens}})
    assert (out[-2]["error"]["code"], out[-1]) == (503, "[DONE]")
    assert len(out) == 2 + (num_tokens + 1 if num_tokens else 0)
    assert engine.log.ended[0].finish_reason == "error"
    assert engine.scheduler.num_running == 0


async def test_no_token_under_status_200(engine: FakeEngine, client: EngineClient) -> None:
    _, last, usage, _ = await stream(client, CHAT, {**HELLO, "max_tokens": 5, "fake": {"no_token": True}})
    assert (last["choices"][0]["delta"]["content"], last["choices"][0]["finish_reason"]) == ("", "length")
    assert usage["usage"]["completion_tokens"] == engine.log.ended[0].num_output_tokens == 0


@pytest.mark.parametrize("num_tokens", [0, 3])
async def test_death_in_mid_stream(engine: FakeEngine, client: EngineClient, num_tokens: int) -> None:
    response = await start(client, CHAT, {**HELLO, **USAGE, "fake": {"die_after_tokens": num_tokens}})
    with pytest.raises(ConnectionLost) as caught:
        await response.read()
    assert caught.value.received_any
    assert engine.log.ended[0].finish_reason == "died"
    assert engine.log.ended[0].num_output_tokens == num_tokens
    assert engine.scheduler.num_running == 0


async def test_a_unary_answer_may_die_or_fail_too(client: EngineClient) -> None:
    for path, body in ((COMPLETIONS, {"prompt": "a"}), ("/v1/embeddings", {"input": "a"})):
        with pytest.raises(ConnectionLost):
            await client.post_json(path, {**body, "fake": {"die_after_tokens": 1}})
    with pytest.raises(UnexpectedStatus, match="500"):
        await client.post_json(COMPLETIONS, {"prompt": "a", "fake": {"error_after_tokens": 1, "error_code": 500}})


@pytest.mark.parametrize("fault", [{"hang": True}, {"hang_after_tokens": 2}])
async def test_a_hang_ends_when_the_client_gives_up(
    engine: FakeEngine, client: EngineClient, fault: dict[str, Any]
) -> None:
    body = orjson.dumps({**HELLO, **USAGE, "fake": fault})
    with pytest.raises(ConnectionLost, match="within"):
        await (await client.request("POST", CHAT, body=body, timeout_s=0.1)).read()
    await engine.wait_until(lambda engine: bool(engine.log.ended))
    assert engine.log.ended[0].finish_reason == "abort"
    assert engine.log.ended[0].num_output_tokens == fault.get("hang_after_tokens", 0)


async def test_a_pause_lasts_until_it_is_told_to_go_on(engine: FakeEngine, client: EngineClient) -> None:
    body = orjson.dumps({**HELLO, **USAGE, "max_tokens": 5, "fake": {"pause_after_tokens": 2}})
    response = await client.request("POST", CHAT, body=body, timeout_s=5.0)
    await engine.wait_until(lambda engine: any(r.num_output_tokens == 2 for r in engine.log.active.values()))
    assert await client.post_json("/fake/resume", {}) == {"num_resumed": 1}
    assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert (engine.log.ended[0].finish_reason, engine.log.ended[0].num_output_tokens) == ("length", 5)
    assert await client.post_json("/fake/resume", {}) == {"num_resumed": 0}


async def test_late_events_move_no_token(engine: FakeEngine, client: EngineClient) -> None:
    fault = {"role_late_ms": 5, "usage_late_ms": 30, "done_late_ms": 30}
    out = await stream(client, CHAT, {**HELLO, "max_tokens": 20, "fake": fault})
    (log,) = engine.log.ended
    assert kinds(log).index("role") > kinds(log).index("token")
    assert kinds(log)[-3:] == ["token", "usage", "done"]
    token, usage, done = (write.at_s for write in log.writes[-3:])
    assert usage - token > 0.028
    assert done - usage > 0.028
    assert len(out) == 23


async def test_the_role_may_come_long_before_the_first_token(engine: FakeEngine, client: EngineClient) -> None:
    await stream(client, CHAT, {**HELLO, "fake": {"role_at_once": True, "ttft_ms": 30}})
    (log,) = engine.log.ended
    assert kinds(log)[:3] == ["head", "role", "token"]
    assert log.writes[2].at_s - log.received_at_s > 0.028  # a busy machine sends the role later, not the token sooner


async def test_a_slow_head(engine: FakeEngine, client: EngineClient) -> None:
    response = await start(client, CHAT, {**HELLO, **USAGE, "fake": {"head_late_ms": 30}})
    assert response.head_at_s - response.sent_at_s > 0.028
    await response.read()


async def test_reasoning_deltas_are_tokens_too(engine: FakeEngine, client: EngineClient) -> None:
    body = {**HELLO, "max_tokens": 5, "fake": {"reasoning_tokens": 2}}
    deltas = [chunk["choices"][0]["delta"] for chunk in (await stream(client, CHAT, body))[1:6]]
    assert ["reasoning" in delta for delta in deltas] == [True, True, False, False, False]
    message = (await client.post_json(CHAT, body))["choices"][0]["message"]
    assert (len(message["reasoning"].split()), len(message["content"].split())) == (2, 3)


async def test_a_request_may_have_its_own_speed(engine: FakeEngine, client: EngineClient) -> None:
    fault = orjson.dumps({"tokens_per_chunk": 4, "itl_ms": 0.5, "ttft_ms": 1}).decode()
    await stream(client, COMPLETIONS, {"prompt": "a", "max_tokens": 10}, x_fake=fault)
    assert [write.num_tokens for write in engine.log.ended[0].token_writes] == [4, 4, 2]


async def test_faults_of_the_server(engine: FakeEngine, client: EngineClient) -> None:
    body = {"prompt": "a", "max_tokens": 1}
    await client.post_json("/fake/faults", {"status": 503, "num_requests": 2, "health_status": 503})
    with pytest.raises(UnexpectedStatus, match="/health answered 503"):
        await client.get_json("/health")
    for _ in range(2):
        with pytest.raises(UnexpectedStatus, match="503"):
            await client.post_json(COMPLETIONS, body)
    await client.post_json(COMPLETIONS, body)
    assert await client.get_json("/health") is None
    engine.faults = ServerFaults(status=429)
    with pytest.raises(UnexpectedStatus, match="429"):
        await client.post_json("/v1/embeddings", {"input": "a"})
    await (await client.request("DELETE", "/fake/faults")).read()
    await client.post_json(COMPLETIONS, body)
    with pytest.raises(UnexpectedStatus, match="nonsense"):
        await client.post_json("/fake/faults", {"nonsense": 1})


async def test_the_log_over_http(client: EngineClient) -> None:
    await client.post_json(COMPLETIONS, {"prompt": "a", "max_tokens": 2, "cache_salt": "s"})
    (entry,) = await client.get_json("/fake/log")
    assert (entry["num_output_tokens"], entry["cache_salt"], entry["status"]) == (2, "s", 200)
    assert entry["writes"][0]["kind"] == WriteKind.BODY
