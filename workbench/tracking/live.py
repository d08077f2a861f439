"""What a run in MLflow shows while it is being measured: requests that have ended, and how many a second.

    load client ── on_requests(ended, planned) ──▶ a line into a pipe, every few seconds ──▶ live_child.py ──▶ MLflow

Tokens are not among them: the client parses answers after a run, so that nothing but moving bytes is done in it.
"""

from __future__ import annotations

import base64
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from mlflow import MlflowClient
from mlflow.entities import Metric
from mlflow.utils.credentials import read_mlflow_creds

from serving.control.registry import mlflow_errors
from serving.core.errors import ServingError

EVERY_S = 5.0
STOP_TIMEOUT_S = 5.0
CHILD = Path(__file__).with_name("live_child.py")


class LiveRun:
    """A run in MLflow whose metrics follow a measurement; `start` it, feed it, and `stop` or `abandon` it.

    When MLflow stops answering, nothing more is sent and `trouble` says why: the measurement goes on.

    Args:
        client: of MLflow.
        run_id: a run that is running.
        every_s: seconds between two points.
    """

    def __init__(self, client: MlflowClient, run_id: str, *, every_s: float = EVERY_S) -> None:
        self.run_id = run_id
        self.trouble: str | None = None
        self._client = client
        self._every_s = every_s
        self._ended, self._planned = 0, 0
        self._child: subprocess.Popen[bytes] | None = None
        self._started_s = self._sent_s = time.monotonic()
        self._num_sent = 0

    def start(self) -> None:
        """Begins to send, from a process that inherits the caller's cores; a server that is none gets the end alone."""
        self._started_s = self._sent_s = time.monotonic()
        url = self._client.tracking_uri.rstrip("/")
        if not url.startswith(("http://", "https://")):
            return
        self._child = subprocess.Popen(
            [sys.executable, "-I", str(CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._write({"url": url, "headers": _headers()})

    def on_requests(self, ended: int, planned: int) -> None:
        """Takes how far the measurement is: a comparison, and every few seconds a write into a pipe."""
        self._ended, self._planned = ended, planned
        if self._child is not None and time.monotonic() - self._sent_s >= self._every_s:
            points = [dict(metric) for metric in self._points()]
            self._write({"run_id": self.run_id, "metrics": [_sent(point) for point in points]})

    def stop(self) -> None:
        """Ends sending, with a last point; the run goes on, for what was measured comes into it."""
        if self._child is not None:
            self._end(self._child)
            self._child = None
        if self.trouble is None and self._ended > self._num_sent:
            points = self._points()
            self._tell(lambda: self._client.log_batch(self.run_id, metrics=points))

    def abandon(self) -> None:
        """As `stop`, and ends the run as one that broke off."""
        self.stop()
        self._tell(lambda: self._client.set_terminated(self.run_id, "KILLED"))

    def _points(self) -> list[Metric]:
        now_s, ended = time.monotonic(), self._ended
        figures = {
            "live/num_ended": float(ended),
            "live/request_rps": (ended - self._num_sent) / max(now_s - self._sent_s, 1e-3),
        }
        if self._planned:
            figures["live/done_frac"] = ended / self._planned
        step = round(now_s - self._started_s)
        self._num_sent, self._sent_s = ended, now_s
        at_ms = round(time.time() * 1000)
        return [Metric(name, value, at_ms, step) for name, value in figures.items()]

    def _write(self, message: dict[str, object]) -> None:
        if self._child is None or self._child.stdin is None or self.trouble is not None:
            return
        try:
            # Far less than a pipe holds, so that it never waits.
            os.write(self._child.stdin.fileno(), json.dumps(message).encode() + b"\n")
        except OSError as error:
            self.trouble = f"live metrics ended: {error}"

    def _end(self, child: subprocess.Popen[bytes]) -> None:
        """The child ends with its input; what it said is why it ended before."""
        try:
            _, said = child.communicate(timeout=STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            child.kill()
            _, said = child.communicate()
            said = said or f"it did not end within {STOP_TIMEOUT_S:g} s".encode()
        if said:
            self.trouble = said.decode(errors="replace").strip()

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            with mlflow_errors(self._client.tracking_uri):
                call()
        except ServingError as error:
            self.trouble = error.message


def _sent(metric: dict[str, object]) -> dict[str, object]:
    return {name: metric[name] for name in ("key", "value", "timestamp", "step")}


def _headers() -> dict[str, str]:
    """Who we are, as MLflow's own client says it: a token, or a name with its password."""
    token, known = os.environ.get("MLFLOW_TRACKING_TOKEN"), read_mlflow_creds()
    if known.username and known.password:
        pair = base64.b64encode(f"{known.username}:{known.password}".encode()).decode()
        return {"Authorization": f"Basic {pair}"}
    return {"Authorization": f"Bearer {token}"} if token else {}
