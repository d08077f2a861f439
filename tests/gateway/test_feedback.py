"""What a gateway tells a running rollout: an observation a request, and ratings bound to who asked."""

from __future__ import annotations

import tempfile
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import redis.asyncio
from httpx import ASGITransport, AsyncClient

from serving.core.canary import Kind, Observation
from serving.core.split import Split
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.store.connection import connect
from serving.store.rollouts import Rollouts
from serving.store.server import StoreServer
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool
from tests.gateway.test_split import a_candidate, ask, split_table

SPLIT = Split("r1", "1", "2", 0.5)


@pytest.fixture
async def store() -> AsyncIterator[StoreServer]:
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        server = StoreServer(Path(name) / "store")
        await server.start()
        try:
            yield server
        finally:
            await server.stop()


@pytest.fixture
async def client(store: StoreServer) -> AsyncIterator[redis.asyncio.Redis]:
    client = connect(store.url)
    yield client
    await client.aclose()


async def observed(client: redis.asyncio.Redis, num: int) -> list[Observation]:
    """The rollout's observations once there are `num`."""
    rollouts = Rollouts(client)
    for _ in range(600):
        _, seen = await rollouts.observed("r1", "0")
        if len(seen) >= num:
            return seen
        await client.execute_command("BLPOP", "nothing", "0.05")
    raise AssertionError(f"{len(seen)} of {num} observations came")


async def rate(gateway: Gateway, **body: Any) -> tuple[int, dict[str, Any]]:
    async with AsyncClient(transport=ASGITransport(app=gateway), base_url="http://gateway") as http:
        answer = await http.post("/v1/feedback", content=orjson.dumps(body))
    return answer.status_code, answer.json()


@pytest.fixture
async def gateway(make_gateway: MakeGateway, make_engine: MakeEngine, store: StoreServer) -> Gateway:
    old, new = await make_engine(), await make_engine()
    table = split_table(SPLIT, a_pool("old", {"old-0": old.url}), a_candidate(new.url))
    return await make_gateway(table=table, redis_url=store.url)


async def test_each_request_of_a_split_is_observed_without_its_text(
    gateway: Gateway, client: redis.asyncio.Redis
) -> None:
    said = "my secret is plum"
    messages = [{"role": "user", "content": said}]
    answers = [await ask(gateway, "s1", messages=messages) for _ in range(2)]
    versions = {answer.headers["x-served-by"].split("; ")[1] for answer in answers}
    await ask(gateway, "s1", model="m@1")  # nobody drew it: it does not count
    other = await ask(gateway, "s2", stream=True)
    seen = await observed(client, 3)
    assert [one.kind for one in seen] == [Kind.REQUEST] * 3
    assert seen[0].version in versions and len(versions) == 1
    assert (seen[0].session, seen[0].prompt) == (seen[1].session, seen[1].prompt)
    assert seen[2].session != seen[0].session and other.status == 200
    assert all(one.num_output_tokens == 1 and one.latency_s is not None and not one.failed for one in seen)
    keys = await client.keys("*")
    raw = b"".join([repr(await client.xrange(key)).encode() for key in keys if b"observations" in key])
    assert b"plum" not in raw and b"s1" not in raw


async def test_an_answer_is_rated_once_by_who_asked_for_it(gateway: Gateway, client: redis.asyncio.Redis) -> None:
    answer = await ask(gateway, "s1")
    request_id = answer.headers["x-request-id"]
    assert (await rate(gateway, request_id="another", rating="up"))[0] == 404
    status, body = await rate(gateway, request_id=request_id, rating="down")
    assert (status, body["rating"]) == (200, "down")
    status, body = await rate(gateway, request_id=request_id, rating="up")
    assert (status, body["error"]["code"]) == (404, "request_not_found")
    thumb = (await observed(client, 2))[1]
    assert (thumb.kind, thumb.thumb, thumb.version) == (
        Kind.THUMB,
        False,
        answer.headers["x-served-by"].split("; ")[1],
    )
    await ask(gateway, "s3")
    observer_key = await Rollouts(client).take_rated("somebody-else", request_id)
    assert observer_key is None


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"rating": "up"}, "request_id"),
        ({"request_id": "a", "rating": 5}, "rating"),
        ({"request_id": "a", "rating": "up", "x": 1}, "x"),
    ],
)
async def test_a_wrong_rating_is_refused_in_openais_shape(gateway: Gateway, body: dict[str, Any], param: str) -> None:
    status, answer = await rate(gateway, **body)
    assert (status, answer["error"]["param"]) == (400, param)


async def test_ratings_need_the_store_and_requests_do_not(
    make_gateway: MakeGateway, engine: FakeEngine, store: StoreServer
) -> None:
    table = split_table(SPLIT, a_pool("old", {"old-0": engine.url}), a_candidate(engine.url))
    alone = await make_gateway(table=table)
    assert (await ask(alone, "s1")).status == 200
    assert (await rate(alone, request_id="a", rating="up"))[0] == 503
