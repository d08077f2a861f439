"""The door of two gateway workers on one real store: limits, idempotent retries, prices, and the store's absence."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serving.core.tenancy import ApiKey, AuthMode, Limits, Tenant, TenantDirectory
from serving.engine.client import EngineClient
from serving.engine.fake import FakeEngine, FakeSettings
from serving.gateway.app import Gateway
from serving.metering.events import UsageEvent, Waste
from serving.metering.segments import read_events
from serving.settings import GatewaySettings
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.routing_table import FileRoutingTable
from serving.store.server import StoreServer
from serving.store.tenants import FileTenantDirectory
from tests.gateway.fleets import a_pool, a_row, a_table
from tests.gateway.wire import CHAT, Answer, begin_post, chat, post

USD_PER_TOKEN = 1e-6
ROW = a_row(
    usd_per_million_input_tokens=USD_PER_TOKEN * 1e6,
    usd_per_million_output_tokens=USD_PER_TOKEN * 1e6,
    usd_per_million_cached_input_tokens=None,
    tpot_p50_s=2.0,
)


@dataclass
class Door:
    """Two workers, the engine behind them, and a key for each tenant."""

    first: Gateway
    second: Gateway
    engine: FakeEngine
    server: StoreServer
    headers: dict[str, bytes]
    folder: Path

    async def ask(self, worker: Gateway, tenant: str, *more: tuple[bytes, bytes], **fields: Any) -> Answer:
        return await post(worker, CHAT, chat(**fields), [(b"authorization", self.headers[tenant]), *more])

    def events(self) -> list[UsageEvent]:
        return list(read_events(self.folder / "usage"))


TENANTS = (
    Tenant("free", models=("*",)),
    Tenant("tokens", models=("*",), limits=Limits(tokens_per_minute=400)),
    Tenant("requests", models=("*",), limits=Limits(requests_per_minute=3)),
    Tenant("streams", models=("*",), limits=Limits(max_streams=1)),
    Tenant("capped", models=("*",), limits=Limits(usd_per_request=50 * USD_PER_TOKEN)),
    Tenant("hourly", models=("*",), limits=Limits(usd_per_hour=30 * USD_PER_TOKEN)),
)


@pytest_asyncio.fixture
async def door(tmp_path: Path) -> AsyncIterator[Door]:
    async with AsyncExitStack() as stack:
        # A socket's path holds 107 bytes: pytest's own folders can be longer.
        server = StoreServer(Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="wb-"))))
        await server.start()
        stack.push_async_callback(server.stop)
        engine = await stack.enter_async_context(
            FakeEngine(FakeSettings(model="m", ttft_ms=1.0, itl_ms=1.0, max_model_len=2048))
        )
        table = tmp_path / "table.json"
        await FileRoutingTable(table).publish(a_table(a_pool("p", {"r": engine.url}), cost_rows=(ROW,)))
        keys, headers = [], {}
        for tenant in TENANTS:
            key_id = new_key_id()
            key = new_key(key_id)
            keys.append(ApiKey(key_id, tenant.tenant_id, key_sha256(key), 0.0))
            headers[tenant.tenant_id] = f"Bearer {key}".encode()
        tenants = tmp_path / "tenants.json"
        await FileTenantDirectory(tenants).publish(TenantDirectory(1, 0.0, TENANTS, tuple(keys)))
        settings = GatewaySettings(
            redis_url=server.url,
            routing_table_path=table,
            tenants_path=tenants,
            auth=AuthMode.REQUIRED,
            usage_dir=tmp_path / "usage",
            cache_salt_secret="salt",
            replay_secret="replays",
            num_workers=2,
        )
        first, second = Gateway(settings, seed=1), Gateway(settings, seed=2)
        for gateway in (first, second):
            await stack.enter_async_context(gateway.running())
        yield Door(first, second, engine, server, headers, tmp_path)


async def test_tokens_are_reserved_and_then_set_right(door: Door) -> None:
    answers = await asyncio.gather(
        *(door.ask(worker, "tokens", max_tokens=146) for worker in (door.first, door.second) * 2)
    )
    passed = [answer for answer in answers if answer.status == 200]
    assert 1 <= len(passed) <= 2
    for refused in (answer for answer in answers if answer.status != 200):
        assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(refused.headers["retry-after"]) >= 1
        assert refused.headers["x-ratelimit-limit-tokens"] == "400"
    too_large = await door.ask(door.first, "tokens", max_tokens=500)
    assert (too_large.status, too_large.json["error"]["code"]) == (400, "exceeds_limit")


async def test_what_was_not_used_is_free_again(door: Door) -> None:
    body = {"max_tokens": 300, "fake": {"die_after_tokens": 2}}
    assert (await door.ask(door.first, "tokens", **body)).status == 502  # reserved 304 of 400, and came to a few
    await asyncio.sleep(0.1)
    answer = await door.ask(door.second, "tokens", max_tokens=300)
    assert answer.status == 200
    assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 100


async def test_a_unary_client_that_leaves_is_settled_for_the_time_that_it_took(door: Door) -> None:
    body = chat(max_tokens=380, fake={"hang_after_tokens": 2})
    leaving = begin_post(door.first, CHAT, body, [(b"authorization", door.headers["tokens"])])
    await door.engine.wait_until(lambda e: bool(e.log.active))
    leaving.leave()
    await leaving.done()
    for _ in range(100):  # reserved 388 of 400, and a token is measured to take two seconds
        answer = await door.ask(door.second, "tokens", max_tokens=300)
        if answer.status == 200:
            break
        await asyncio.sleep(0.02)
    assert answer.status == 200, answer.json
    (event,) = [event for event in door.events() if event.waste is not None]
    assert (event.waste, event.num_output_tokens, event.exact) == (Waste.ABANDONED, 0, False)


async def test_requests_alternating_over_two_gateways(door: Door) -> None:
    statuses = [(await door.ask(worker, "requests")).status for worker in (door.first, door.second) * 2]
    assert statuses == [200, 200, 200, 429]
    assert [event.status for event in door.events()].count(429) == 1


async def test_a_running_stream_counts_until_it_ends(door: Door) -> None:
    running = begin_post(
        door.first,
        CHAT,
        chat(stream=True, fake={"hang_after_tokens": 1}),
        [(b"authorization", door.headers["streams"])],
    )
    await running.until_body()
    refused = await door.ask(door.second, "streams", stream=True)
    assert (refused.status, refused.json["error"]["code"]) == (429, "rate_limit_exceeded")
    running.leave()
    await running.done()
    for _ in range(100):
        answer = await door.ask(door.second, "streams", stream=True)
        if answer.status == 200:
            break
        await asyncio.sleep(0.02)
    assert answer.status == 200


async def test_money_is_asked_for_before_any_gpu_time(door: Door) -> None:
    dear = await door.ask(door.first, "capped", max_tokens=500)
    assert (dear.status, dear.json["error"]["code"]) == (400, "cost_cap")
    assert not door.engine.log.ended
    assert (await door.ask(door.first, "capped", max_tokens=10)).status == 200
    assert door.events()[-1].usd == (3 + 10) * USD_PER_TOKEN
    ours = {"model": "m", "text": "one two three", "max_tokens": 10}
    told = await post(door.first, "/v1/generate", ours, [(b"authorization", door.headers["capped"])])
    assert told.json["usage"]["usd"] == door.events()[-1].usd == (3 + 10) * USD_PER_TOKEN
    statuses = [(await door.ask(worker, "hourly", max_tokens=9)) for worker in (door.first, door.second) * 2]
    assert [answer.status for answer in statuses][:2] == [200, 200]
    tripped = statuses[-1]
    assert (tripped.status, tripped.json["error"]["code"]) == (429, "cost_breaker_open")


async def test_a_retry_on_another_worker_joins_a_running_stream(door: Door) -> None:
    key = (b"idempotency-key", b"k1")
    asked = [(b"authorization", door.headers["free"]), key]
    body = chat(stream=True, max_tokens=40, fake={"itl_ms": 10.0})
    running = begin_post(door.first, CHAT, body, asked)
    await running.until_body()
    joined, first = await asyncio.gather(post(door.second, CHAT, body, asked), running.done())
    again = await post(door.second, CHAT, body, asked)
    assert joined.body == first.body == again.body
    assert joined.headers["idempotent-replayed"] == again.headers["idempotent-replayed"] == "true"
    assert len(door.engine.log.ended) == 1
    other = await post(door.second, CHAT, chat(max_tokens=2), asked)
    assert (other.status, other.json["error"]["code"]) == (422, "idempotency_key_reused")
    assert [(event.replayed, event.usd == 0.0) for event in door.events()].count((True, True)) == 2


async def test_a_run_with_a_key_goes_on_when_its_client_leaves(door: Door) -> None:
    asked = [(b"authorization", door.headers["free"]), (b"idempotency-key", b"k2")]
    body = chat(stream=True, max_tokens=30, fake={"itl_ms": 10.0})
    running = begin_post(door.first, CHAT, body, asked)
    await running.until_body()
    running.leave()
    retried = await post(door.second, CHAT, body, asked)
    await running.done()
    assert retried.payloads[-1] == b"[DONE]"
    assert [entry.finish_reason for entry in door.engine.log.ended] == ["length"]
    assert [event.waste for event in door.events() if not event.replayed] == [None]


async def test_a_replay_whose_client_leaves_is_one_event_of_nothing(door: Door) -> None:
    asked = [(b"authorization", door.headers["free"]), (b"idempotency-key", b"k4")]
    body = chat(stream=True, max_tokens=30, fake={"itl_ms": 10.0})
    running = begin_post(door.first, CHAT, body, asked)
    await running.until_body()
    joined = begin_post(door.second, CHAT, body, asked)
    await joined.until_body()
    joined.leave()
    await asyncio.gather(running.done(), joined.done())
    ran, left = sorted(door.events(), key=lambda event: event.replayed)
    assert (ran.replayed, ran.num_output_tokens, ran.waste) == (False, 30, None)
    assert (left.replayed, left.num_tokens, left.usd, left.waste) == (True, 0, 0.0, None)


async def test_a_refused_request_frees_its_key(door: Door) -> None:
    for _ in range(3):
        await door.ask(door.first, "requests")
    for worker in (door.first, door.second):
        refused = await door.ask(worker, "requests", (b"idempotency-key", b"k3"))
        assert refused.status == 429
        assert "idempotent-replayed" not in refused.headers


async def test_without_the_store_requests_run_and_keys_do_not(door: Door) -> None:
    await door.server.stop()
    assert (await door.ask(door.first, "free")).status == 200
    statuses = [(await door.ask(door.first, "requests")).status for _ in range(4)]
    assert statuses[0] == 200
    assert statuses[-1] == 429  # at most the whole limit, counted by the worker itself
    keyed = await door.ask(door.first, "free", (b"idempotency-key", b"k4"))
    assert (keyed.status, keyed.json["error"]["code"]) == (503, "store_unavailable")
    await door.server.start()
    for _ in range(100):
        answer = await door.ask(door.second, "free", (b"idempotency-key", b"k4"))
        if answer.status == 200:
            break
        await asyncio.sleep(0.1)
    assert answer.status == 200


async def test_an_outage_of_the_store_bills_nothing_twice_and_loses_nothing(door: Door) -> None:
    """Requests that begin before, during and after it, with limits and keys, on both workers."""
    workers, num_asked = (door.first, door.second), 0

    async def ask_all(**fields: Any) -> list[Answer]:
        nonlocal num_asked
        asked = [("free", ()), ("tokens", ()), ("free", ((b"idempotency-key", b"outage-%d" % num_asked),))]
        num_asked += len(workers) * len(asked)
        return await asyncio.gather(
            *(door.ask(worker, tenant, *more, **fields) for worker in workers for tenant, more in asked)
        )

    across = asyncio.create_task(ask_all(stream=True, max_tokens=20, fake={"pause_after_tokens": 3}))
    await door.engine.wait_until(lambda e: sum(r.num_output_tokens == 3 for r in e.log.active.values()) == 5)
    await door.server.stop()
    during = await ask_all(max_tokens=4)
    assert sorted(answer.status for answer in during) == [200, 200, 200, 200, 503, 503]
    await door.server.start()
    async with EngineClient(door.engine.url) as engine:
        await (await engine.request("POST", "/fake/resume")).read()
    assert {answer.status for answer in await across} == {200}
    for _ in range(100):
        after = await ask_all(max_tokens=5)
        if {answer.status for answer in after} == {200}:
            break
        await asyncio.sleep(0.1)
    events = door.events()
    assert len({event.id for event in events}) == len(events) == num_asked
    ran = [event for event in events if event.num_tokens]
    truth = [request for request in door.engine.log.ended if request.status == 200]
    assert len(ran) == len(truth)
    assert sum(event.num_output_tokens for event in ran) == sum(request.num_output_tokens for request in truth)
    assert sum(event.num_prompt_tokens for event in ran) == sum(request.num_prompt_tokens for request in truth)
    assert sum(event.usd or 0 for event in events) == pytest.approx(USD_PER_TOKEN * sum(e.num_tokens for e in events))


async def test_a_client_that_leaves_is_billed_for_what_it_had(door: Door) -> None:
    leaving = begin_post(
        door.first, CHAT, chat(stream=True, fake={"hang_after_tokens": 1}), [(b"authorization", door.headers["free"])]
    )
    await leaving.until_body(300)
    leaving.leave()
    await leaving.done()
    event = door.events()[-1]
    assert (event.waste, event.num_output_tokens) == (Waste.ABANDONED, 1)
    assert event.usd is not None and event.usd > 0
    assert replace(event, id="") != event


async def test_a_keyed_stream_that_no_engine_began_frees_its_key(door: Door) -> None:
    asked = [(b"authorization", door.headers["free"]), (b"idempotency-key", b"k5"), (b"x-request-timeout-ms", b"100")]
    body = chat(stream=True, fake={"ttft_ms": 5_000.0})
    for _ in range(2):
        answer = await post(door.first, CHAT, body, asked)
        assert (answer.status, answer.json["error"]["code"]) == (504, "deadline_exceeded")


async def test_a_keyed_stream_that_its_deadline_cut_off_is_replayed_as_it_went(door: Door) -> None:
    asked = [(b"authorization", door.headers["free"]), (b"idempotency-key", b"k6"), (b"x-request-timeout-ms", b"300")]
    body = chat(stream=True, fake={"hang_after_tokens": 1})
    first = await post(door.first, CHAT, body, asked)
    assert first.chunks[-1]["error"]["code"] == "deadline_exceeded"
    again = await post(door.second, CHAT, body, asked)
    assert (again.body, again.headers["idempotent-replayed"]) == (first.body, "true")
    assert len(door.engine.log.ended) == 1
