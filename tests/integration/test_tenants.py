"""The tenant directory on a real store: published, taken up by every worker, revoked, and with the store gone."""

from __future__ import annotations

import asyncio
import logging
import os
import random
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import orjson
import pytest
import pytest_asyncio
import redis.asyncio

from serving.clock import SystemClock
from serving.control.tenants import TenantKeeper
from serving.control.troubles import Troubles
from serving.core.errors import Unauthorized, Unavailable
from serving.core.tenancy import AuthMode, Issuer, Tenant, TenantDirectory
from serving.core.tenant_edits import put_key, revoke_key
from serving.gateway.identity import Identity
from serving.settings import GatewaySettings
from serving.store.routing_table import FileRoutingTable
from serving.store.server import StoreServer
from serving.store.tenants import FileTenantDirectory, StoreTenantDirectory
from tests.gateway.fleets import MODEL, a_pool, a_table
from tests.integration.processes import Process, fake_engine, fetch, free_port, gateway_worker, text, until
from tests.issuers import AUDIENCE, NAME, Signer, jwks
from tests.unit.fetches import Issuing
from workbench.tenants import make_key

KEY, KEPT = make_key("acme", label="ci")
OTHER_KEY, OTHER_KEPT = make_key("lab")
TENANTS = (Tenant("acme", models=(MODEL,)), Tenant("lab"))
DIRECTORY = TenantDirectory(1, 0.0, TENANTS, (KEPT, OTHER_KEPT))
URL = "https://login.example.com/jwks.json"


class Place:
    """A store, a file beside it, and a control plane's keeper of both."""

    def __init__(self, folder: Path, server: StoreServer, client: redis.asyncio.Redis) -> None:
        self.server = server
        self.file = FileTenantDirectory(folder / "tenants.json")
        self.store = StoreTenantDirectory(client)
        self.issuing = Issuing()
        troubles = Troubles(logging.getLogger("control"))
        clock, rng = SystemClock(), random.Random(1)
        self.keeper = TenantKeeper(client, self.file.path, clock, rng, troubles, fetch=self.issuing.fetch)

    async def settled(self) -> None:
        """Two rounds make both equal, a third confirms it."""
        for _ in range(3):
            await self.keeper.step()

    def identity(self, client: redis.asyncio.Redis | None, *, max_staleness_s: float = 3600.0) -> Identity:
        settings = GatewaySettings(
            auth=AuthMode.REQUIRED, tenants_path=self.file.path, auth_max_staleness_s=max_staleness_s
        )
        return Identity(settings, client, SystemClock(), random.Random(1), fetch=self.issuing.fetch)


@pytest_asyncio.fixture
async def place(tmp_path: Path, server: StoreServer, client: redis.asyncio.Redis) -> AsyncIterator[Place]:
    place = Place(tmp_path, server, client)
    yield place
    await place.keeper.stop()


async def who(identity: Identity, key: str) -> str:
    return (await identity.authenticator.authenticate(f"Bearer {key}".encode())).tenant.tenant_id


async def test_published_taken_up_and_revoked(place: Place, client: redis.asyncio.Redis) -> None:
    worker = place.identity(client)
    await worker.refresh()
    with pytest.raises(Unauthorized):  # nothing is published, and that is known
        await who(worker, KEY)
    await place.store.publish(DIRECTORY)
    assert await worker.refresh()
    assert await who(worker, KEY) == "acme"
    await place.store.publish(replace(revoke_key(DIRECTORY, "ci", time.time()), epoch=2))
    assert await worker.refresh()
    with pytest.raises(Unauthorized):
        await who(worker, KEY)
    assert await who(worker, OTHER_KEY) == "lab"


async def test_the_keeper_fills_whichever_place_lacks_the_newest(place: Place, client: redis.asyncio.Redis) -> None:
    assert await place.keeper.step() is None
    await place.file.publish(DIRECTORY)  # edited while nothing ran
    await place.settled()
    assert await place.store.read() == DIRECTORY
    await place.store.publish(replace(DIRECTORY, epoch=5, keys=()))
    await place.settled()
    assert await place.file.read() == await place.store.read() == replace(DIRECTORY, epoch=5, keys=())
    await client.flushall()  # the store forgot
    await place.settled()
    assert await place.store.read() == replace(DIRECTORY, epoch=5, keys=())
    place.file.path.write_text("half a fi")
    await place.settled()
    assert await place.file.read() == replace(DIRECTORY, epoch=5, keys=())
    assert place.file.path.stat().st_mode & 0o777 == 0o600


async def test_of_two_directories_of_one_epoch_the_store_s_counts(place: Place) -> None:
    await place.file.publish(DIRECTORY)
    await place.store.publish(replace(DIRECTORY, tenants=(), keys=()))
    await place.settled()
    found = await place.file.read()
    assert found == await place.store.read()
    assert found is not None
    assert (found.epoch, found.tenants) == (2, ())


async def test_key_sets_are_published_to_all_issuers_of_an_address(place: Place) -> None:
    one = Issuer(NAME, AUDIENCE, jwks_url=URL)
    two, by_hand = replace(one, issuer="https://two.example.com"), Issuer("https://x.example.com", "a", jwks="{}")
    place.issuing.answer = jwks(Signer("ES256", "k1").entry)
    await place.store.publish(replace(DIRECTORY, issuers=(one, two, by_hand)))
    for _ in range(5):
        await place.keeper.step()
        await asyncio.sleep(0)
    found = await place.file.read()
    assert found is not None
    assert [issuer.jwks for issuer in found.issuers] == [place.issuing.answer, place.issuing.answer, "{}"]
    assert place.issuing.asked == [URL]
    assert found.epoch == 2  # once, and not again and again


