"""What is kept of one version below the data folder: cells of sweeps, evaluations, the last drift check.

A version is judged as one engine serves it: that of its newest evaluation of a suite that is asked for, else that of
its newest cell. What another engine of the same version did counts for nothing.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evals import results
from evals.results import Evaluation
from serving.core.errors import BadRequest
from serving.core.gate_record import Source
from serving.core.policies.gate import digest_of
from workbench import evaluation
from workbench.config import WorkbenchConfig
from workbench.costs.table import MeasuredCell
from workbench.drift import checked_path
from workbench.sweeps.results import folders
from workbench.wiring import layout

_DRIFT_FIELDS = {
    *("model", "action", "kl_mean", "kl_p", "agreement_frac", "reasons", "not_seen"),
    *("checked_at", "reference_engine"),
}


@dataclass(frozen=True, slots=True)
class KeptEvaluation:
    """An evaluation with the file that holds it."""

    evaluation: Evaluation
    path: Path
    sha256: str

    @property
    def source(self) -> Source:
        """Where its figures come from."""
        found = self.evaluation
        return Source("evaluation", f"{found.suite} of {found.model}@{found.version}", self.sha256, found.mlflow_run_id)


@dataclass(frozen=True, slots=True)
class KeptDrift:
    """A drift check as `workbench drift` wrote it."""

    found: Mapping[str, Any]
    path: Path
    sha256: str

    @property
    def source(self) -> Source:
        """Where its figures come from."""
        return Source("drift", f"drift of {self.found['model']}", self.sha256, self.found.get("mlflow_run_id"))


class Kept:
    """All of one version.

    Raises:
        ResultsBroken: a file of a sweep cannot be read; names it.
        BadRequest: so for an evaluation or a drift check.
    """

    def __init__(self, config: WorkbenchConfig, model: str, version: str, suites: Sequence[str]) -> None:
        self._config = config
        self.model, self.version = model, version
        self._cells = list(_cells(config, model, version))
        self._evaluations = [_read(path) for path in evaluation.paths(config, model, version, None)]
        self.engine = self._engine(suites)

    def cells(self) -> list[MeasuredCell]:
        """The newest measurement of each cell under its engine, on the machine of the newest of them."""
        own = [one for one in self._cells if one.result.engine_fingerprint == self.engine]
        if not own:
            return []
        machine = own[-1].result.hardware_fingerprint
        newest = {one.result.spec: one for one in own if one.result.hardware_fingerprint == machine}
        return list(newest.values())

    @property
    def evaluations(self) -> list[Evaluation]:
        """Every evaluation of the version, of any engine, oldest first."""
        return [one.evaluation for one in self._evaluations]

    def covers(self) -> Mapping[str, Any]:
        """What its engine's fingerprint is a digest of; empty where nothing measured says so."""
        return next(
            (one.result.engine_covers for one in self._cells if one.result.engine_fingerprint == self.engine), {}
        )

    def evaluated(self, suite: str, like: Evaluation | None = None) -> KeptEvaluation | None:
        """Its newest run of a suite; that of the same items at the same concurrency where there is one."""
        own = [
            one for one in self._evaluations if (one.evaluation.suite, one.evaluation.engine) == (suite, self.engine)
        ]
        alike = [one for one in own if like is not None and _asked(one.evaluation) == _asked(like)]
        return next(iter([*reversed(alike), *reversed(own)]), None)

    def before(self, of: Evaluation) -> KeptEvaluation | None:
        """The run of the same that this one took the place of."""
        paths = evaluation.paths(self._config, self.model, self.version, of.suite, before=True)
        found = [_read(path) for path in paths]
        same = [one for one in found if one.evaluation.engine == of.engine and _asked(one.evaluation) == _asked(of)]
        return same[-1] if same else None

    def drift(self) -> KeptDrift | None:
        """The last check under its engine."""
        path = checked_path(self._config, self.model, self.version, self.engine or "")
        if not path.is_file():
            return None
        try:
            data = path.read_bytes()
            found = json.loads(data)
            if missing := _DRIFT_FIELDS - found.keys():
                raise ValueError(f"without {', '.join(sorted(missing))}")
            return KeptDrift(found, path, hashlib.sha256(data).hexdigest())
        except (OSError, ValueError, AttributeError) as error:
            raise BadRequest(f"{path} holds no drift check ({error}): run `workbench drift` again") from error

    def _engine(self, suites: Sequence[str]) -> str | None:
        asked = [one.evaluation.engine for one in self._evaluations if one.evaluation.suite in suites]
        return next(iter([*reversed(asked), *(one.result.engine_fingerprint for one in reversed(self._cells))]), None)


def cell_sources(cells: Iterable[MeasuredCell]) -> tuple[Source, ...]:
    """Where the figures of cells come from; the digest is that of the cell as canonical JSON."""
    return tuple(
        Source(
            "cell",
            f"{one.result.spec.cell_id} of {one.result.model}@{one.result.version}",
            digest_of(one.result.to_json()),
            one.mlflow_run_id,
        )
        for one in cells
    )


def _cells(config: WorkbenchConfig, model: str, version: str) -> Iterable[MeasuredCell]:
    """Oldest first, with the MLflow run of each."""
    found = []
    for folder in folders(layout(config).results_dir):
        logged = folder.logged()
        runs = {} if logged is None else logged.runs
        found += [
            MeasuredCell(cell, runs.get(cell.measurement_id))
            for cell in folder.cells()
            if (cell.model, cell.version) == (model, version)
        ]
    return sorted(found, key=lambda one: one.result.started_at_s)


def _asked(one: Evaluation) -> tuple[str, int]:
    return one.digest, one.concurrency


def _read(path: Path) -> KeptEvaluation:
    try:
        return KeptEvaluation(results.read(path), path, hashlib.sha256(path.read_bytes()).hexdigest())
    except (OSError, ValueError) as error:
        raise BadRequest(str(error)) from error
