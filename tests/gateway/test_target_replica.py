"""`x-target-replica`: an admin's request goes to the replica that it names, or is refused with the choice there is."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from serving.core.policies import routing
from serving.core.state import ReplicaState
from serving.core.tenancy import ApiKey, AuthMode, Scope, Tenant, TenantDirectory
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from serving.metering.segments import read_events
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.tenants import FileTenantDirectory
from serving.telemetry import decision_log
from tests.gateway.fleets import EMBEDDER, MakeEngine, MakeGateway, a_pool
from tests.gateway.wire import CHAT, Answer, chat, post


async def ask(gateway: Gateway, target: str, *, key: bytes | None = None, stream: bool = False) -> Answer:
    headers = [(b"x-target-replica", target.encode())] + ([(b"authorization", key)] if key else [])
    return await post(gateway, CHAT, chat(stream=stream), headers)


async def test_an_admins_request_goes_to_the_replica_it_names_and_replays(
    make_gateway: MakeGateway, make_engine: MakeEngine, tmp_path: Path
) -> None:
    engines = {name: await make_engine() for name in ("r1", "r2", "r3")}
    pool = a_pool("p", {name: engine.url for name, engine in engines.items()})
    gateway = await make_gateway(
        pool, decision_log_path=tmp_path / "decisions", decision_log_frac=1.0, usage_dir=tmp_path / "usage"
    )
    for stream in (False, True) * 3:
        answer = await ask(gateway, "r2", stream=stream)
        assert (answer.status, answer.headers["x-router-reason"]) == (200, "target_replica")
    assert [len(engine.log.ended) for engine in engines.values()] == [0, 6, 0]
    assert {event.replica for event in read_events(tmp_path / "usage")} == {"r2"}
    records = list(decision_log.read(tmp_path / "decisions"))
    assert [routing.replay(record) == record.decision for record in records] == [True] * 6
    assert {record.request.target_replica for record in records} == {"r2"}


async def test_what_cannot_serve_is_refused_with_the_choice(make_gateway: MakeGateway, engine: FakeEngine) -> None:
    pool = a_pool("p", {"r1": engine.url, "r2": engine.url, "r3": engine.url})
    first, second, third = pool.replicas
    pool = replace(pool, replicas=(first, replace(second, state=ReplicaState.DRAINING), third))
    gateway = await make_gateway(pool, a_pool("e", {"other": engine.url}, model=EMBEDDER))
    for target, why in (("r2", "is draining"), ("other", "is no replica of m"), ("r9", "is no replica of m")):
        answer = await ask(gateway, target)
        error = answer.json["error"]
        assert (answer.status, error["code"], error["param"]) == (404, "replica_not_found", "x-target-replica")
        assert why in error["message"] and error["message"].endswith(": r1, r3")
    wrong = await ask(gateway, "r 1")
    assert (wrong.status, wrong.json["error"]["param"]) == (400, "x-target-replica")
    assert not engine.log.ended


async def test_no_other_replica_is_tried_instead(
    make_gateway: MakeGateway, make_engine: MakeEngine, engine: FakeEngine
) -> None:
    gateway = await make_gateway(a_pool("p", {"up": engine.url, "gone": "http://127.0.0.1:9"}))
    answer = await ask(gateway, "gone")
    assert (answer.status, answer.json["error"]["code"]) == (503, "no_replica")
    assert not engine.log.ended


@pytest.mark.parametrize(("scopes", "status"), [((Scope.INFERENCE,), 403), ((Scope.INFERENCE, Scope.ADMIN), 200)])
async def test_only_admins_choose(
    make_gateway: MakeGateway, engine: FakeEngine, tmp_path: Path, scopes: tuple[Scope, ...], status: int
) -> None:
    key_id = new_key_id()
    key = new_key(key_id)
    path = tmp_path / "tenants.json"
    keys = (ApiKey(key_id, "t", key_sha256(key), 0.0, scopes),)
    await FileTenantDirectory(path).publish(TenantDirectory(1, 0.0, (Tenant("t", models=("m",)),), keys))
    gateway = await make_gateway(a_pool("p", {"r": engine.url}), auth=AuthMode.REQUIRED, tenants_path=path)
    answer = await ask(gateway, "r", key=f"Bearer {key}".encode())
    assert answer.status == status
    assert len(engine.log.ended) == (1 if status == 200 else 0)
