"""`workbench eval compare` on files: verdicts, exit codes, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from evals import results
from tests.unit.test_suite_compare import CHAMPION, an_evaluation
from workbench.cli.app import run_app
from workbench.cli.exits import Exit

CONFIG = str(Path(__file__).parents[2] / "workbench.yaml")


@pytest.fixture
def champion(tmp_path: Path) -> str:
    results.write(CHAMPION, tmp_path / "champion.json")
    return str(tmp_path / "champion.json")


def test_a_pass_is_code_0_and_says_all_figures(champion: str, capsys: pytest.CaptureFixture[str]):
    code = run_app(["eval", "compare", champion, champion, "--again", champion, "--config", CONFIG, "--json"])
    found = json.loads(capsys.readouterr().out)
    assert code == Exit.OK
    assert found["verdict"] == "pass"
    assert found["pool"]["smallest_seen"] > 0
    assert found["noise_floor"]["discordant_frac"] == 0.0
    assert found["tasks"]["format"]["p_holm"] is None


def test_a_drop_is_code_1(champion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    worse = tmp_path / "worse.json"
    results.write(an_evaluation({"copying": 0.3, "arithmetic": 0.4, "format": 0.9}), worse)
    assert run_app(["eval", "compare", champion, str(worse), "--config", CONFIG]) == Exit.FAILED
    assert "copying dropped by 20.0 points" in capsys.readouterr().out


def test_other_items_are_a_wrong_command_line(champion: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    other = tmp_path / "other.json"
    results.write(replace(CHAMPION, digest="other"), other)
    assert run_app(["eval", "compare", champion, str(other), "--config", CONFIG]) == Exit.USAGE
    assert "same suite and seed" in capsys.readouterr().err


def test_nothing_kept_says_how_to_make_it(champion: str, capsys: pytest.CaptureFixture[str]):
    assert run_app(["eval", "compare", champion, "never-asked@7", "--config", CONFIG]) == Exit.FAILED
    assert "workbench eval run never-asked@7" in capsys.readouterr().err


def test_the_noise_floor_is_of_two_runs_and_never_of_one_with_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setenv("WORKBENCH__DATA_DIR", str(tmp_path))
    newest = tmp_path / "evals" / "m" / "gate-s0-c8-v1-engine-digest.json"
    results.write(CHAMPION, newest)
    command = ["eval", "compare", "m@1", "m@1", "--again", "m@1", "--config", CONFIG, "--json"]
    assert run_app(command) == Exit.FAILED
    assert "asked once only" in capsys.readouterr().err
    newest.replace(newest.with_suffix(".before.json"))
    results.write(an_evaluation({"copying": 0.501, "arithmetic": 0.4, "format": 0.9}), newest)
    assert run_app(command) == Exit.OK
    floor = json.loads(capsys.readouterr().out)["noise_floor"]
    assert floor["discordant_frac"] == pytest.approx(1 / 2000)
