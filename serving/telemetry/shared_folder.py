"""Makes the metrics of several processes one page; imported before `prometheus_client`, which decides then."""

from __future__ import annotations

import os
import sys
from pathlib import Path

VARIABLE = "PROMETHEUS_MULTIPROC_DIR"


def share(folder: Path) -> None:
    """Makes this process' metrics part of those in `folder`.

    Raises:
        RuntimeError: prometheus_client is already imported.
    """
    if "prometheus_client" in sys.modules:
        raise RuntimeError("share() comes before the first import of prometheus_client")
    folder.mkdir(parents=True, exist_ok=True)
    os.environ[VARIABLE] = str(folder)


def folder() -> Path | None:
    """The folder that this process shares, if it does."""
    value = os.environ.get(VARIABLE)
    return None if value is None else Path(value)


def pids_with_gauges(shared: Path) -> set[int]:
    """Processes whose live gauges lie in the folder, dead ones included: they wait to be swept away."""
    return {int(file.stem.rpartition("_")[2]) for file in shared.glob("gauge_live*_*.db")}


def is_alive(pid: int) -> bool:
    """Whether a process with this id exists."""
    return Path(f"/proc/{pid}").exists()
