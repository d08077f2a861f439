"""What a gate takes of what is kept: one engine of a version, its newest cells, runs of the same items."""

from __future__ import annotations

import os
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import yaml

from evals import results
from evals.results import Evaluation
from serving.control.registered import RegisteredVersion
from serving.core.errors import BadRequest
from serving.core.policies.gate import Gate, GatePolicy
from tests.cells import STARTED_AT_S, make_cell
from tests.gated import cells, evaluation
from workbench.config import WorkbenchConfig, load_config
from workbench.config_layers import ConfigError
from workbench.drift import checked_path
from workbench.evaluation import BEFORE, path_of
from workbench.gates.gather import gather
from workbench.gates.kept import Kept
from workbench.sweeps.cells import CellResult
from workbench.sweeps.results import LoggedRuns, ResultsFolder

MODEL = "smollm2-135m"
FEW = {"pairs": 0.5}


def config_in(folder: Path, **content: object) -> WorkbenchConfig:
    path = folder / "workbench.yaml"
    path.write_text(yaml.safe_dump({"models": {MODEL: {"source": "/models/a"}}, **content}))
    return load_config(path, {})


@pytest.fixture
def config(tmp_path: Path) -> WorkbenchConfig:
    return config_in(tmp_path)


def keep(config: WorkbenchConfig, found: Evaluation, at_s: float, *, before: bool = False) -> None:
    path = path_of(config, asdict(found))
    path = path.with_suffix(BEFORE + path.suffix) if before else path
    results.write(found, path)
    os.utime(path, (at_s, at_s))


def small(version: str = "1", **changes: object) -> Evaluation:
    return replace(evaluation(version, FEW), **changes)


def keep_cells(config: WorkbenchConfig, *found: CellResult) -> None:
    folder = ResultsFolder(config.data_dir / "results", found[0].version * 16)
    folder.open({"cells": []})
    for one in found:
        folder.write_cell(one, [])
    folder.write_logged(LoggedRuns("uri", "parent", {one.measurement_id: "run" for one in found[:1]}))


def test_the_engine_is_that_of_the_newest_evaluation_that_is_asked_for(config: WorkbenchConfig) -> None:
    keep(config, small(engine="old"), 1.0)
    keep(config, small(engine="new"), 2.0)
    keep(config, small(engine="other", suite="nightly"), 3.0)
    keep_cells(config, make_cell(engine_fingerprint="swept"))
    assert Kept(config, MODEL, "1", ("gate",)).engine == "new"
    assert Kept(config, MODEL, "1", ("smoke",)).engine == "swept"
    assert Kept(config, MODEL, "2", ("gate",)).engine is None


def test_the_newest_measurement_of_each_cell_counts_with_its_run(config: WorkbenchConfig) -> None:
    logged = make_cell(sweep_digest="1" * 16)
    later = make_cell(sweep_digest="1" * 16, started_at_s=STARTED_AT_S + 10.0)
    stranger = make_cell(sweep_digest="1" * 16, started_at_s=STARTED_AT_S + 20.0, engine_fingerprint="other")
    wider = make_cell(sweep_digest="1" * 16, concurrency=8, started_at_s=STARTED_AT_S + 5.0)
    keep_cells(config, logged, later, wider, stranger)
    keep(config, small(engine=logged.engine_fingerprint), 1.0)
    found = Kept(config, MODEL, "1", ("gate",)).cells()
    assert {(one.result.spec.concurrency, one.result.started_at_s, one.mlflow_run_id) for one in found} == {
        (4, later.started_at_s, None),
        (8, wider.started_at_s, None),
    }


def test_a_run_of_the_same_items_is_preferred_and_the_one_before_is_found(config: WorkbenchConfig) -> None:
    keep(config, small(), 1.0)
    keep(config, small(concurrency=16), 2.0)
    keep(config, small(started_at="2026-01-01"), 3.0, before=True)
    kept = Kept(config, MODEL, "1", ("gate",))
    like = kept.evaluated("gate", small())
    assert like is not None and like.evaluation.concurrency == 8
    newest = kept.evaluated("gate")
    assert newest is not None and newest.evaluation.concurrency == 16
    assert kept.before(newest.evaluation) is None
    before = kept.before(like.evaluation)
    assert before is not None and before.evaluation.started_at == "2026-01-01"
    assert kept.evaluated("smoke") is None


def test_a_drift_check_that_cannot_be_read_is_named(config: WorkbenchConfig) -> None:
    keep(config, small(engine="e1"), 1.0)
    kept = Kept(config, MODEL, "1", ("gate",))
    assert kept.drift() is None
    path = checked_path(config, MODEL, "1", "e1")
    path.parent.mkdir(parents=True)
    for content in ("", "[]", '{"action": "same"}'):
        path.write_text(content)
        with pytest.raises(BadRequest, match=path.name):
            kept.drift()


@pytest.mark.parametrize(
    ("registered", "is_doubted"), [("weights-b", False), ("weights-b+engine:abc", False), ("weights-x", True)]
)
def test_results_of_other_weights_under_the_same_number_are_in_doubt(
    config: WorkbenchConfig, registered: str, is_doubted: bool
) -> None:
    for version in ("1", "2"):
        keep_cells(config, *cells(version))
    versions = [
        RegisteredVersion(MODEL, version, None, digest, None, None)
        for version, digest in (("1", "weights-a"), ("2", registered))
    ]
    doubts = gather(config, versions[0], versions[1]).record.evidence[Gate.PERFORMANCE].doubts
    assert bool(doubts) is is_doubted and (not doubts or "weights-x" in doubts[0])


def test_the_policy_stands_in_the_configuration(tmp_path: Path) -> None:
    assert config_in(tmp_path).gates.policy() == GatePolicy()
    found = config_in(tmp_path, gates={"suites": ["smoke"], "quality_tolerance": 0.05, "drift_may_miss": ["settings"]})
    assert found.gates.policy() == GatePolicy(suites=("smoke",), quality_tolerance=0.05, drift_may_miss=("settings",))


@pytest.mark.parametrize(
    ("gates", "why"),
    [
        ({"suites": ["gtae"]}, "gate"),
        ({"suites": []}, "suites"),
        ({"quality_tolerance": 2.0}, "quality_tolerance"),
        ({"quality_tolerence": 0.02}, "quality_tolerance"),
        ({"drift_may_miss": ["setings"]}, "settings"),
        ({"cost_metrics": ["usd"]}, "cost_metrics"),
    ],
)
def test_a_policy_that_cannot_be_is_refused_by_name(tmp_path: Path, gates: dict[str, object], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        config_in(tmp_path, gates=gates)
