"""Two endpoints measured in turns: the slower one is found, and no run meets what an earlier one left in a cache."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from pathlib import Path

import pytest

from serving.engine.fake import FakeEngine, FakeSettings
from tests.measured import make_vocabulary
from workbench.benchmark.turns import SpecError, in_turns, judged, request_of
from workbench.cli.app import run_app
from workbench.cli.exits import Exit

NUM_PAIRS = 6
METRIC = "tpot_s/p50"


@pytest.fixture(autouse=True)
def _a_late_client_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether a run of a late client is refused is tested elsewhere; here a busy machine must not decide."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("workbench.loadgen.client_error.MAX_SEND_LAG_S", 60.0)
    monkeypatch.setattr("workbench.loadgen.client_error.MAX_LOOP_LAG_S", 60.0)


@pytest.fixture
def tokenizer(tmp_path: Path) -> str:
    make_vocabulary(tmp_path / "weights")
    return str(tmp_path / "weights")


def settings(itl_ms: float) -> FakeSettings:
    return FakeSettings(model="m", ttft_ms=1.0, itl_ms=itl_ms, block_size=16)


async def test_the_slower_endpoint_is_found_by_runs_in_turns(
    tokenizer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    async with FakeEngine(settings(2.0)) as fast, FakeEngine(settings(25.0)) as slow:
        words = ["bench", "ab", fast.url, slow.url, "--model", "m", "--tokenizer", tokenizer, "--pairs", str(NUM_PAIRS)]
        words += ["--workload", "completion:prompt=24,output=6", "--requests", "24", "--metric", METRIC, "--json"]
        assert await asyncio.to_thread(run_app, [*words, "--fail-on-worse"]) == Exit.FAILED
        prompts = Counter(json.dumps(log.body["prompt"]) for log in (*fast.log.ended, *slow.log.ended))
    told = json.loads(capsys.readouterr().out)
    (outcome,) = told["outcomes"]
    assert outcome["num_pairs"] == NUM_PAIRS
    (compared,) = outcome["compared"]
    assert compared["verdict"] == "worse" and compared["ratio"] > 3 and told["is_worse"]
    assert set(prompts.values()) == {1}  # fresh in every run of either side
    starts = sorted(
        [(run["started_at_s"], "A") for run in told["a"]] + [(run["started_at_s"], "B") for run in told["b"]]
    )
    sides = "".join(side for _, side in starts)
    assert {sides[at : at + 2] for at in range(0, len(sides), 2)} <= {"AB", "BA"}


async def test_too_few_pairs_give_no_verdict_and_wrong_names_are_said(tokenizer: str) -> None:
    async with FakeEngine(settings(1.0)) as engine:
        more = {"tokenizer": tokenizer, "num_requests": 24, "workload": "completion:prompt=24,output=6"}
        request = request_of(engine.url, "m", **more)
        pair = await in_turns(None, request, request, num_pairs=2, seed=1)
        assert not judged(pair, metrics=[METRIC]).has_verdict
        with pytest.raises(ValueError, match="one pair at least"):
            await in_turns(None, request, request, num_pairs=0)
    with pytest.raises(SpecError, match="is an address: say which model"):
        request_of("http://box:8000", None)
