"""The real lm-eval against a fake engine: what it asks, what comes back, what goes wrong."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest
import pytest_asyncio
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from evals.endpoint import Endpoint, check
from evals.harness import ask
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
async def test_every_item_comes_back_once_in_its_place(
    engine: FakeEngine, tokenizer: Path, concurrency: int, capsys: pytest.CaptureFixture[str]
):
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
        assert (result.finish_reason in ("stop", "length")) != result.scoring.by_likelihood
        assert (result.log_likelihood is None) != result.scoring.by_likelihood
    # Each third token of the fake is not its likeliest, so both verdicts are there.
    assert {result.score for result in results if result.task == "cloze"} == {0.0, 1.0}
    again, _ = await asyncio.to_thread(ask, ITEMS, endpoint, seed=0)
    assert again == results
    assert capsys.readouterr().err == ""


async def test_a_model_that_is_not_served_is_an_error(engine: FakeEngine, tokenizer: Path):
    endpoint = replace(Endpoint(engine.url, "m", tokenizer), model="nope")
    with pytest.raises(UpstreamError, match=r"task arithmetic: .*404"):
        await asyncio.to_thread(ask, make_items("arithmetic", 1, 0), endpoint, seed=0)


@pytest_asyncio.fixture
async def door() -> AsyncIterator[Door]:
    """Answers each request with the next of its statuses, and the last one for good."""
    made = Door()
    server = await asyncio.start_server(made.answer, "127.0.0.1", 0)
    made.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    async with server:
        yield made


class Door:
    def __init__(self) -> None:
        self.url = ""
        self.statuses = [200]
        self.num_asked = 0

    async def answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        await reader.readexactly(int(re.search(rb"(?i)content-length: (\d+)", head)[1]))
        status = self.statuses[min(self.num_asked, len(self.statuses) - 1)]
        self.num_asked += 1
        body = b'{"choices": [{"index": 0, "text": " 12", "finish_reason": "stop"}], "error": {"message": "why"}}'
        writer.write(b"HTTP/1.1 %d X\r\nconnection: close\r\ncontent-type: application/json\r\n" % status)
        writer.write(b"content-length: %d\r\n\r\n%s" % (len(body), body))
        await writer.drain()
        writer.close()


@pytest.mark.parametrize(
    ("status", "changes", "says"),
    [
        (401, {}, "--api-key-env"),
        (401, {"api_key": "k"}, "revoked"),
        (403, {"api_key": "k", "replica": "r"}, "--scope admin"),
        (403, {"api_key": "k"}, "tier flex"),
        (429, {"api_key": "k"}, "limits are used up"),
        (404, {}, "why"),
    ],
)
async def test_a_refusal_says_what_to_do(door: Door, tmp_path: Path, status: int, changes: dict[str, str], says: str):
    door.statuses = [status]
    with pytest.raises(UpstreamError, match=f"answered {status}: .*{says}"):
        await check(replace(Endpoint(door.url, "m", tmp_path), **changes))


async def test_an_endpoint_that_answers_is_good(door: Door, tmp_path: Path):
    await check(Endpoint(door.url, "m", tmp_path))


async def test_what_was_refused_is_not_asked_again(door: Door, tmp_path: Path):
    door.statuses = [403]
    with pytest.raises(UpstreamError, match="refused a request: 403"):
        await asyncio.to_thread(ask, make_items("arithmetic", 1, 0), Endpoint(door.url, "m", tmp_path), seed=0)
    assert door.num_asked == 1


async def test_what_failed_is_asked_again(door: Door, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("evals.harness.SHORTEST_WAIT_S", 0.0)
    door.statuses = [503, 200]
    (found,), _ = await asyncio.to_thread(
        ask, make_items("arithmetic", 1, 0), Endpoint(door.url, "m", tmp_path), seed=0
    )
    assert (found.answer, found.finish_reason, door.num_asked) == (" 12", "stop", 2)
