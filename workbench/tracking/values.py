"""Metrics and parameters on their way to MLflow."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping

from mlflow import MlflowClient
from mlflow.entities import Metric, Param

from workbench import run_fields


def log_values(
    client: MlflowClient,
    run_id: str,
    params: Mapping[str, object],
    metrics: Mapping[str, float],
    at_ms: int | None = None,
) -> None:
    """Logs them at once; `at_ms` is when the metrics were measured, now when None.

    Raises:
        ValueError: a metric is NaN or infinite.
    """
    for name, value in metrics.items():
        if not math.isfinite(value):
            raise ValueError(f"metric {name} is {value}: MLflow would store it as another number")
    at_ms = round(time.time() * 1000) if at_ms is None else at_ms
    client.log_batch(
        run_id,
        metrics=[Metric(name, float(value), at_ms, 0) for name, value in metrics.items()],
        params=[Param(name, str(value)[: run_fields.MAX_VALUE_LENGTH]) for name, value in params.items()],
    )
