"""Alerts: a line in `alerts.jsonl` always, a webhook where one is set. A webhook that fails fails nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from serving.telemetry.webhook import post
from workbench.schedule.files import append_json


@dataclass(frozen=True, slots=True)
class Alert:
    """What happened to a schedule. `kind` is the outcome of a run, or `overdue` for one that never came."""

    schedule: str
    kind: str
    text: str
    run_id: str | None = None
    mlflow_run_id: str | None = None
    report: str | None = None


def tell(
    alert: Alert,
    log: Path,
    webhook: str | None,
    *,
    now_s: float,
    sleep: Callable[[float], None] = time.sleep,
) -> str | None:
    """Writes the alert down and posts it; returns why the webhook did not take it, else None."""
    trouble = None if webhook is None else post(webhook, _shown(alert), sleep)
    append_json(log, asdict(alert) | {"at_s": now_s, "webhook": webhook is not None, "not_delivered": trouble})
    return trouble


def _shown(alert: Alert) -> dict[str, str | None]:
    """JSON whose `text` chat services show as it is."""
    return asdict(alert) | {"text": f"workbench schedule {alert.schedule}: {alert.text}"}
