"""Adapters that engines were started with: who may use them, where they are served, what is written down of it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio

from serving.core.state import Model, Task
from serving.core.tenancy import ApiKey, AuthMode, Tenant, TenantDirectory
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.metering.segments import read_events
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.tenants import FileTenantDirectory
from tests.gateway.fleets import MakeEngine, MakeGateway, a_pool, a_table
from tests.gateway.wire import CHAT, chat, get, metric, post

TENANTS = (
    Tenant("all", models=("*",), adapters=("*",)),
    Tenant("polite", models=("m",), adapters=("polite", "unheard-of")),
    Tenant("plain", models=("*",)),
)
KEY_IDS = {tenant.tenant_id: new_key_id() for tenant in TENANTS}
KEYS = {name: new_key(key_id) for name, key_id in KEY_IDS.items()}


@pytest_asyncio.fixture
async def engines(make_engine: MakeEngine) -> tuple[FakeEngine, FakeEngine]:
    """One with adapters, one without."""
    return await make_engine(lora_modules=("polite", "rude")), await make_engine()


@pytest_asyncio.fixture
async def gateway(engines: tuple[FakeEngine, FakeEngine], make_gateway: MakeGateway, tmp_path: Path) -> Gateway:
    """Version 1 in a pool with adapters and in one without, version 2 without any."""
    adapted, plain = engines
    pools = (
        replace(a_pool("adapted", {"a": adapted.url}), adapters=("polite", "rude")),
        a_pool("plain", {"p": plain.url}),
        replace(a_pool("second", {"s": plain.url}), version="2"),
    )
    keys = [ApiKey(KEY_IDS[name], name, key_sha256(key), 0.0) for name, key in KEYS.items()]
    tenants = tmp_path / "tenants.json"
    await FileTenantDirectory(tenants).publish(TenantDirectory(1, 0.0, TENANTS, tuple(keys)))
    models = (Model("m", Task.GENERATE, "1", ("1", "2")),)
    return await make_gateway(
        table=replace(a_table(*pools), models=models),
        auth=AuthMode.REQUIRED,
        tenants_path=tenants,
        usage_dir=tmp_path / "usage",
    )


def by(tenant: str) -> list[tuple[bytes, bytes]]:
    return [(b"authorization", f"Bearer {KEYS[tenant]}".encode())]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_adapter_is_asked_where_it_is_served_and_is_in_the_usage_event(
    gateway: Gateway, engines: tuple[FakeEngine, FakeEngine], tmp_path: Path, stream: bool
) -> None:
    adapted, plain = engines
    asked = [await post(gateway, CHAT, chat(model="m+polite", stream=stream), by("polite")) for _ in range(6)]
    assert {answer.status for answer in asked} == {200}
    assert {answer.headers["x-served-by"].partition(";")[0] for answer in asked} == {"adapted"}
    assert [request.body["model"] for request in adapted.log.ended] == ["polite"] * 6
    assert not plain.log.ended
    base = await post(gateway, CHAT, chat(model="m@1", stream=stream), by("polite"))
    assert base.text != asked[0].text
    *events, last = read_events(tmp_path / "usage")
    assert {(event.model, event.version, event.adapter) for event in events} == {("m", "1", "polite")}
    assert last.adapter is None
    assert metric(gateway, "workbench_requests_total", model="m", pool="adapted", status="200") >= 6


async def test_our_own_api_takes_and_tells_the_adapter(
    gateway: Gateway, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    body = {"model": "m", "version": "1", "adapter": "rude", "text": "one two", "max_tokens": 3}
    answer = await post(gateway, "/v1/generate", body, by("all"))
    assert (answer.status, answer.json["adapter"], answer.json["version"]) == (200, "rude", "1")
    assert engines[0].log.ended[-1].body["model"] == "rude"


@pytest.mark.parametrize(
    ("tenant", "model", "there_are"),
    [
        ("all", "m+unheard-of", "m+polite, m+rude"),
        ("all", "m@1+unheard-of", "m@1+polite, m@1+rude"),
        ("all", "m@2+polite", "none"),
        ("all", "m+polite@3", "m+polite, m+rude"),
        ("polite", "m+rude", "m+polite"),
        ("polite", "m+unheard-of", "m+polite"),
        ("plain", "m+polite", "none"),
        ("plain", "m+unheard-of", "none"),
    ],
)
async def test_another_is_a_404_that_names_those_that_the_tenant_may_use(
    gateway: Gateway, engines: tuple[FakeEngine, FakeEngine], tenant: str, model: str, there_are: str
) -> None:
    answer = await post(gateway, CHAT, chat(model=model), by(tenant))
    base, _, adapter = model.partition("+")
    error = answer.json["error"]
    assert (answer.status, error["code"], error["param"]) == (404, "model_not_found", "model")
    assert error["message"] == f"no adapter {adapter!r} of {base}; there are: {there_are}"
    shown = await get(gateway, f"/v1/models/{model}", headers=by(tenant))
    assert (shown.status, shown.json["error"]["message"]) == (404, error["message"])
    assert not any(engine.log.ended for engine in engines)


async def test_an_adapter_of_a_model_that_is_not_granted_is_no_model(gateway: Gateway) -> None:
    answer = await post(gateway, CHAT, chat(model="other+polite"), by("polite"))
    assert (answer.status, answer.json["error"]["message"]) == (404, "no model 'other+polite'; there are: m")


@pytest.mark.parametrize(("tenant", "adapters"), [("all", ["polite", "rude"]), ("polite", ["polite"]), ("plain", [])])
async def test_models_list_the_adapters_that_the_tenant_may_use(
    gateway: Gateway, tenant: str, adapters: list[str]
) -> None:
    (listed,) = (await get(gateway, "/v1/models", headers=by(tenant))).json["data"]
    assert listed["adapters"] == adapters
    assert (await get(gateway, "/v1/models/m@2", headers=by(tenant))).json["adapters"] == []
    if adapters:
        shown = await get(gateway, f"/v1/models/m+{adapters[0]}", headers=by(tenant))
        assert (shown.status, shown.json["id"]) == (200, f"m+{adapters[0]}")


async def test_with_its_replicas_gone_an_adapter_waits_for_them(
    make_gateway: MakeGateway, engines: tuple[FakeEngine, FakeEngine]
) -> None:
    gone = replace(a_pool("adapted", {}), adapters=("polite",))
    gateway = await make_gateway(gone, a_pool("plain", {"p": engines[1].url}))
    answer = await post(gateway, CHAT, chat(model="m+polite"))
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_replica")  # served here, and not now
    assert (await post(gateway, CHAT, chat(model="m"))).status == 200
