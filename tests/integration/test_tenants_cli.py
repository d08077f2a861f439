"""`workbench tenants` and `workbench keys`: on a stack's store, on somebody else's, and with nothing running."""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Callable, Coroutine, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from serving.core.tenancy import TenantDirectory
from serving.store.api_keys import key_sha256
from serving.store.connection import connect
from serving.store.server import StoreServer
from serving.store.tenants import FileTenantDirectory, StoreTenantDirectory
from tests.issuers import Signer, jwk, jwks
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.stack.state import ProcessRecord, StackState, StateFile

CONFIG: dict[str, Any] = {"models": {"tiny": {"source": "/tiny"}}, "pools": []}


class Desk:
    """A folder with a configuration, a command line, and a store that can be killed."""

    def __init__(self, folder: Path, server: StoreServer, capsys: pytest.CaptureFixture[str]) -> None:
        self.folder = folder
        self.server = server
        self._capsys = capsys
        self._loop = asyncio.Runner()
        self.said = ""

    def await_(self, work: Coroutine[Any, Any, Any]) -> Any:
        return self._loop.run(work)

    def close(self) -> None:
        self.await_(self.server.stop())
        self._loop.close()

    def configure(self, **parts: Any) -> None:
        (self.folder / "workbench.yaml").write_text(yaml.safe_dump({**CONFIG, **parts}))

    def store_runs(self) -> None:
        self.await_(self.server.start())

    def stack_runs(self) -> None:
        self.store_runs()
        supervisor = ProcessRecord.of("supervisor", os.getpid())
        assert supervisor is not None
        StateFile(self.data / "run" / "stack.json").write(StackState(supervisor, urls={"store": self.server.url}))

    @property
    def data(self) -> Path:
        return self.folder / ".workbench"

    @property
    def file(self) -> FileTenantDirectory:
        return FileTenantDirectory(self.data / "tenants.json")

    def in_file(self) -> TenantDirectory | None:
        return self.await_(self.file.read())

    def in_store(self) -> TenantDirectory | None:
        async def read() -> TenantDirectory | None:
            client = connect(self.server.url)
            try:
                return await StoreTenantDirectory(client).read()
            finally:
                await client.aclose()

        return self.await_(read())

    def type(self, line: str, code: Exit = Exit.OK) -> str:
        """What it prints; `said` is what it said beside that."""
        words = [*line.split(), "--config", str(self.folder / "workbench.yaml")]
        found = run_app(words)
        shown = self._capsys.readouterr()
        self.said = shown.err
        assert found == code, shown
        return shown.out

    def json(self, line: str) -> Any:
        return json.loads(self.type(f"{line} --json"))


