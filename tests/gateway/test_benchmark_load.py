"""The load client of benchmarks knows when an answer is whole, and says so when one is not."""

from __future__ import annotations

from collections.abc import AsyncIterator

import orjson
import pytest

from benchmarks import load
from serving.engine.fake import FakeEngine, FakeSettings
from tests.gateway.talk import CHAT, FAST, HELLO, USAGE


@pytest.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(FakeSettings(**FAST)) as engine:
        yield engine


def request(**fields: object) -> bytes:
    return load.encode(CHAT, orjson.dumps({**HELLO, "max_tokens": 3, **fields}))


async def test_a_closed_loop_gets_every_answer_whole(engine: FakeEngine) -> None:
    unary = await load.closed_loop([engine.url], lambda _: request(), 10, 4)
    streams = await load.closed_loop([engine.url], lambda _: request(**USAGE), 10, 4)
    assert all(answer.content.endswith(b"}") and answer.status == 200 for answer in unary)
    assert all(answer.content.count(b"data: {") == 5 and b"[DONE]" in answer.content for answer in streams)
    assert all(0 < answer.ttft_s <= answer.e2e_s for answer in (*unary, *streams))


async def test_a_paced_load_sends_no_request_before_it_is_due(engine: FakeEngine) -> None:
    answers = await load.paced([engine.url], lambda _: request(), 8, rate_rps=200.0)
    sent_s = sorted(answer.sent_at_s for answer in answers)
    assert sent_s[-1] - sent_s[0] >= 7 / 200.0 - 0.01


@pytest.mark.parametrize("fault", [{"status": 503}, {"die_after_tokens": 1}])
async def test_an_answer_that_breaks_is_an_error(engine: FakeEngine, fault: dict[str, int]) -> None:
    with pytest.raises(load.BrokenAnswer, match=r"status 503|closed amid"):
        await load.closed_loop([engine.url], lambda _: request(**USAGE, fake=fault), 4, 2)
