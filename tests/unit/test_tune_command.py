"""What `workbench tune` refuses, and what it would try."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from workbench.cli import tune
from workbench.cli.app import run_app
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import load_config
from workbench.stack.state import PoolFacts, ProcessRecord, StackState

ROOT = Path(__file__).parents[2]
FILE = str(ROOT / "workbench.yaml")


def test_a_dry_run_prints_the_configurations_the_one_in_use_first(capsys: pytest.CaptureFixture[str]) -> None:
    vary = ("--vary", "max_num_batched_tokens=256,512", "--vary", "enable_chunked_prefill=true,false")
    assert run_app(["tune", "smollm2-135m", *vary, "--dry-run", "--json", "--config", FILE]) == Exit.OK
    shown = json.loads(capsys.readouterr().out)
    assert shown["configurations"][0] == "enable_chunked_prefill=true, max_num_batched_tokens=512"
    assert len(shown["configurations"]) == 4


@pytest.mark.parametrize(
    "words",
    [("smollm2-135m", "--vary", "colour=1,2"), ("smollm2-135m", "--vary", "block_size"), ("nope", "--vary", "a=1")],
)
def test_what_cannot_be_tuned_is_a_usage_error(words: tuple[str, ...]) -> None:
    assert run_app(["tune", *words, "--config", FILE]) == Exit.USAGE


def test_an_engine_is_not_tried_on_the_cores_of_one_that_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    config = load_config(ROOT / "workbench.yaml", env={})
    pool = config.pools[0]
    nobody = ProcessRecord("supervisor", 1, 0, "")
    monkeypatch.setattr(tune, "running_stack", lambda config: StackState(nobody))
    tune.refuse_company(config, pool)
    state = StackState(nobody, pools={pool.pool_id: PoolFacts("/w", {}, {}, {})})
    monkeypatch.setattr(tune, "running_stack", lambda config: state)
    with pytest.raises(CommandFailed, match="workbench pool stop"):
        tune.refuse_company(config, pool)
