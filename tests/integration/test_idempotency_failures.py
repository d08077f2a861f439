"""Idempotency keys when workers and the store die, and what is kept for how long."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serving.core.errors import ErrorCode, NotReplayable, Unavailable, UpstreamError
from serving.core.tenancy import Tenant
from serving.gateway.idempotency import Replays
from serving.gateway.recorder import Owner
from serving.store.connection import connect
from serving.store.idempotency import REPLAYS
from serving.store.replay_purge import purge_answers, shred_answers
from serving.store.server import StoreServer
from tests.integration.processes import until
from tests.integration.replaying import EVENT_STREAM, JSON, QUICK, TENANT, Client, Two, begin, owned

ROOT = Path(__file__).parents[2]


async def finished(two: Two, key: bytes, body: bytes = b"answer", **fields: Any) -> None:
    (await owned(two.first, key, **fields)).recorder(Client()).whole(200, JSON, body)
    await asyncio.sleep(0.05)


# ---- workers and stores that die


async def test_dead_workers_keys_are_taken_over_each_answered_once(two: Two) -> None:
    """kill -9 with 50 in flight: what was complete is replayed, all else is run once more, by one of all who ask."""
    num_keys, num_runs = 50, 0
    program = ("-m", "tests.integration.replaying", two.server.url, str(num_keys))
    dying = await asyncio.create_subprocess_exec(sys.executable, *program, cwd=ROOT, stdout=asyncio.subprocess.PIPE)
    assert dying.stdout is not None
    assert await asyncio.wait_for(dying.stdout.readline(), 10.0) == b"ready\n"

    async def ask(replays: Replays, number: int) -> bytes:
        nonlocal num_runs
        client = Client()
        while True:
            try:
                owner = await begin(replays, b"key-%d" % number, client)
            except UpstreamError:  # half a stream was sent; a client tries again with the same key
                client = Client()
                continue
            if owner is not None:
                num_runs += 1
                owner.recorder(client).whole(200, JSON, b"from the second: %d" % number)
            return client.body

    followers = [asyncio.create_task(ask(two.second, number)) for number in range(num_keys)]
    await asyncio.sleep(0.2)
    os.kill(dying.pid, signal.SIGKILL)
    assert await dying.wait() == -signal.SIGKILL
    retries = [asyncio.create_task(ask(two.first, number)) for number in range(num_keys)]
    answers = await asyncio.wait_for(asyncio.gather(*followers, *retries), 10.0)
    assert answers[:num_keys] == answers[num_keys:]
    done = [number for number in range(num_keys) if number % 3 == 0]
    assert [answers[number] for number in done] == [b"from the first worker: %d" % number for number in done]
    assert num_runs == num_keys - len(done)


async def test_a_stalled_owner_that_comes_back_changes_nothing(server: StoreServer) -> None:
    two = Two(server)
    two.second.start()  # the first never renews its lease
    client = Client()
    recorder = (await owned(two.first, b"k")).recorder(client)
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"stale 1")
    await asyncio.sleep(QUICK.lease_s * 2.5)
    recorder.write(b"stale 2")
    second = await _until_owned(two.second, b"k")
    recorder.end(b"stale 3")
    second.recorder(Client()).whole(200, JSON, b"fresh")
    await asyncio.sleep(0.1)
    retry = Client()
    assert await begin(two.second, b"k", retry) is None
    assert (retry.body, client.body) == (b"fresh", b"stale 1stale 2stale 3")
    await two.close()


async def test_a_worker_that_stops_gives_its_keys_back_at_once(server: StoreServer) -> None:
    two = Two(server, replace(QUICK, lease_s=30.0))
    for replays in two.workers:
        replays.start()
    recorder = (await owned(two.first, b"k")).recorder(Client())
    recorder.whole(200, JSON, b"the last answer")
    await two.first.close()
    retry = Client()
    assert await begin(two.second, b"k", retry) is None
    assert retry.body == b"the last answer"
    await two.close()


async def test_store_away_nothing_is_run_and_it_recovers_by_itself(two: Two) -> None:
    client, retry = Client(), Client()
    recorder = (await owned(two.first, b"running")).recorder(client)
    recorder.start(200, EVENT_STREAM)
    recorder.write(b"1")
    await finished(two, b"finished")
    assert two.server.pid is not None
    await asyncio.sleep(0.05)
    os.kill(two.server.pid, signal.SIGKILL)
    await two.server.stop()
    for key in (b"running", b"finished", b"new"):
        with pytest.raises(Unavailable) as refused:
            await begin(two.second, key, Client())
        assert (refused.value.code, refused.value.retry_after_s) == (ErrorCode.STORE_UNAVAILABLE, 1.0)
    recorder.write(b"2")
    await asyncio.sleep(QUICK.lease_s * 1.5)  # the lease runs out, and nobody could have renewed it
    await two.server.start()

    async def answers() -> bool:
        try:
            return await begin(two.second, b"finished", Client()) is None
        except Unavailable:
            return False

    await until(answers, "the store to be found again", timeout_s=5.0)
    joined = asyncio.create_task(begin(two.second, b"running", retry))
    recorder.write(b"3")
    await asyncio.sleep(0.1)
    recorder.end(b"4")
    assert await joined is None
    assert (retry.body, client.body) == (b"1234", b"1234")


async def test_a_claim_without_an_answer_is_given_back(two: Two) -> None:
    """The client leaves while its key is claimed: nobody runs it, so the next one must."""
    for number in range(30):
        claim = asyncio.create_task(two.first.claim(TENANT, b"key-%d" % number, b"", "/"))
        for _ in range(number % 6):
            await asyncio.sleep(0)
        claim.cancel()
        (outcome,) = await asyncio.gather(claim, return_exceptions=True)
        if not isinstance(outcome, asyncio.CancelledError):
            outcome.close()
    await asyncio.sleep(0.05)
    for number in range(30):
        assert await two.second.claim(TENANT, b"key-%d" % number, b"", "/")


# ---- what is kept, and for how long


async def test_the_tenants_quota_counts_what_is_there(two: Two) -> None:
    await finished(two, b"a", os.urandom(10_000))
    await finished(two, b"b", os.urandom(20_000))
    assert 30_000 < await two.quota() < 31_000
    await finished(two, b"c", os.urandom(5_000), tenant=replace(TENANT, tenant_id="u"))
    assert await two.quota() < 31_000


async def test_purged_answers_are_gone_and_their_keys_protect(two: Two) -> None:
    other = replace(TENANT, tenant_id="t2")
    await finished(two, b"k")
    await finished(two, b"k", tenant=other)
    client = connect(two.server.url)
    assert await purge_answers(client, "t", older_than_s=3600.0) == 0
    assert await purge_answers(client, "t") == 1
    assert await purge_answers(client, "t") == 0
    assert await two.quota() == 0
    with pytest.raises(NotReplayable):
        await begin(two.second, b"k", Client())
    assert await begin(two.second, b"k", Client(), tenant=other) is None
    assert await purge_answers(client) == 1
    await client.aclose()


async def test_a_shredded_tenant_goes_on_with_a_new_salt(two: Two) -> None:
    await finished(two, b"k")
    running = (await owned(two.first, b"running")).recorder(Client())
    running.start(200, EVENT_STREAM)
    client = connect(two.server.url)
    salt = await client.get(f"{REPLAYS}t:salt")
    assert await shred_answers(client, "t") == 2
    running.end(b"what was running is not kept either")
    for key in (b"k", b"running"):
        with pytest.raises(NotReplayable):
            await begin(two.second, key, Client())
    await finished(two, b"new", b"kept")
    retry = Client()
    assert await begin(two.second, b"new", retry) is None
    assert retry.body == b"kept"
    assert await client.get(f"{REPLAYS}t:salt") not in (salt, None)
    await client.aclose()


async def test_content_is_kept_as_long_as_the_tenant_says(two: Two) -> None:
    tenant = Tenant("t", models=("*",), retention_days={"replays": 0.3 / 86_400})
    await finished(two, b"k", tenant=tenant)
    assert await begin(two.second, b"k", Client(), tenant=tenant) is None
    await asyncio.sleep(0.4)
    with pytest.raises(NotReplayable):
        await begin(two.second, b"k", Client(), tenant=tenant)
    assert b":parts:" not in await two.stored()


async def _until_owned(replays: Replays, key: bytes) -> Owner:
    while True:
        try:
            owner = await begin(replays, key, Client())
        except UpstreamError:
            continue
        assert isinstance(owner, Owner)
        return owner
