"""A gate from kept results to an approval, against a real MLflow: what is approved is the record that lies there."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from evals import results
from evals.drift import Action, Drift
from serving.clock import SystemClock
from serving.control.registry import Registry, mlflow_client
from serving.core import gate_record
from serving.core.state import Task
from serving.metering.spool import UsageSpool
from tests.gated import RIGHT, WEIGHTS, cells, evaluation
from tests.unit.usage_examples import an_event
from workbench.cli.app import run_app
from workbench.cli.exits import Exit
from workbench.config import load_config
from workbench.drift import checked_path
from workbench.evaluation import BEFORE, path_of
from workbench.releases import EVIDENCE_PATH
from workbench.sweeps.results import LoggedRuns, ResultsFolder


@dataclass
class Desk:
    """A folder with kept results of two versions, and commands run in it."""

    folder: Path
    model: str
    uri: str
    capsys: pytest.CaptureFixture[str]

    def run(self, *words: str) -> tuple[int, Any]:
        self.capsys.readouterr()
        code = run_app([*words, "--json", "--config", str(self.folder / "workbench.yaml")])
        shown = self.capsys.readouterr()
        return code, json.loads(shown.out) if shown.out else shown.err

    @property
    def tags(self) -> Mapping[str, str]:
        return Registry(self.uri).tags(self.model, "2")

    def keep(self, right: Mapping[str, float] = RIGHT) -> None:
        """A sweep, suite gate and a drift check of each version, measured just now."""
        config = load_config(self.folder / "workbench.yaml")
        now = datetime.now(UTC).isoformat(timespec="seconds")
        for version, accuracies in (("1", RIGHT), ("2", right)):
            found = replace(evaluation(version, accuracies), model=self.model, started_at=now)
            path = path_of(config, asdict(found))
            results.write(found, path)
            if version == "1":
                results.write(found, path.with_suffix(BEFORE + path.suffix))
            self._sweep(config.data_dir / "results", version)
        drift = Drift(Action.LABEL, ("changed",), 0.005, 0.005, 0.005, 0.001, 7, 0.9, 0.5, 18, ())
        checked = checked_path(config, self.model, "2", "engine-2")
        checked.parent.mkdir(parents=True, exist_ok=True)
        of = {"model": f"{self.model}@2", "checked_at": now, "reference_engine": "engine-1"}
        checked.write_text(json.dumps(asdict(drift) | of))

    def _sweep(self, results_dir: Path, version: str) -> None:
        began_s = time.time() - 60.0
        measured = [
            replace(one, model=self.model, started_at_s=began_s, ended_at_s=began_s + 10.0) for one in cells(version)
        ]
        folder = ResultsFolder(results_dir, f"sweep{version}")
        folder.open({"cells": []})
        for one in measured:
            folder.write_cell(one, [])
        ids = [replace(one, sweep_digest=one.sweep_digest).measurement_id for one in folder.cells()]
        folder.write_logged(LoggedRuns(self.uri, "0" * 32, dict.fromkeys(ids, "1" * 32)))


@pytest.fixture
def desk(tmp_path: Path, mlflow_uri: str, capsys: pytest.CaptureFixture[str]) -> Desk:
    model = f"gated-{time.time_ns()}"
    content = {"models": {model: {"source": "/models/a"}}, "stores": {"mlflow_tracking_uri": mlflow_uri}}
    (tmp_path / "workbench.yaml").write_text(yaml.safe_dump(content))
    registry = Registry(mlflow_uri)
    registry.register(model, "/models/a", WEIGHTS["1"], task=Task.GENERATE, first=True)
    registry.register(model, "/models/b", WEIGHTS["2"], task=Task.GENERATE)
    return Desk(tmp_path, model, mlflow_uri, capsys)


def test_from_kept_results_to_an_approval(desk: Desk) -> None:
    desk.keep()
    reference = f"{desk.model}@2"
    code, said = desk.run("gate", reference)
    assert (code, said["verdict"]) == (Exit.OK, "pass"), said
    assert Path(said["page"]).read_text().count("canary approve") == 1

    data = Registry(desk.uri).artifact(said["mlflow_run_id"], EVIDENCE_PATH)
    assert data is not None and gate_record.digest(data) == said["digest"]
    assert data == Path(said["evidence"]).read_bytes()
    assert desk.tags["gate.evidence"] == said["digest"] and desk.tags["gate.quality"] == "pass"
    shown = mlflow_client(desk.uri).get_model_version(desk.model, "2").description
    assert "**PASS**" in shown and said["digest"] in shown and said["mlflow_run_id"] in shown

    code, refusal = desk.run("canary", "approve", reference, "--digest", "f" * 16)
    assert code == Exit.FAILED and said["digest"][:16] in refusal
    assert desk.run("canary", "approve", reference, "--digest", said["digest"][:15])[0] == Exit.USAGE
    code, approved = desk.run("canary", "approve", reference, "--digest", said["digest"][:16])
    assert code == Exit.OK and approved["digest"] == said["digest"]
    assert desk.tags["approval"] == said["digest"][:16]

    with UsageSpool(desk.folder / ".workbench" / "usage", "0", clock=SystemClock()) as spool:
        spool.append(an_event(model=desk.model, version="2", request_id="r-7"))
    code, found = desk.run("lineage", "r-7")
    assert code == Exit.OK and (found["model"], found["version"]) == (desk.model, "2")
    assert found["registered"]["weights_digest"] == WEIGHTS["2"]
    assert (found["gate"]["digest"], found["gate"]["verdict"]) == (said["digest"], "pass")
    assert found["approval"]["approval"] == said["digest"][:16]
    assert (found["served"]["num_requests"], found["served"]["num_output_tokens"]) == (1, 32)
    assert [one["suite"] for one in found["evaluations"]] == ["gate"] and len(found["measurements"]) == 3
    assert any(text.startswith("rollouts:") for text in found["unknown"])


def test_a_drop_fails_and_cannot_be_approved_and_a_rejection_stands(desk: Desk) -> None:
    desk.keep(RIGHT | {"arithmetic": 0.3})
    reference = f"{desk.model}@2"
    code, said = desk.run("gate", reference)
    assert (code, said["verdict"], said["gates"]["quality"]["verdict"]) == (Exit.FAILED, "fail", "fail")
    code, refusal = desk.run("canary", "approve", reference, "--digest", said["digest"])
    assert code == Exit.FAILED and "the gates say fail" in refusal

    code, _ = desk.run("canary", "reject", reference, "--reason", "cannot add")
    assert code == Exit.OK and desk.tags["approval.rejected"] == "cannot add"
    desk.keep()
    code, said = desk.run("gate", reference)
    assert code == Exit.OK
    code, refusal = desk.run("canary", "approve", reference, "--digest", said["digest"])
    assert code == Exit.FAILED and "cannot add" in refusal
    words = ("canary", "approve", reference, "--digest", said["digest"], "--withdraw-rejection")
    assert desk.run(*words)[0] == Exit.OK
    assert "approval.rejected" not in desk.tags and desk.tags["approval"] == said["digest"]


def test_without_measurements_it_is_inconclusive_and_says_what_to_run(desk: Desk) -> None:
    code, said = desk.run("gate", f"{desk.model}@2", "--no-record")
    assert (code, said["verdict"], said["mlflow_run_id"]) == (Exit.FAILED, "inconclusive", None)
    assert "workbench sweep" in said["gates"]["performance"]["reason"]
    assert "workbench eval run" in said["gates"]["quality"]["reason"]
    assert "gate.evidence" not in desk.tags
    assert desk.run("gate", f"{desk.model}@1")[0] == Exit.USAGE
    assert desk.run("gate", desk.model)[0] == Exit.USAGE
    assert desk.run("canary", "approve", f"{desk.model}@2", "--digest", "0" * 16)[0] == Exit.FAILED
