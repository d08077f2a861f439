"""Requests mirrored to a candidate: of consenting tenants alone, behind the user's answer, counted as waste."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.canary import Kind
from serving.core.tenancy import ApiKey, AuthMode, Consent, Tenant, TenantDirectory
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.metering.events import Waste
from serving.metering.segments import read_events
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.server import StoreServer
from serving.store.tenants import FileTenantDirectory
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool
from tests.gateway.test_feedback import SPLIT, client, observed, store
from tests.gateway.test_split import a_candidate, split_table
from tests.gateway.wire import CHAT, Answer, chat, post

__all__ = ["client", "store"]  # fixtures
SHADOW = replace(SPLIT, share_frac=0.0, shadow_frac=1.0)


class Stand:
    """A gateway with a tenant that consents and one that does not, over two versions."""

    def __init__(self, gateway: Gateway, old: FakeEngine, new: FakeEngine, keys: dict[str, str]) -> None:
        self.gateway, self.old, self.new, self.keys = gateway, old, new, keys

    async def ask(self, tenant: str, *, stream: bool = False) -> Answer:
        headers = [(b"authorization", f"Bearer {self.keys[tenant]}".encode())]
        return await post(self.gateway, CHAT, chat(stream=stream, max_tokens=3), headers)


@pytest.fixture
async def stand(make_gateway: MakeGateway, make_engine: MakeEngine, store: StoreServer, tmp_path: Path) -> Stand:
    old, new = await make_engine(), await make_engine()
    tenants = (Tenant("open", models=("m",), consents=(Consent.SHADOW,)), Tenant("closed", models=("m",)))
    ids = {tenant.tenant_id: new_key_id() for tenant in tenants}
    keys = {name: new_key(key_id) for name, key_id in ids.items()}
    kept = tuple(ApiKey(ids[name], name, key_sha256(key), 0.0) for name, key in keys.items())
    path = tmp_path / "tenants.json"
    await FileTenantDirectory(path).publish(TenantDirectory(1, 0.0, tenants, kept))
    table = split_table(SHADOW, a_pool("old", {"old-0": old.url}), a_candidate(new.url))
    gateway = await make_gateway(
        table=table, redis_url=store.url, auth=AuthMode.REQUIRED, tenants_path=path, usage_dir=tmp_path / "usage"
    )
    return Stand(gateway, old, new, keys)


async def test_a_consenting_tenants_requests_are_mirrored_scored_and_discarded(
    stand: Stand, client: object, tmp_path: Path
) -> None:
    for stream in (False, True):
        answer = await stand.ask("open", stream=stream)
        assert answer.status == 200 and answer.headers["x-served-by"].startswith("old; 1;")
    seen = [one for one in await observed(client, 6) if one.kind is Kind.SHADOW]  # type: ignore[arg-type]
    assert sorted(one.version for one in seen) == ["1", "1", "2", "2"]
    assert len({one.pair for one in seen}) == 2
    assert {(one.finish_reason, one.num_output_tokens, one.latency_s) for one in seen} == {("length", 3, None)}
    assert len(stand.new.log.ended) == 2


async def test_who_did_not_consent_is_not_mirrored(stand: Stand, client: object) -> None:
    for _ in range(4):
        assert (await stand.ask("closed")).status == 200
    await observed(client, 4)  # type: ignore[arg-type]
    assert not stand.new.log.ended


async def test_a_candidate_that_is_away_or_busy_costs_the_user_nothing(stand: Stand, client: object) -> None:
    await stand.new.__aexit__(None, None, None)
    answers = await asyncio.gather(*(stand.ask("open") for _ in range(20)))
    assert {answer.status for answer in answers} == {200}
    assert len(stand.old.log.ended) == 20


async def test_a_mirrors_work_is_waste_and_billed_to_nobody(
    make_gateway: MakeGateway, stand: Stand, client: object, tmp_path: Path
) -> None:
    await stand.ask("open")
    await observed(client, 3)  # type: ignore[arg-type]
    events = [event for event in read_events(tmp_path / "usage") if event.waste is not None]
    (event,) = events
    assert (event.waste, event.version, event.tenant, event.num_output_tokens) == (Waste.SHADOW, "2", "open", 3)
    assert event.id.endswith("-shadow")
