from __future__ import annotations

import re

import pytest

from serving.core.state import Task
from serving.engine.catalogue import CATALOGUE, CatalogueEntry
from serving.engine.flags import EngineFlags


@pytest.mark.parametrize("entry", CATALOGUE.values(), ids=lambda entry: entry.name)
def test_every_entry_is_pinned_licensed_and_servable(entry: CatalogueEntry) -> None:
    assert re.fullmatch(r"[a-z0-9._-]+", entry.name)
    assert re.fullmatch(r"pypi:[\w.-]+==[\w.]+", entry.source)
    assert entry.license
    assert 0 < entry.tokens_per_byte <= 1
    flags = EngineFlags.defaults(task=entry.task, context_length=entry.context_length)
    assert flags.max_model_len is not None
    assert flags.max_model_len <= entry.context_length


def test_it_offers_two_language_models_and_an_embedding_model() -> None:
    tasks = {name: entry.task for name, entry in CATALOGUE.items()}
    assert tasks == {
        "smollm2-135m": Task.GENERATE,
        "gemma3-270m": Task.GENERATE,
        "all-minilm-l6-v2": Task.EMBED,
    }
    assert [name for name, entry in CATALOGUE.items() if entry.chat] == ["smollm2-135m"]
