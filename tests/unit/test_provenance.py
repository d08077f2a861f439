from __future__ import annotations

from pathlib import Path

import pytest

from workbench.provenance import UNKNOWN_COMMIT, git_commit


@pytest.fixture(autouse=True)
def _forget() -> None:
    git_commit.cache_clear()


def test_a_given_commit_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORKBENCH_COMMIT", "abc")
    assert git_commit() == "abc"


def test_without_a_history_the_commit_is_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORKBENCH_COMMIT", raising=False)
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    assert git_commit(tmp_path) == UNKNOWN_COMMIT
