"""What notebooks share: frames of sweeps and traces, and a run in MLflow that keeps what one found.

Tables go to MLflow as CSV, which it shows, and figures as metrics.
"""

from __future__ import annotations

import math
import re
import tempfile
from collections.abc import Mapping, Sequence
from itertools import pairwise
from pathlib import Path

import pandas as pd

from workbench.connection import connected
from workbench.loadgen.traces import Trace
from workbench.sweeps.finished import Sweep
from workbench.wiring import NotRunning

STUDIES = "studies"
_NAME = re.compile(r"[a-z0-9_]+")


def log_study(
    title: str, tables: Mapping[str, pd.DataFrame], *, metrics: Mapping[str, float | None] | None = None
) -> str | None:
    """Logs a run of the experiment `studies`; returns its id, None without an MLflow.

    Args:
        title: of the run.
        tables: by name; each becomes `tables/NAME.csv`.
        metrics: figures by name; what is None or not finite is left out.

    Raises:
        ValueError: a table's name is not lower case letters, digits and underscores.
        RegistryUnavailable, RegistryRefused: MLflow does not answer, or said no.
    """
    odd = [name for name in tables if not _NAME.fullmatch(name)]
    if odd:
        raise ValueError(f"names of tables are lower case letters, digits and underscores, not {odd}")
    try:
        tracker = connected().tracker
    except NotRunning:
        return None
    figures = {name: value for name, value in (metrics or {}).items() if value is not None and math.isfinite(value)}
    with tempfile.TemporaryDirectory() as scratch:
        files = [Path(scratch) / f"{name}.csv" for name in tables]
        for path, table in zip(files, tables.values(), strict=True):
            table.to_csv(path, index=False)
        return tracker.log_run(STUDIES, title, tags={"kind": "study"}, metrics=figures, files={"tables": files})


def cost_rows(sweeps: Sequence[Sweep]) -> pd.DataFrame:
    """The cost tables of several sweeps as one. Raises ValueError: a sweep has no cell that gives a price."""
    return pd.concat([sweep.cost_table() for sweep in sweeps], ignore_index=True)


def trace_frame(trace: Trace, scale: float = 1.0) -> pd.DataFrame:
    """A row a request: when it comes, `scale` times as fast, the gap before it in seconds, its lengths in tokens."""
    times_s = [request.at_s / scale for request in trace.requests]
    return pd.DataFrame(
        {
            "at_s": times_s,
            "gap_s": [0.0, *(after - before for before, after in pairwise(times_s))],
            "num_prompt_tokens": [request.num_prompt_tokens for request in trace.requests],
            "num_output_tokens": [request.num_output_tokens for request in trace.requests],
        }
    )
