"""A tuning in MLflow: one run, and a nested one of each trial."""

from __future__ import annotations

from dataclasses import asdict

from serving.core.errors import ServingError
from workbench.config import WorkbenchConfig
from workbench.run_fields import RunFields, content_key, with_intervals
from workbench.tracking import Tracker
from workbench.tuning.halving import Trial, Tuned, describe
from workbench.tuning.on_pool import Tuning
from workbench.tuning.run import GOODPUT, TUNING_FILE, kept_trials
from workbench.wiring import NotRunning, mlflow_uri


def log_tuning(config: WorkbenchConfig, tuning: Tuning, tuned: Tuned) -> tuple[str | None, str | None]:
    """The tuning as a run of the model's benchmarks: its run id, else why MLflow did not take it (it is on disk)."""
    parent, children = tuning_fields(tuning, tuned, kept_trials(tuning.folder, tuning.plan))
    try:
        tracker = Tracker(mlflow_uri(config))
        files = {"tuning": [tuning.folder / TUNING_FILE]}
        return tracker.log_family(f"benchmarks/{tuning.pool.model}", parent, children, files), None
    except NotRunning as error:
        return None, str(error)
    except ServingError as error:
        return None, error.message


def tuning_fields(tuning: Tuning, tuned: Tuned, trials: list[Trial]) -> tuple[RunFields, list[RunFields]]:
    """The tuning's run and one of each trial. A tuning that goes on is the same run, one that began anew another."""
    children = [_child(number, trial) for number, trial in enumerate(trials, start=1)]
    best, load = tuned.best, tuning.load
    parent = RunFields(
        key=f"{tuning.folder.name}/{children[0].key if children else 'empty'}",
        name=f"tuning of {tuning.pool.pool_id}",
        tags={"kind": "tuning", "reason": tuned.reason} | ({} if best is None else {"best": describe(best.flags)}),
        params={
            "pool": tuning.pool.pool_id,
            "shape": load.shape,
            "concurrency": load.concurrency,
            "num_configurations": len(tuning.plan.configurations),
            "slo_ttft_s": load.slo.ttft_s,
            "slo_tpot_s": load.slo.tpot_s,
        },
        metrics={"num_trials": float(len(trials))} | ({} if best is None else _goodput(best)),
        is_failed=best is None,
    )
    return parent, children


def _child(number: int, trial: Trial) -> RunFields:
    return RunFields(
        key=f"{number}-{content_key(asdict(trial))}",
        name=f"rung {trial.rung}: {describe(trial.flags)}",
        tags={"kind": "tuning-trial"} | ({} if trial.failure is None else {"failure": trial.failure[:5000]}),
        params={f"engine.{name}": value for name, value in trial.flags} | {"rung": trial.rung},
        metrics=_goodput(trial),
        is_failed=trial.failure is not None,
    )


def _goodput(trial: Trial) -> dict[str, float]:
    if trial.goodput_rps is None:
        return {}
    has_interval = trial.low is not None and trial.high is not None
    intervals = {GOODPUT: (trial.low or 0.0, trial.high or 0.0)} if has_interval else {}
    return with_intervals({GOODPUT: trial.goodput_rps}, intervals)
