"""The child of a scheduled run: executes the notebook and writes down what came of it. Ends with its parent."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

from nbclient.exceptions import DeadKernelError

from workbench.config import load_config
from workbench.config_layers import ConfigError
from workbench.report import ArtifactSink, NotebookFailed, Report, ReportError, ReportNotLogged, run_report
from workbench.wiring import NotRunning, mlflow_uri

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Reads the request from standard input."""
    request = json.load(sys.stdin)
    end_with_parent(request["parent"])
    result = executed(request)
    path = Path(request["result"])
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(result), encoding="utf-8")
    partial.replace(path)


def end_with_parent(parent: int) -> None:
    """Asks the kernel to end this process when its parent dies: nobody would keep its time limit (Linux)."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        sys.exit(1)


def executed(request: dict[str, Any]) -> dict[str, Any]:
    """The outcome as JSON."""
    try:
        config = load_config(request["config_file"])
        report = run_report(
            request["notebook"],
            request["parameters"],
            Path(request["out_dir"]),
            notebooks_dir=Path(request["notebooks_dir"]),
            config_file=config.file,
            artifacts=_mlflow(config),
            on_progress=_hand_on,
        )
    except ReportNotLogged as error:
        return _made(error.report) | {"remarks": [str(error)]}
    except NotebookFailed as error:
        return {"outcome": "failed", "reason": str(error), "notebook": str(error.notebook)}
    except (ReportError, ConfigError) as error:
        return {"outcome": "failed", "reason": str(error)}
    except DeadKernelError:
        return {"outcome": "interrupted", "reason": "the notebook's kernel died"}
    return _made(report)


def _hand_on(line: str) -> None:
    """The parent passes lines on."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def _made(report: Report) -> dict[str, Any]:
    return {
        "outcome": "ok",
        "notebook": str(report.notebook),
        "html": str(report.html),
        "mlflow_run_id": report.mlflow_run_id,
    }


def _mlflow(config: Any) -> ArtifactSink | None:
    try:
        uri = mlflow_uri(config)
    except NotRunning:
        return None
    from workbench.tracking import Tracker

    return Tracker(uri)


if __name__ == "__main__":
    main()
