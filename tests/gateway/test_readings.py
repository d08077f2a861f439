"""Readings: what is asked of an engine, what counts as an answer, and what is kept of it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from evals import readings
from evals.readings import PROMPTS, Reference
from serving.core.errors import BadRequest, UpstreamError
from serving.engine.client import EngineClient
from tests.gateway.fleets import MODEL, MakeEngine

pytestmark = pytest.mark.gateway


class Scripted:
    """A replica that answers as vLLM does; `num_logprobs` of them."""

    def __init__(self, num_logprobs: int = 20) -> None:
        self.num_logprobs = num_logprobs
        self.paths: list[str] = []
        self.salts: set[str] = set()

    async def post_json(self, path: str, obj: Any, *, timeout_s: float = 0.0) -> Any:
        self.paths.append(path)
        if path == "/tokenize":
            return {"tokens": [1, 2, len(obj["messages"][0]["content"])]}
        assert obj["temperature"] == 0.0
        self.salts.add(obj["cache_salt"])
        top = [{"token": f"token_id:{n}", "logprob": -float(n + 1)} for n in range(self.num_logprobs)]
        content = [{"token": "token_id:7", "logprob": -1.0, "top_logprobs": top}]
        return {"choices": [{"logprobs": {"content": content}, "finish_reason": "stop"}]}


async def test_a_reading_holds_each_prompt_and_greedy_answer():
    replica = Scripted()
    reading = await readings.take(replica, "m")
    assert len(reading.next_tokens) == len(PROMPTS) == 60
    assert sum(reading.is_long) == 15
    assert len(reading.answers) == 32
    assert reading.answers[0].tokens == (7,)
    assert reading.next_tokens[0][0] == -1.0
    assert reading.settings is None
    assert replica.paths.count("/tokenize") == 60
    assert len(replica.salts) == 60 + 32, "a prompt must not find what another left in the prefix cache"


async def test_fewer_logprobs_than_asked_for_are_no_reading():
    with pytest.raises(UpstreamError, match="19 logprobs of the 20"):
        await readings.take(Scripted(19), "m")


async def test_an_engine_without_logprobs_is_an_error_and_not_the_same(make_engine: MakeEngine):
    engine = await make_engine()
    async with EngineClient(engine.url) as client:
        with pytest.raises(UpstreamError, match="did not answer with"):
            await readings.take(client, MODEL)


async def test_a_reference_is_kept_whole(tmp_path: Path):
    reading = await readings.take(Scripted(), "m")
    reference = Reference("m", "sha256:abc", "engine", "2026-01-01", reading, reading)
    path = readings.write(reference, tmp_path / "drift")
    assert path.name == "m-abc-engine.json"
    assert readings.read(path) == reference


def test_a_missing_or_broken_reference_says_what_to_do(tmp_path: Path):
    with pytest.raises(BadRequest, match="--take-reference"):
        readings.read(tmp_path / "none.json")
    (tmp_path / "broken.json").write_text("{}")
    with pytest.raises(BadRequest, match="take it anew"):
        readings.read(tmp_path / "broken.json")
