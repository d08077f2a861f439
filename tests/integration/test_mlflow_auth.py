"""Every attack on a release against a real MLflow server with auth on: never followed, put back, told."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import json
import logging
import urllib.error
import urllib.request
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import redis.asyncio

from serving.clock import ManualClock
from serving.control.lazy_registry import LazyRegistry
from serving.control.registry import Registry, experiment, mlflow_client
from serving.control.release_desk import ReleaseDesk, ReleaseParts
from serving.control.release_events import ReleaseEvents
from serving.control.troubles import Troubles
from serving.core.approval import GATES, tags_of
from serving.core.errors import BadRequest
from serving.core.policies.rollout import Judgement
from serving.core.releases import Evidence, ReleaseBook, recorded
from serving.core.sequential import Verdict
from serving.core.state import Task
from serving.store.connection import connect
from serving.store.leases import Lease
from serving.store.releases import StoreReleaseBook
from tests.integration.replaying import a_store
from workbench.config import load_config
from workbench.mlflow_accounts import ADMIN, SERVICE, Account, Accounts, UserRole, new_password
from workbench.mlflow_server import AUDIT_FILE, ServerAuth, mlflow_server
from workbench.mlflow_setup import init_auth
from workbench.releases import EVIDENCE_PATH
from workbench.stack.ports import free_port
from workbench.wiring import service_account_of

pytestmark = pytest.mark.asyncio(loop_scope="module")
MODEL = "guarded"
OLD, NEW = b'{"verdict": "inconclusive"}', b'{"verdict": "pass"}'
PASSED = dict.fromkeys(GATES, Verdict.PASS)


@dataclass
class Scene:
    """An MLflow server with accounts, a store, and a control plane's desk that acts as the service account."""

    uri: str
    folder: Path
    passwords: dict[str, str]
    desk: ReleaseDesk
    registry: LazyRegistry
    lease: Lease
    clock: ManualClock
    run_id: str
    digest: str
    old_digest: str

    @property
    def root(self) -> str:
        """Where the server keeps the artifacts of the run with the evidence."""
        uri = str(mlflow_client(self.uri).get_run(self.run_id).info.artifact_uri)
        return uri.removeprefix("mlflow-artifacts:/")

    def read(self, user: str, call: str) -> tuple[int, str]:
        return self.ask(user, "GET", call, b"")

    def ask(self, user: str | None, method: str, call: str, body: dict[str, Any] | bytes) -> tuple[int, str]:
        """What the server answers to somebody's own request."""
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        headers = {"content-type": "application/json"}
        if user is not None:
            token = base64.b64encode(f"{user}:{self.passwords[user]}".encode()).decode()
            headers["authorization"] = f"Basic {token}"
        request = urllib.request.Request(f"{self.uri}/api/2.0/{call}", data or None, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=60) as response:
                return response.status, response.read().decode()
        except urllib.error.HTTPError as error:
            return error.code, error.read().decode()

    def tag(self, user: str | None, key: str, value: str, version: str = "2") -> tuple[int, str]:
        body = {"name": MODEL, "version": version, "key": key, "value": value}
        return self.ask(user, "POST", "mlflow/model-versions/set-tag", body)

    def alias(self, user: str, version: str) -> tuple[int, str]:
        body = {"name": MODEL, "alias": "champion", "version": version}
        return self.ask(user, "POST", "mlflow/registered-models/alias", body)

    def overwrite(self, user: str, data: bytes) -> tuple[int, str]:
        return self.ask(user, "PUT", f"mlflow-artifacts/artifacts/{self.root}/{EVIDENCE_PATH}", data)

    async def looks(self) -> str | None:
        """The control plane looks until it has nothing more to put right; the champion that it follows."""
        champion = None
        for _ in range(2):
            await self.lease.hold()
            found = await self.desk.step(await asyncio.to_thread(self.registry.read, frozenset([MODEL])))
            await self.desk.settled()
            self.clock.advance(6.0)
            champion = None if found is None else found.champions[MODEL]
        return champion

    async def judges(self, version: str = "2") -> Judgement:
        return await asyncio.to_thread(self.desk.judge.judge, MODEL, version)

    def told(self) -> list[str]:
        return [json.loads(line)["kind"] for line in (self.folder / "releases.jsonl").read_text().splitlines()]

    def audited(self) -> list[tuple[str, str, int | None]]:
        """(who, what, answer) of each line in the audit log."""
        lines = [json.loads(line) for line in (self.folder / AUDIT_FILE).read_text().splitlines()]
        return [(line["user"], line["writes"][0]["name"], line["status"]) for line in lines]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def scene(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Scene]:
    folder, port = tmp_path_factory.mktemp("mlflow-auth"), free_port()
    admin = Account(ADMIN, new_password())
    server = mlflow_server(folder, port, auth=ServerAuth(admin, "a" * 32))
    with pytest.MonkeyPatch.context() as env:
        await server.start()
        try:
            async with a_store() as store:
                client = connect(store.url)
                yield await a_scene(f"http://127.0.0.1:{port}", folder, admin, client, env)
                await client.aclose()
        finally:
            await server.stop()


