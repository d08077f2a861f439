"""The real lm-eval against a fake engine: what it asks, what comes back, what goes wrong."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from evals.harness import Endpoint, ask
from evals.tasks import TASKS, make_items
from serving.core.errors import UpstreamError
from serving.engine.fake import FakeEngine

NUM = 6
ITEMS = [item for task in TASKS for item in make_items(task, NUM, seed=0)]


@pytest.fixture(scope="session")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One token a word, of the items' own words."""
    folder = tmp_path_factory.mktemp("tokenizer")
    texts = [f"{item.prompt} {item.gold} {item.other}" for item in ITEMS]
    found = dict.fromkeys(word for text in texts for word, _ in Whitespace().pre_tokenize_str(text))
    made = Tokenizer(WordLevel({word: number for number, word in enumerate(["<unk>", *found])}, unk_token="<unk>"))
    made.pre_tokenizer = Whitespace()
    made.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<unk>"}'
    )
    return folder


@pytest.mark.parametrize("concurrency", [1, 4])
async def test_every_item_comes_back_once_in_its_place(engine: FakeEngine, tokenizer: Path, concurrency: int):
    told: list[tuple[str, int, int]] = []
    endpoint = Endpoint(engine.url, "m", tokenizer, concurrency=concurrency)
    results, seconds = await asyncio.to_thread(
        ask, ITEMS, endpoint, seed=0, on_progress=lambda *what: told.append(what)
    )
    assert [(result.id, result.source) for result in results] == [(item.id, item.source) for item in ITEMS]
    assert set(seconds) == set(TASKS)
    assert told[0] == ("cloze", 0, len(ITEMS))
    assert told[-1] == ("", len(ITEMS), len(ITEMS))
    for result in results:
        assert result.score in (0.0, 1.0)
        assert (result.answer is None) == result.scoring.by_likelihood
        assert (result.log_likelihood is None) != result.scoring.by_likelihood
    # Each third token of the fake is not its likeliest, so both verdicts are there.
    assert {result.score for result in results if result.task == "cloze"} == {0.0, 1.0}
    again, _ = await asyncio.to_thread(ask, ITEMS, endpoint, seed=0)
    assert again == results


async def test_a_model_that_is_not_served_is_an_error(engine: FakeEngine, tokenizer: Path):
    endpoint = replace(Endpoint(engine.url, "m", tokenizer), model="nope")
    with pytest.raises(UpstreamError, match=r"task arithmetic: .*404"):
        await asyncio.to_thread(ask, make_items("arithmetic", 1, 0), endpoint, seed=0)
