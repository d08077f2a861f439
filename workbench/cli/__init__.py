"""The command line: parse, call a use case, exit with a documented code. A file a command group."""

from __future__ import annotations

import os
import sys

# Standard output is for answers alone: `--json` must stay one document.
QUIET = {
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
    "MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR": "false",
    "MLFLOW_LOGGING_LEVEL": "WARNING",
}


def main() -> None:
    """Entry point of the `workbench` command."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    from workbench.cli.app import run_app

    sys.exit(run_app(sys.argv[1:]))