async def a_scene(
    uri: str, folder: Path, admin: Account, client: redis.asyncio.Redis, env: pytest.MonkeyPatch
) -> Scene:
    passwords = {ADMIN: admin.password}
    for name, role in ((SERVICE, SERVICE), ("ben", UserRole.RELEASE_MANAGER), ("ana", UserRole.RESEARCHER)):
        passwords[name] = new_password()
        await asyncio.to_thread(Accounts(uri, admin).make_user, name, role, passwords[name])
    for key, value in Account(SERVICE, passwords[SERVICE]).env.items():
        env.setenv(key, value)
    run_id = await asyncio.to_thread(register, uri)
    book, clock = ReleaseBook(), ManualClock()
    for document in (OLD, NEW):
        digest = hashlib.sha256(document).hexdigest()
        book = recorded(book, MODEL, Evidence("2", digest, run_id, EVIDENCE_PATH, PASSED, "w2", clock.now_s()))
    await StoreReleaseBook(client).publish(ReleaseBook(1, 1.0, book.releases))
    lease, registry = Lease(client, "control", 600.0), LazyRegistry(uri)
    parts = ReleaseParts(registry, ReleaseEvents(clock, folder / "releases.jsonl"), copies=folder / "evidence")
    desk = ReleaseDesk(client, lease, parts, clock, Troubles(logging.getLogger("test")))
    newest, older = book.of(MODEL).evidence_of("2")
    scene = Scene(uri, folder, passwords, desk, registry, lease, clock, run_id, newest.digest, older.digest)
    assert await scene.looks() == "1"
    return scene


def register(uri: str) -> str:
    """Versions 1 (champion) and 2, and a run with the evidence on 2; its id."""
    registry = Registry(uri)
    assert registry.register(MODEL, "source", "w1", task=Task.GENERATE, first=True) == "1"
    assert registry.register(MODEL, "source", "w2", task=Task.GENERATE) == "2"
    client = mlflow_client(uri)
    run_id = client.create_run(experiment(client, f"canaries/{MODEL}")).info.run_id
    registry.write_artifact(run_id, EVIDENCE_PATH, NEW)
    return str(run_id)


async def test_only_a_release_managers_approval_of_this_evidence_counts(scene: Scene) -> None:
    right = scene.digest[:16]
    assert scene.tag("ana", "approval", right)[0] == 403
    assert scene.tag(None, "approval", right)[0] == 401
    status, words = scene.tag(SERVICE, "approval", right)
    assert status == 403 and "a person's word" in words
    assert not (await scene.judges()).is_approved
    assert scene.tag("ben", "approval", right)[0] == 200
    found = await scene.judges()
    assert (found.verdict, found.is_approved) == (Verdict.PASS, True)
    lines = scene.audited()
    assert (
        ("ana", "approval", 403) in lines and ("ben", "approval", 200) in lines and (SERVICE, "approval", 403) in lines
    )
    assert ("", "approval", 401) in lines
    assert (scene.folder / AUDIT_FILE).stat().st_mode & 0o777 == 0o600


async def test_a_wrong_and_a_stale_approval_count_for_nothing_and_are_taken_away(scene: Scene) -> None:
    for approval, alarm in (("f" * 16, "approval_wrong"), (scene.old_digest[:16], "approval_stale")):
        assert scene.tag("ben", "approval", approval)[0] == 200
        assert not (await scene.judges()).is_approved
        await scene.looks()
        assert "approval" not in scene.registry.tags(MODEL, "2")
        assert scene.told()[-1] == alarm


async def test_a_forged_alias_is_refused_and_where_an_admin_sets_it_it_is_not_followed(scene: Scene) -> None:
    assert scene.alias("ana", "2")[0] == scene.alias("ben", "2")[0] == 403
    assert scene.registry.said_champion(MODEL) == "1"
    assert scene.alias(ADMIN, "2")[0] == 200
    assert await scene.looks() == "1"
    assert scene.registry.said_champion(MODEL) == "1"
    assert scene.told()[-1] == "alias_forged"
    assert (ADMIN, "champion", 200) in scene.audited()


async def test_verdicts_are_the_records_whoever_writes_the_tags(scene: Scene) -> None:
    assert scene.tag("ana", "gate.quality", "fail")[0] == scene.tag("ben", "gate.quality", "fail")[0] == 403
    assert scene.tag(ADMIN, "gate.quality", "fail")[0] == 200
    assert (await scene.judges()).verdict is Verdict.PASS
    assert scene.registry.tags(MODEL, "2")["gate.quality"] == "pass"
    assert scene.told()[-1] == "tags_changed"


