"""What every benchmark shares: its JSON, its exit code, and what it refuses to report."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.console import Console

from benchmarks import harness
from benchmarks.harness import Bar, Mode, at_least, at_most, equal_to


def run(*bars: Bar, argv: tuple[str, ...] = ()) -> int:
    return harness.run("example", lambda mode, console: bars, argv)


def test_the_result_is_written_with_machine_and_commit(tmp_path: Path):
    asked: list[Mode] = []

    def measure(mode: Mode, console: Console) -> list[Bar]:
        asked.append(mode)
        return [at_most("error", 0.5, 1.0), at_least("speed", 3.0, 5.0, judged=False), equal_to("lost", 0, 0)]

    file = tmp_path / "result.json"
    assert harness.run("example", measure, ["--quick", "--json", str(file)]) == 0
    assert asked == [Mode.QUICK]
    result = json.loads(file.read_text())
    assert set(result) == {"mode", "bars", "machine", "commit"}
    assert result["mode"] == "quick"
    assert result["bars"] == [
        {"name": "error", "value": 0.5, "bar": "<= 1", "ok": True},
        {"name": "speed", "value": 3.0, "bar": ">= 5", "ok": None},
        {"name": "lost", "value": 0, "bar": "= 0", "ok": True},
    ]
    assert set(result["machine"]) == {"cpu", "num_cores", "memory_gb", "system", "python"}
    assert result["machine"]["num_cores"] >= 1
    assert result["commit"]


def test_the_full_form_is_the_default():
    assert harness.run("example", lambda mode, console: [equal_to("mode", mode.value, "full")], []) == 0


@pytest.mark.parametrize(
    "failed", [at_most("a", 2.0, 1.0), at_least("a", 1.0, 2.0), equal_to("a", "x", "y")], ids=lambda bar: bar.bar
)
def test_a_bar_that_fails_exits_1_and_the_result_is_written_all_the_same(failed: Bar, tmp_path: Path):
    file = tmp_path / "result.json"
    assert run(at_most("holds", 0.0, 1.0), failed, argv=("--json", str(file))) == 1
    assert [bar["ok"] for bar in json.loads(file.read_text())["bars"]] == [True, False]


def test_a_bar_that_is_only_shown_does_not_fail():
    assert run(at_most("holds", 0.0, 1.0), at_most("shown", 2.0, 1.0, judged=False)) == 0


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("judged", [True, False])
def test_a_figure_that_is_no_number_is_refused(value: float, judged: bool, tmp_path: Path):
    file = tmp_path / "result.json"
    with pytest.raises(ValueError, match="must be finite"):
        run(at_most("holds", 0.0, 1.0), at_most("broken", value, 1.0, judged=judged), argv=("--json", str(file)))
    assert not file.exists()


@pytest.mark.parametrize("bars", [(), (at_most("shown", 0.0, 1.0, judged=False),)])
def test_what_judged_nothing_is_refused(bars: tuple[Bar, ...]):
    with pytest.raises(ValueError, match="judged nothing"):
        run(*bars)