async def test_with_the_store_dead_a_fresh_worker_knows_keys_and_tokens(
    place: Place, client: redis.asyncio.Redis
) -> None:
    signer = Signer("ES256", "k1")
    issuer = Issuer(NAME, AUDIENCE, jwks_url=URL, jwks=jwks(signer.entry))
    await place.store.publish(replace(DIRECTORY, issuers=(issuer,)))
    await place.settled()
    await place.server.stop()
    fresh = place.identity(client)
    await fresh.start()
    assert await who(fresh, KEY) == "acme"
    assert await who(fresh, signer.token(time.time()).decode()) == "acme"
    with pytest.raises(Unauthorized):
        await who(fresh, make_key("acme")[0])
    # Revoked in the file, as `workbench keys revoke` does while the stack's store is down.
    await place.file.publish(replace(revoke_key(DIRECTORY, "ci", time.time()), epoch=2))
    assert await fresh.refresh()
    with pytest.raises(Unauthorized):
        await who(fresh, KEY)
    await fresh.stop()


async def test_what_nobody_confirms_is_refused_in_time_and_comes_back(
    place: Place, client: redis.asyncio.Redis
) -> None:
    await place.store.publish(DIRECTORY)
    await place.settled()
    worker = place.identity(client, max_staleness_s=60.0)
    await worker.refresh()
    await place.server.stop()
    long_ago_s = time.time() - 61.0
    os.utime(place.file.path, (long_ago_s, long_ago_s))
    fresh = place.identity(client, max_staleness_s=60.0)
    await fresh.refresh()
    with pytest.raises(Unavailable):
        await who(fresh, KEY)
    await worker.refresh()
    assert await who(worker, KEY) == "acme"  # the store itself said so less than a minute ago
    await place.server.start()
    await fresh.refresh()
    assert await who(fresh, KEY) == "acme"


async def test_an_emptied_store_confirms_nothing_that_is_held(place: Place, client: redis.asyncio.Redis) -> None:
    await place.store.publish(DIRECTORY)
    worker = place.identity(client)
    await worker.refresh()
    confirmed_s = worker.age_s
    await client.flushall()
    await asyncio.sleep(0.01)
    await worker.refresh()
    assert confirmed_s is not None
    assert worker.age_s is not None
    assert worker.age_s > confirmed_s
    assert await who(worker, KEY) == "acme"


@dataclass
class Fleet:
    url: str
    workers: list[Process]
    client: redis.asyncio.Redis
    place: Place

    async def ask(self, key: str | None) -> int:
        return (await self.answer(key))[0]

    async def answer(self, key: str | None) -> tuple[int, bytes]:
        body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 2})
        headers = {} if key is None else {"authorization": f"Bearer {key}"}
        status, _, answer = await fetch(self.url, "POST", "/v1/chat/completions", body, **headers)
        return status, answer

    async def all_say(self, key: str, status: int) -> bool:
        """Whether 12 requests on connections of their own, so on either worker, are all answered so."""
        return {await self.ask(key) for _ in range(12)} == {status}


@pytest_asyncio.fixture
async def fleet(tmp_path: Path, place: Place, client: redis.asyncio.Redis) -> AsyncIterator[Fleet]:
    port = free_port()
    env = {
        "WORKBENCH_GATEWAY_REDIS_URL": place.server.url,
        "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(tmp_path / "table.json"),
        "WORKBENCH_GATEWAY_TENANTS_PATH": str(place.file.path),
        "WORKBENCH_GATEWAY_AUTH": "required",
        "WORKBENCH_GATEWAY_CACHE_SALT_SECRET": "secret",
        "WORKBENCH_GATEWAY_LOG_LEVEL": "DEBUG",
    }
    await place.store.publish(DIRECTORY)
    await place.settled()
    async with AsyncExitStack() as parts:
        engine_url = await parts.enter_async_context(fake_engine(tmp_path, "--model", MODEL))
        await FileRoutingTable(tmp_path / "table.json").publish(a_table(a_pool("p", {"r1": engine_url})))
        workers = [
            await parts.enter_async_context(gateway_worker(port, tmp_path / f"worker-{number}.log", env))
            for number in range(2)
        ]
        yield Fleet(f"http://127.0.0.1:{port}", workers, client, place)


async def test_every_worker_refuses_a_revoked_key_within_five_seconds(fleet: Fleet) -> None:
    assert await fleet.all_say(KEY, 200)
    assert await fleet.ask(None) == await fleet.ask("not-a-key") == 401
    status, answer = await fleet.answer(OTHER_KEY)  # a tenant without grants
    assert (status, orjson.loads(answer)["error"]["code"]) == (404, "model_not_found")
    await fleet.place.store.publish(replace(revoke_key(DIRECTORY, "ci", time.time()), epoch=2))

    async def refused() -> bool:
        return await fleet.all_say(KEY, 401)

    assert await until(refused, "every worker to refuse the key", timeout_s=10.0) < 5.0

    new_key, new_kept = make_key("acme")
    await fleet.place.store.publish(replace(put_key(DIRECTORY, new_kept), epoch=3))

    async def taken() -> bool:
        return await fleet.all_say(new_key, 200)

    assert await until(taken, "every worker to take the new key", timeout_s=10.0) < 5.0
    _, _, metrics = await fetch(fleet.url, "GET", "/metrics")
    stored = str(await fleet.client.hgetall("workbench:tenants")) + fleet.place.file.path.read_text()
    shown = [text(worker.log) for worker in fleet.workers] + [metrics.decode(), answer.decode(), stored]
    for key in (KEY, OTHER_KEY, new_key):
        assert not any(key.rsplit("_", 1)[1] in place for place in shown)
