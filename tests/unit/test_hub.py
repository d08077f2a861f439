"""Models of the hub are measured with the tokenizer that their engine left in the hub's cache."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants
from huggingface_hub.errors import EntryNotFoundError

from serving.core.errors import Unavailable
from tests.measured import make_vocabulary
from workbench.hub import tokenizer_folder
from workbench.loadgen import Vocabulary

REVISION = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache on this disk; nobody is asked beyond it."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return tmp_path


def test_the_tokenizer_in_the_cache_is_the_models(cache: Path):
    repository = cache / "models--org--name"
    make_vocabulary(repository / "snapshots" / REVISION)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(REVISION)
    for source in ("hf:org/name", f"hf:org/name@{REVISION}", "hf:org/name@main"):
        folder = tokenizer_folder(source)
        assert folder == repository / "snapshots" / REVISION
        assert Vocabulary.load(folder).words


@pytest.mark.parametrize("source", ["hf:org/other", "hf:org/name@v9", "hf:org/na--me"])
def test_without_a_hub_and_a_cache_the_way_out_is_said(cache: Path, source: str):
    with pytest.raises(Unavailable, match="give that folder as the model's source"):
        tokenizer_folder(source)


def test_a_repository_without_one_is_named(cache: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(*_: object, **__: object) -> str:
        raise EntryNotFoundError("404")

    monkeypatch.setattr("workbench.hub.hf_hub_download", missing)
    with pytest.raises(Unavailable, match=r"hf:org/name cannot be measured: its repository has no tokenizer\.json"):
        tokenizer_folder("hf:org/name")