@pytest.fixture
def desk(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.delenv("REDIS_URL", raising=False)
    desk = Desk(tmp_path, StoreServer(tmp_path / "store"), capsys)
    desk.configure()
    yield desk
    desk.close()


@pytest.fixture(params=["a stack runs", "somebody else's store", "nothing runs"])
def placed(request: pytest.FixtureRequest, desk: Desk) -> tuple[Desk, Callable[[], TenantDirectory | None]]:
    """A desk, and how to read the directory where its truth is."""
    if request.param == "nothing runs":
        return desk, desk.in_file
    if request.param == "a stack runs":
        desk.stack_runs()
    else:
        desk.store_runs()
        desk.configure(stores={"redis_url": desk.server.url})
    return desk, desk.in_store


def test_a_tenant_and_its_keys_from_first_to_last(
    placed: tuple[Desk, Callable[[], TenantDirectory | None]],
) -> None:
    desk, truth = placed
    assert "no tenants" in desk.type("tenants list")
    assert "may use no model" in desk.type("tenants create acme --requests-per-minute 60") + desk.said
    assert "acme may use m" in desk.type("tenants update acme --model m --tier default --tier batch")
    key = desk.type("keys create acme --label ci --expires-days 2 --max-streams 3").strip()
    assert "not shown again" in desk.said
    made = desk.json("keys create acme --label web --model m --scope inference --scope admin")
    directory = truth()
    assert directory is not None
    assert (directory.epoch, [tenant.models for tenant in directory.tenants]) == (4, [("m",)])
    assert [found.sha256 for found in directory.keys] == [key_sha256(key), key_sha256(made["key"])]
    assert {row["label"]: row["state"] for row in desk.json("keys list acme")} == {"ci": "active", "web": "active"}
    new = desk.type("keys rotate ci --overlap-hours 0").strip()
    assert new != key
    assert "is revoked" in desk.type("keys revoke web")
    states = {row["key_id"]: row["state"] for row in desk.json("keys list --all")}
    assert sorted(states.values()) == ["active", "expired", "revoked"]
    assert [row["label"] for row in desk.json("keys list")] == ["ci"]
    assert desk.json("tenants disable acme")["disabled"]
    assert not desk.json("tenants enable acme")["disabled"]
    shown = desk.type("tenants show acme") + desk.type("tenants list") + desk.type("keys list --all")
    shown += desk.type("tenants export") + desk.file.path.read_text()
    for secret in (key, new, made["key"]):
        assert secret.rsplit("_", 1)[1] not in shown
    assert "removed" in desk.type("tenants remove acme")
    assert truth() == desk.in_file()  # the copy is as new as the truth
    last = truth()
    assert last is not None
    assert (last.tenants, last.keys) == ((), ())


def test_nothing_running_is_said_and_the_file_is_changed(desk: Desk) -> None:
    desk.type("tenants create acme --model m")
    assert "no stack runs" in desk.said
    assert desk.file.path.stat().st_mode & 0o777 == 0o600
    desk.stack_runs()  # and its control plane has not copied the file yet
    desk.type("tenants create lab --model m")
    found = desk.in_store()
    assert found is not None
    assert [tenant.tenant_id for tenant in found.tenants] == ["acme", "lab"]


def test_with_the_stack_s_own_store_down_its_workers_file_is_changed(desk: Desk) -> None:
    desk.stack_runs()
    desk.type("tenants create acme --model m")
    desk.type("keys create acme --label ci")
    desk.await_(desk.server.stop())
    desk.type("keys revoke ci")
    assert "alone is read and written" in desk.said
    found = desk.in_file()
    assert found is not None
    assert found.keys[0].revoked_at_s is not None


def test_with_somebody_else_s_store_down_nothing_is_changed(desk: Desk) -> None:
    desk.store_runs()
    desk.configure(stores={"redis_url": desk.server.url})
    desk.type("tenants create acme --model m")
    before = desk.in_file()
    desk.await_(desk.server.stop())
    desk.type("tenants create lab", Exit.UNAVAILABLE)
    assert "the store does not answer" in desk.said
    assert desk.in_file() == before


@pytest.mark.parametrize(
    ("line", "code", "says"),
    [
        ("tenants create acme", Exit.FAILED, "is there already"),
        ("tenants create ACME", Exit.FAILED, "a tenant's id"),
        ("tenants create lab --model m@1", Exit.FAILED, "without a version"),
        ("tenants create lab --tier fast", Exit.USAGE, "fast"),
        ("tenants create lab --usd-per-hour inf", Exit.FAILED, "usd_per_hour"),
        ("tenants update nobody --model m", Exit.FAILED, "there are: acme"),
        ("tenants show nobody", Exit.FAILED, "no tenant"),
        ("tenants remove nobody", Exit.FAILED, "no tenant"),
        ("keys create nobody", Exit.FAILED, "no tenant"),
        ("keys create acme --expires-days nan", Exit.USAGE, "--expires-days"),
        ("keys create acme --expires-days inf", Exit.FAILED, "expires_at_s"),
        ("keys create acme --scope root", Exit.USAGE, "root"),
        ("keys list nobody", Exit.FAILED, "no tenant"),
        ("keys revoke nothing", Exit.FAILED, "keys list"),
        ("keys rotate nothing", Exit.FAILED, "keys list"),
        ("tenants trust https://i.example.com --audience a", Exit.USAGE, "--jwks-url URL or --jwks FILE"),
        ("tenants trust https://i.example.com --audience a --jwks /no/file", Exit.USAGE, "cannot read"),
        ("tenants trust https://i.example.com --audience a --jwks-url ftp://x/", Exit.FAILED, "https://"),
        ("tenants untrust https://i.example.com", Exit.FAILED, "no issuer"),
        ("tenants apply /no/file.yaml", Exit.FAILED, "cannot read"),
    ],
)
def test_a_mistake_is_named_and_changes_nothing(desk: Desk, line: str, code: Exit, says: str) -> None:
    desk.type("tenants create acme --model m")
    before = desk.in_file()
    desk.type(line, code)
    assert says in desk.said, desk.said
    assert desk.in_file() == before


def test_an_issuer_is_trusted_by_its_public_keys(desk: Desk) -> None:
    keys = desk.folder / "keys.json"
    keys.write_text(jwks(Signer("ES256", "k1").entry))
    trust = f"tenants trust https://i.example.com --audience wb --jwks {keys} --tenant-claim org"
    shown = desk.json(f"{trust} --algorithm ES256 --max-lifetime-s 600")
    assert (shown["num_keys"], shown["algorithms"], shown["tenant_claim"]) == (1, ["ES256"], "org")
    desk.type(f"{trust} --algorithm HS256", Exit.FAILED)
    keys.write_text(jwks({**jwk(Signer("ES256", "k1").key, "k1"), "d": "c2VjcmV0"}))
    desk.type(trust, Exit.FAILED)
    assert "private" in desk.said
    assert "c2VjcmV0" not in desk.said
    assert "trusts https://i.example.com for wb" in desk.type("tenants list")
    desk.type("tenants untrust https://i.example.com")
    found = desk.in_file()
    assert found is not None
    assert found.issuers == ()


def test_an_issuer_that_does_not_answer_is_trusted_for_later(desk: Desk) -> None:
    url = "http://127.0.0.1:9/jwks.json"
    shown = desk.json(f"tenants trust https://i.example.com --audience wb --jwks-url {url}")
    assert shown["num_keys"] is None
    assert "the control plane tries again" in desk.said


def test_a_file_is_applied_and_what_is_exported_can_be(desk: Desk) -> None:
    file = desk.folder / "tenants.yaml"
    file.write_text("tenants:\n  - {tenant_id: lab, models: ['*'], limits: {max_streams: 8}}\n")
    desk.type("tenants create acme --model m")
    assert desk.type(f"tenants apply {file} --dry-run") == "+ tenant lab\n"
    assert len(desk.json("tenants list")["tenants"]) == 1
    assert desk.json(f"tenants apply {file} --prune")["changes"] == ["- tenant acme", "+ tenant lab"]
    assert desk.type(f"tenants apply {file}") == "nothing changes\n"
    key = desk.type("keys create lab --label ci").strip()
    exported = desk.type("tenants export")
    desk.type("keys revoke ci")
    file.write_text(exported)
    desk.type(f"tenants apply {file}")
    assert desk.json("keys list --all")[0]["state"] == "revoked"  # a file from before does not undo it
    desk.type("tenants remove lab")
    desk.type(f"tenants apply {file}")
    found = desk.in_file()
    assert found is not None
    assert [kept.sha256 for kept in found.keys] == [key_sha256(key)]
    file.write_text("tenants:\n  - {tenant_id: lab, model: ['*']}\n")
    desk.type(f"tenants apply {file}", Exit.FAILED)
    assert "tenants.0.model" in desk.said


def test_a_label_is_only_text(desk: Desk) -> None:
    desk.type("tenants create acme --model m")
    desk.type("keys create acme --label [/red]")
    assert "[/red]" in desk.type("keys list")
