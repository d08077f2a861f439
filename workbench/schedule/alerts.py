"""Alerts: a line in `alerts.jsonl` always, a webhook where one is set. A webhook that fails fails nothing else."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

from workbench.schedule.files import append_json

TIMEOUT_S = 10.0
PAUSES_S = (0.0, 1.0, 4.0)


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
    trouble = None if webhook is None else _post(alert, webhook, sleep)
    append_json(log, asdict(alert) | {"at_s": now_s, "webhook": webhook is not None, "not_delivered": trouble})
    return trouble


def _post(alert: Alert, url: str, sleep: Callable[[float], None]) -> str | None:
    """Posts JSON whose `text` chat services show as it is. The address may hold a secret: it is in no message."""
    body = json.dumps(asdict(alert) | {"text": f"workbench schedule {alert.schedule}: {alert.text}"}).encode()
    request = urllib.request.Request(url, body, {"content-type": "application/json"}, method="POST")
    trouble = ""
    for pause_s in PAUSES_S:
        sleep(pause_s)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S):
                return None
        except urllib.error.HTTPError as error:
            trouble = f"the webhook answered {error.code}"
            if error.code < 500 and error.code != 429:
                break
        except OSError as error:
            trouble = f"the webhook does not answer ({getattr(error, 'reason', error)})"
    return trouble