async def test_evidence_overwritten_after_approval_is_put_back_and_to_be_approved_again(scene: Scene) -> None:
    assert scene.tag("ben", "approval", scene.digest[:20])[0] == 200
    assert (await scene.judges()).is_approved
    assert scene.overwrite("ana", b"{}")[0] == 403
    assert scene.overwrite(ADMIN, b"{}")[0] == 200
    found = await scene.judges()
    assert (found.verdict, found.is_approved) == (Verdict.INCONCLUSIVE, False)
    assert scene.registry.artifact(scene.run_id, EVIDENCE_PATH) == NEW
    assert "approval" not in scene.registry.tags(MODEL, "2")
    assert scene.told()[-1] == "evidence_changed"
    assert not (await scene.judges()).is_approved


async def test_tags_sent_with_a_versions_creation_are_refused_or_go(scene: Scene) -> None:
    newest = scene.desk.book.of(MODEL).evidence_of("2")[0]
    forged = {**tags_of(newest), "approval": scene.digest, "weights.digest": "w2"}
    body = {
        "name": MODEL,
        "source": f"runs:/{scene.run_id}/model",
        "run_id": scene.run_id,
        "tags": [{"key": key, "value": value} for key, value in forged.items()],
    }
    status, words = scene.ask("ana", "POST", "mlflow/model-versions/create", body)
    assert status == 403 and "no version is created with the tag" in words
    assert scene.ask("ben", "POST", "mlflow/model-versions/create", json.dumps(json.dumps(body)).encode())[0] == 403
    assert scene.ask(ADMIN, "POST", "mlflow/model-versions/create", body)[0] == 200
    found = await scene.judges("3")
    assert (found.verdict, found.is_approved) == (Verdict.INCONCLUSIVE, False)
    await scene.looks()
    assert set(scene.registry.tags(MODEL, "3")) == {"weights.digest"}
    assert scene.told()[-1] == "tags_unrecorded"


async def test_a_rejection_is_a_release_managers_and_ends_it(scene: Scene) -> None:
    assert scene.tag("ana", "approval.rejected", "no")[0] == 403
    assert scene.tag("ben", "approval.rejected", "too slow in German")[0] == 200
    found = await scene.judges()
    assert (found.is_rejected, found.rejection) == (True, "too slow in German")


async def test_people_do_their_work_and_no_more(scene: Scene) -> None:
    status, made = scene.ask("ana", "POST", "mlflow/experiments/create", {"name": "ana's own"})
    assert status == 200
    run = {"experiment_id": json.loads(made)["experiment_id"]}
    status, begun = scene.ask("ana", "POST", "mlflow/runs/create", run)
    assert status == 200
    root = json.loads(begun)["run"]["info"]["artifact_uri"].removeprefix("mlflow-artifacts:/")
    assert scene.ask("ana", "PUT", f"mlflow-artifacts/artifacts/{root}/notes.txt", b"mine")[0] == 200
    assert scene.read("ben", f"mlflow-artifacts/artifacts/{scene.root}/{EVIDENCE_PATH}") == (200, NEW.decode())
    prompt = {"name": MODEL, "key": "mlflow.prompt.is_prompt", "value": "true"}
    assert scene.ask("ben", "POST", "mlflow/registered-models/set-tag", prompt)[0] == 403
    assert scene.ask("ana", "POST", "mlflow/users/create", {"username": "eve", "password": "x" * 12})[0] == 403
    assert scene.read("ana", "mlflow/assistant/config")[0] == 403


async def test_accounts_can_be_made_again_on_somebody_elses_server(
    scene: Scene, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key, value in Account(ADMIN, scene.passwords[ADMIN]).env.items():
        monkeypatch.setenv(key, value)
    file = tmp_path / "workbench.yaml"
    file.write_text(f"models: {{m: {{source: /weights}}}}\nstores: {{mlflow_tracking_uri: '{scene.uri}'}}\n")
    config = load_config(file, {})
    people = {"eva": UserRole.RESEARCHER, "ben": UserRole.RELEASE_MANAGER}
    made = await init_auth(config, people)
    assert [(one.name, one.account is not None) for one in made] == [("eva", True), ("ben", False)]
    service = service_account_of(config)
    assert service is not None and service.password not in repr(service)
    for account in (service, *(one.account for one in made)):
        if account is not None:
            scene.passwords[account.username] = account.password
    assert scene.tag(SERVICE, "gate.quality", "pass")[0] == 200
    assert scene.tag("eva", "approval", "f" * 16)[0] == 403
    assert [one.account for one in await init_auth(config, people)] == [None, None]
    with pytest.raises(BadRequest, match="account of the workbench's own"):
        await init_auth(config, {SERVICE: UserRole.RELEASE_MANAGER})
