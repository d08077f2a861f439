"""Two workers and a real store: a retry arrives on the other worker in every state that its first try can be in."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import pytest

from serving.core.errors import ErrorCode, KeyReused, NotReplayable, Overloaded, UpstreamError
from serving.gateway.http_errors import error_event
from serving.store.server import StoreServer
from tests.integration.processes import until
from tests.integration.replaying import EVENT_STREAM, JSON, QUICK, TENANT, Client, Two, begin, owned

REPLAYED = {b"idempotent-replayed": b"true", b"x-request-id": b"again"}


async def test_pending_a_retry_waits_for_the_whole_answer(two: Two) -> None:
    client, retry = Client(), Client()
    owner = await owned(two.first, b"k")
    joined = asyncio.create_task(begin(two.second, b"k", retry))
    await asyncio.sleep(0.1)
    assert not joined.done()
    owner.recorder(client).whole(200, JSON, b'{"text": "\xc3\xa4"}')
    assert await joined is None
    assert (retry.status, retry.body, retry.is_whole) == (200, client.body, True)
    assert retry.headers == {b"content-type": b"application/json", **REPLAYED}


async def test_streaming_a_retry_gets_it_from_its_start_and_then_live(two: Two) -> None:
    client, retry = Client(), Client()
    recorder = (await owned(two.first, b"k")).recorder(client)
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"data: 1\n\ndata: ")
    await asyncio.sleep(0.05)
    joined = asyncio.create_task(begin(two.second, b"k", retry))

    async def has_all() -> bool:
        return retry.body == client.body

    for piece in (b"2\n\n", b"data: \xe2\x82", b"\xac\n\n"):
        recorder.write(piece)
        await until(has_all, "the retry to catch up", timeout_s=2.0)
    assert not joined.done()
    recorder.end(b"data: [DONE]\n\n")
    assert await joined is None
    assert (retry.body, retry.is_complete, retry.is_whole) == (client.body, True, False)
    assert retry.headers == {**dict(EVENT_STREAM), **REPLAYED}


@pytest.mark.parametrize("stream", [True, False])
async def test_finished_it_is_replayed_byte_for_byte(two: Two, stream: bool) -> None:
    rng = random.Random(1)
    client = Client()
    recorder = (await owned(two.first, b"k")).recorder(client)
    if stream:
        recorder.start(200, EVENT_STREAM)
        for _ in range(40):
            recorder.write(rng.randbytes(rng.randrange(3000)))
            await asyncio.sleep(rng.choice((0, 0, 0.01)))
        recorder.end()
    else:
        recorder.whole(200, JSON, rng.randbytes(300_000))
    for replays in (two.second, two.first, two.second):
        retry = Client()
        assert await begin(replays, b"k", retry) is None
        assert (retry.body, retry.status, retry.is_whole) == (client.body, 200, not stream)


async def test_another_body_under_the_key_is_refused_in_every_state(two: Two) -> None:
    owner = await owned(two.first, b"k")
    for _ in range(2):
        with pytest.raises(KeyReused) as refused:
            await begin(two.second, b"k", Client(), body=b"other")
        assert (refused.value.status, refused.value.code) == (422, ErrorCode.IDEMPOTENCY_KEY_REUSED)
        owner.recorder(Client()).whole(200, JSON, b"answer")
        await asyncio.sleep(0.05)
    assert await owned(two.second, b"k", tenant=replace(TENANT, tenant_id="u"), body=b"other"), "keys are a tenant's"


async def test_an_error_frees_the_key_and_the_waiting_retry_runs_it(two: Two) -> None:
    owner = await owned(two.first, b"k")
    joined = asyncio.create_task(begin(two.second, b"k", Client()))
    await asyncio.sleep(0.05)
    client = Client()
    owner.recorder(client).fail(Overloaded("full"), [])
    assert client.status == 429
    second = await joined
    assert second is not None
    second.close()
    assert await owned(two.first, b"k")


async def test_a_run_that_is_cut_off_frees_the_key(two: Two) -> None:
    owner = await owned(two.first, b"k")
    recorder = owner.recorder(Client())
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)
    follower = Client()
    joined = asyncio.create_task(begin(two.second, b"k", follower))
    await asyncio.sleep(0.05)
    owner.close()
    owner.close()
    with pytest.raises(UpstreamError, match="again with the same key"):  # its text can't be gone on with by another run
        await joined
    assert follower.body == b"data: 1\n\n"
    assert await owned(two.second, b"k")
    assert await two.quota() == 0


async def test_a_stream_that_broke_is_kept_as_it_went(two: Two) -> None:
    client, retry = Client(), Client()
    owner = await owned(two.first, b"k")
    recorder = owner.recorder(client)
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"data: 1\n\n")
    recorder.end(error_event(UpstreamError("the engine died")))
    owner.close()
    assert await begin(two.second, b"k", retry) is None
    assert (retry.body, retry.status) == (client.body, 200)


async def test_the_owners_client_leaves_or_stalls_and_the_retry_has_it_all(two: Two) -> None:
    client, retry = Client(), Client()
    recorder = (await owned(two.first, b"k")).recorder(client)
    pauses: list[bool] = []
    recorder.on_pause = pauses.append
    recorder.start(200, EVENT_STREAM)
    client.pause(True)
    recorder.write(b"x" * 1000)
    assert pauses == []
    recorder.write(b"x" * QUICK.max_unread_bytes)
    assert pauses == [True]
    recorder.detach()
    assert pauses == [True, False]
    recorder.end()
    assert await begin(two.second, b"k", retry) is None
    assert retry.body == client.body


async def test_a_follower_that_does_not_read_is_sent_no_more(two: Two) -> None:
    retry = Client()
    recorder = (await owned(two.first, b"k")).recorder(Client())
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"1")
    joined = asyncio.create_task(begin(two.second, b"k", retry))

    async def begun() -> bool:
        return retry.body == b"1"

    await until(begun, "the retry to begin", timeout_s=2.0)
    retry.pause(True)
    await asyncio.sleep(0.05)
    recorder.write(b"2")
    recorder.end()
    await asyncio.sleep(0.1)
    assert retry.body == b"1"
    retry.pause(False)
    assert await joined is None
    assert retry.body == b"12"


@pytest.mark.parametrize("bound", ["max_answer_bytes", "max_tenant_bytes"])
async def test_over_the_cap_it_is_never_run_twice(server: StoreServer, bound: str) -> None:
    two = Two(server, replace(QUICK, **{bound: 50_000}))
    rng = random.Random(1)
    client, follower = Client(), Client()
    recorder = (await owned(two.first, b"k")).recorder(client)
    recorder.start(200, EVENT_STREAM)
    recorder.write(rng.randbytes(30_000))
    joined = asyncio.create_task(begin(two.second, b"k", follower))
    await asyncio.sleep(0.1)
    recorder.write(rng.randbytes(30_000))
    with pytest.raises(NotReplayable):
        await joined
    assert follower.body == client.body[:30_000]
    for _ in range(2):
        for replays in two.workers:
            with pytest.raises(NotReplayable):
                await begin(replays, b"k", Client())
        if not client.is_complete:
            recorder.end(b"the end")
    assert len(client.body) == 60_007
    assert await two.quota() == 0
    await two.close()


async def test_a_tenant_that_stores_no_content_is_protected_all_the_same(two: Two) -> None:
    tenant = replace(TENANT, stores_content=False)
    client = Client()
    owner = await owned(two.first, b"k", tenant=tenant)
    assert not owner.keeps
    for _ in range(2):
        with pytest.raises(NotReplayable) as refused:
            await begin(two.second, b"k", Client(), tenant=tenant)
        assert (refused.value.status, refused.value.code) == (409, ErrorCode.NOT_REPLAYABLE)
        if not client.is_complete:
            owner.recorder(client).whole(200, JSON, b"planted answer")
        await asyncio.sleep(0.05)
    assert b":parts:" not in await two.stored()
    (await owned(two.first, b"failed", tenant=tenant)).close()
    await asyncio.sleep(0.05)
    assert await owned(two.second, b"failed", tenant=tenant)


async def test_nothing_in_the_store_can_be_read(two: Two) -> None:
    owner = await owned(two.first, b"planted-key", body=b"planted body")
    owner.recorder(Client()).whole(200, JSON, b"planted answer")
    await asyncio.sleep(0.05)
    stored = await two.stored()
    assert b":parts:" in stored
    assert b"planted" not in stored
