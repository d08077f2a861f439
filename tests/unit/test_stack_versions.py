"""Which version weights are: asked from the registry, remembered for when it is away, never made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from serving.core.errors import Unavailable
from serving.core.state import Task
from workbench.stack.versions import Versions


class FakeRegistry:
    def __init__(self, num_failures: int = 0) -> None:
        self.num_failures = num_failures
        self.asked: list[tuple[str, str]] = []

    def __call__(self, name: str, source: str, digest: str, task: Task) -> str:
        self.asked.append((name, digest))
        if len(self.asked) <= self.num_failures:
            raise Unavailable("MLflow does not answer")
        return str(len(self.asked))


async def up() -> None:
    """The registry has had its time to start."""


async def test_the_registry_says_which(tmp_path: Path):
    versions = Versions(FakeRegistry(), tmp_path / "versions.json", lambda *_: None, up)
    assert await versions.of("tiny", "pypi:tiny==1", "sha256:a", Task.GENERATE) == "1"


async def test_what_was_registered_before_is_served_while_the_registry_is_away(tmp_path: Path):
    path, said = tmp_path / "versions.json", []
    await Versions(FakeRegistry(), path, lambda *_: None, up).of("tiny", "s", "sha256:a", Task.GENERATE)
    away = Versions(FakeRegistry(num_failures=9), path, lambda *words: said.append(words), up)
    assert await away.of("tiny", "s", "sha256:a", Task.GENERATE) == "1"
    assert said == [("tiny", "MLflow does not answer: served as version 1, as registered before")]


async def test_what_another_registry_said_counts_for_nothing(tmp_path: Path):
    path, said = tmp_path / "versions.json", []
    one, two = "http://user:secret@one:5000/", "http://two:5000"
    await Versions(FakeRegistry(), path, lambda *_: None, up, uri=one).of("tiny", "s", "sha256:a", Task.GENERATE)
    assert "secret" not in path.read_text()
    away = Versions(FakeRegistry(num_failures=9), path, lambda *words: said.append(words), up, uri=two)
    with pytest.raises(Unavailable, match="has no version"):
        await away.of("tiny", "s", "sha256:a", Task.GENERATE, give_up_s=0)
    again = Versions(FakeRegistry(num_failures=9), path, lambda *_: None, up, uri="http://one:5000")
    assert await again.of("tiny", "s", "sha256:a", Task.GENERATE) == "1"


@pytest.mark.parametrize("text", ["", "{", "[]", '{"tiny sha256:a": "1"}'])
async def test_a_file_of_versions_that_cannot_be_read_knows_nothing(tmp_path: Path, text: str):
    path = tmp_path / "versions.json"
    path.write_text(text)
    away = Versions(FakeRegistry(num_failures=9), path, lambda *_: None, up)
    with pytest.raises(Unavailable, match="has no version"):
        await away.of("tiny", "s", "sha256:a", Task.GENERATE, give_up_s=0)
    assert await Versions(FakeRegistry(), path, lambda *_: None, up).of("tiny", "s", "sha256:a", Task.GENERATE) == "1"


async def test_new_weights_wait_for_the_registry(tmp_path: Path):
    path, said = tmp_path / "versions.json", []
    await Versions(FakeRegistry(), path, lambda *_: None, up).of("tiny", "s", "sha256:a", Task.GENERATE)
    registry = FakeRegistry(num_failures=2)
    versions = Versions(registry, path, lambda *words: said.append(words), up)
    assert await versions.of("tiny", "s", "sha256:b", Task.GENERATE, retry_s=0) == "3"
    assert len(registry.asked) == 3
    assert "waits for MLflow" in said[0][1]


async def test_new_weights_do_not_wait_for_ever(tmp_path: Path):
    said: list[tuple[str, str]] = []
    away = Versions(FakeRegistry(num_failures=9), tmp_path / "versions.json", lambda *words: said.append(words), up)
    with pytest.raises(Unavailable, match=r"tiny has no version .* within 0 s \(MLflow does not answer\)"):
        await away.of("tiny", "s", "sha256:a", Task.GENERATE, give_up_s=0)
    assert said == []
