"""Every way to write what releases are judged by, and who may."""

from __future__ import annotations

from typing import Any

import pytest

from serving.core.registry_access import Kind, Role, Write, is_closed, refusal, writes_of

API = "/api/2.0/mlflow"
PROXY = "/api/2.0/mlflow-artifacts/artifacts/7/abc123/artifacts"


def kinds(method: str, path: str, body: dict[str, Any] | None = None, /, **query: str) -> list[tuple[Kind, str]]:
    return [(one.kind, one.name) for one in writes_of(method, path, query, body or {})]


@pytest.mark.parametrize("prefix", [API, "/ajax-api/2.0/mlflow", "/lab/api/2.0/mlflow", "//api//2.0/./mlflow"])
def test_tags_aliases_and_creations_are_seen_below_any_prefix(prefix: str) -> None:
    tag = {"name": "m", "version": "2", "key": "approval", "value": "x"}
    assert kinds("POST", f"{prefix}/model-versions/set-tag", tag) == [(Kind.TAG, "approval")]
    assert kinds("DELETE", f"{prefix}/model-versions/delete-tag", tag) == [(Kind.TAG, "approval")]
    alias = {"name": "m", "version": "2", "alias": "Champion"}
    assert kinds("POST", f"{prefix}/registered-models/alias", alias) == [(Kind.ALIAS, "Champion")]
    made = {"name": "m", "tags": [{"key": "task", "value": "x"}, {"key": "gate.quality", "value": "pass"}]}
    assert kinds("POST", f"{prefix}/model-versions/create", made) == [(Kind.TAG_WITH_CREATION, "gate.quality")]


def test_what_else_is_written_is_nobodys_concern_here() -> None:
    assert kinds("POST", f"{API}/model-versions/set-tag", {"name": "m", "version": "1", "key": "owner"}) == []
    assert kinds("GET", f"{API}/registered-models/alias", alias="champion") == []
    assert kinds("POST", f"{API}/registered-models/alias", {"name": "m", "alias": "best", "version": "1"}) == []
    assert kinds("POST", f"{API}/runs/set-tag", {"run_id": "r", "key": "approval", "value": "x"}) == []
    assert kinds("POST", f"{API}/registered-models/set-tag", {"name": "m", "key": "task", "value": "x"}) == []
    assert kinds("PUT", f"{PROXY}/report/page.html") == kinds("PUT", f"{PROXY}/mygate/x") == []
    assert kinds("POST", f"{API}/model-versions/create", {"name": "m", "tags": "gate.quality"}) == []


@pytest.mark.parametrize(
    "path",
    [
        f"{PROXY}/gate/evidence.json",
        f"{PROXY}/gate",
        f"{PROXY}/%67ate/evidence.json",
        f"{PROXY}/%2567ate/evidence.json",
        f"{PROXY}//gate/./evidence.json",
        f"{PROXY}/x/../gate/evidence.json",
        "/ajax-api/2.0/mlflow-artifacts/artifacts/7/abc123/artifacts/gate/report.html",
        "/api/2.0/mlflow-artifacts/mpu/create/artifacts/7/abc123/artifacts/gate/evidence.json",
    ],
)
def test_evidence_is_seen_however_its_path_is_written(path: str) -> None:
    assert [kind for kind, _ in kinds("PUT", path)] == [Kind.EVIDENCE]
    assert kinds("GET", path) == []


def test_uploads_of_the_page_are_seen() -> None:
    upload = "/ajax-api/2.0/mlflow/upload-artifact"
    assert kinds("POST", upload, run_uuid="r", path="gate/evidence.json") == [(Kind.EVIDENCE, "r/gate/evidence.json")]
    assert kinds("POST", upload, run_uuid="r", path="notes/gate.txt") == []


APPROVAL = Write(Kind.TAG, "m", "2", "approval", "ab")
TAKEN = Write(Kind.TAG, "m", "2", "approval", None)
REJECTED = Write(Kind.TAG, "m", "2", "approval.rejected", "slow")
VERDICT = Write(Kind.TAG, "m", "2", "gate.quality", "pass")
CREATED = Write(Kind.TAG_WITH_CREATION, "m", "", "approval", "ab")
ALIAS = Write(Kind.ALIAS, "m", "2", "champion", "2")
PROMPT = Write(Kind.MODEL_TAG, "m", "", "mlflow.prompt.is_prompt", "true")
EVIDENCE = Write(Kind.EVIDENCE, "", "", "/artifacts/gate", "")
ALL = (APPROVAL, TAKEN, REJECTED, VERDICT, CREATED, ALIAS, PROMPT, EVIDENCE)


@pytest.mark.parametrize(
    ("role", "may"),
    [
        (Role.USER, ()),
        (Role.MANAGER, (APPROVAL, TAKEN, REJECTED)),
        (Role.SERVICE, (TAKEN, VERDICT, CREATED, ALIAS, EVIDENCE)),
        (Role.ADMIN, ALL),
    ],
)
def test_each_role_may_write_its_own_part(role: Role, may: tuple[Write, ...]) -> None:
    assert tuple(write for write in ALL if refusal(role, write) is None) == may


def test_a_refusal_says_whose_part_it_is() -> None:
    assert refusal(Role.USER, APPROVAL) == "only a release manager approves or rejects a version"
    assert "a person's word" in (refusal(Role.SERVICE, APPROVAL) or "")
    assert "control plane alone" in (refusal(Role.MANAGER, ALIAS) or "")


def test_mlflows_assistant_is_closed() -> None:
    assert is_closed("/ajax-api/3.0/mlflow/assistant/message") and is_closed("/ajax-api/3.0/mlflow/%61ssistant")
    assert not is_closed("/ajax-api/2.0/mlflow/runs/search")
