"""The ports of a run on this machine: results on disk, MLflow, the cost table's command, webhooks."""

from __future__ import annotations

import secrets
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from serving.core.errors import ServingError
from workbench.config import WorkbenchConfig
from workbench.schedule.book import Schedule
from workbench.schedule.history import Run
from workbench.schedule.job import Ports
from workbench.schedule.places import book_of, send
from workbench.schedule.rule import Judged, measured_since
from workbench.wiring import NotRunning, layout, mlflow_uri

OPERATIONS = "operations"
COST_TABLE_TIMEOUT_S = 600.0


def ports_of(config: WorkbenchConfig, on_line: Callable[[str], None]) -> Ports:
    """The real ports."""
    return Ports(
        measured=partial(measured_since, layout(config).results_dir),
        log_run=partial(_log_run, config),
        cost_table=partial(_cost_table, config.file),
        alert=partial(send, book_of(config)),
        now_s=time.time,
        new_id=lambda: time.strftime("%Y%m%d-%H%M%S-", time.gmtime()) + secrets.token_hex(2),
        on_line=on_line,
    )


def _log_run(config: WorkbenchConfig, schedule: Schedule, run: Run, judged: Judged) -> str | None:
    """A run of `operations`; the report's files are in it when the notebook recorded no run of its own."""
    try:
        uri = mlflow_uri(config)
    except NotRunning:
        return "MLflow does not run: the run is on disk alone"
    from workbench.tracking import Tracker

    metrics = {"num_cells": float(run.num_cells), "attempt": float(run.attempt)}
    if judged.worst_loss_frac is not None:
        metrics["worst_loss_frac"] = judged.worst_loss_frac
    if run.ended_at_s is not None:
        metrics["duration_s"] = run.ended_at_s - run.attempt_began_at_s
    files = [Path(path) for path in (run.notebook, run.html) if path is not None and run.mlflow_run_id is None]
    try:
        Tracker(uri).log_run(
            OPERATIONS,
            f"schedule {schedule.name} {run.run_id}",
            tags={"kind": "scheduled-run", "schedule": schedule.name, "outcome": str(run.outcome)}
            | ({"reason": run.reason[:1000]} if run.reason else {})
            | ({"sweep_run_id": run.mlflow_run_id} if run.mlflow_run_id else {}),
            params={"cron": schedule.cron, "notebook": schedule.notebook, **schedule.parameters},
            metrics=metrics,
            files={"report": files} if files else None,
        )
    except ServingError as error:
        return f"not in MLflow: {error}"
    return None


def _cost_table(config_file: Path, publishes: bool) -> str | None:
    """Runs `workbench cost-table build`: what it says when it fails."""
    command = [sys.executable, "-m", "workbench", "cost-table", "build", "--config", str(config_file)]
    command += ["--publish"] if publishes else []
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=COST_TABLE_TIMEOUT_S, check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return str(error)
    return None if done.returncode == 0 else (done.stderr.strip().splitlines() or ["it failed"])[-1]
