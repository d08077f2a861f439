"""A client that leaves stops the engine's work, at whatever moment it leaves."""

from __future__ import annotations

import pytest

from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from tests.gateway.wire import CHAT, Exchange, begin_post, chat, metric, post


async def aborted(engine: FakeEngine) -> None:
    await engine.wait_until(lambda e: bool(e.log.ended) and e.log.ended[-1].finish_reason == "abort")


@pytest.mark.parametrize(("stream", "phase"), [(True, "before_first_chunk"), (False, "unary")])
async def test_before_the_first_byte(gateway: Gateway, engine: FakeEngine, stream: bool, phase: str) -> None:
    exchange = begin_post(gateway, CHAT, chat(stream=stream, fake={"ttft_ms": 60_000}))
    await engine.wait_until(lambda e: bool(e.log.active))
    exchange.leave()
    await exchange.done()
    await aborted(engine)
    assert not exchange.answered
    assert metric(gateway, "workbench_clients_gone_total", phase=phase) == 1
    assert metric(gateway, "workbench_prompt_tokens_total") > 0
    assert metric(gateway, "workbench_requests_total", status="499", code="client_gone") == 1
    assert [replica.num_in_flight for replica in gateway.fleet.replicas] == [0]


async def test_in_the_middle_of_a_stream(gateway: Gateway, engine: FakeEngine) -> None:
    exchange = begin_post(gateway, CHAT, chat(stream=True, max_tokens=1000, fake={"hang_after_tokens": 7}))
    await engine.wait_until(lambda e: any(log.num_output_tokens == 7 for log in e.log.active.values()))
    await exchange.until_body()
    exchange.leave()
    answer = await exchange.done()
    await aborted(engine)
    assert b"[DONE]" not in answer.body
    assert metric(gateway, "workbench_clients_gone_total", phase="mid_stream") == 1
    assert 1 <= metric(gateway, "workbench_output_tokens_total") <= 7
    assert [replica.num_in_flight for replica in gateway.fleet.replicas] == [0]


async def test_while_the_engine_does_not_even_answer(gateway: Gateway, engine: FakeEngine) -> None:
    exchange = begin_post(gateway, CHAT, chat(stream=True, fake={"hang": True}))
    await engine.wait_until(lambda e: bool(e.log.active))
    exchange.leave()
    await exchange.done()
    await aborted(engine)


async def test_while_it_sends_its_body(gateway: Gateway, engine: FakeEngine) -> None:
    exchange = Exchange(gateway, "POST", CHAT, []).start()
    exchange.leave()
    await exchange.done()
    assert metric(gateway, "workbench_clients_gone_total", phase="sending") == 1
    assert not engine.log.ended


async def test_a_complete_answer_is_no_departure(gateway: Gateway) -> None:
    for stream in (False, True):
        await post(gateway, CHAT, chat(stream=stream))
    assert metric(gateway, "workbench_clients_gone_total") == 0


async def test_a_worker_that_is_stopped_stops_the_engine(gateway: Gateway, engine: FakeEngine) -> None:
    exchange = begin_post(gateway, CHAT, chat(stream=True, fake={"ttft_ms": 60_000}))
    await engine.wait_until(lambda e: bool(e.log.active))
    exchange.stop()
    await aborted(engine)
    assert [replica.num_in_flight for replica in gateway.fleet.replicas] == [0]
