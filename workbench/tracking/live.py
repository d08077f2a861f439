"""What a run in MLflow shows while it is being measured: requests that have ended, and how many a second.

    load client ── on_requests(ended, planned) ──▶ two numbers in memory ── every few seconds ──▶ MLflow

Tokens are not among them: the client parses answers after a run, so that nothing but moving bytes is done in it.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from threading import Event, Thread

from mlflow import MlflowClient
from mlflow.entities import Metric

from serving.control.registry import mlflow_errors
from serving.core.errors import ServingError

EVERY_S = 5.0
STOP_TIMEOUT_S = 10.0
SWITCH_INTERVAL_S = 0.0005
"""How long the load client may wait for the interpreter while a figure is sent; 5 ms, the usual, would be stamped."""


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
        self._done = Event()
        self._thread = Thread(target=self._send_on, name="workbench-live", daemon=True)
        self._usual_interval_s = sys.getswitchinterval()

    def start(self) -> None:
        """Begins to send, from a thread that inherits the caller's cores."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._thread.start()

    def on_requests(self, ended: int, planned: int) -> None:
        """Takes how far the measurement is; costs nothing that could be measured."""
        self._ended, self._planned = ended, planned

    def stop(self) -> None:
        """Sends the last point and ends sending; the run goes on, for what was measured comes into it."""
        self._done.set()
        self._thread.join(STOP_TIMEOUT_S)
        sys.setswitchinterval(self._usual_interval_s)

    def abandon(self) -> None:
        """As `stop`, and ends the run as one that broke off."""
        self.stop()
        self._tell(lambda: self._client.set_terminated(self.run_id, "KILLED"))

    def _send_on(self) -> None:
        started_s = sent_s = time.monotonic()
        sent, is_last = 0, False
        while self.trouble is None and not is_last:
            is_last = self._done.wait(self._every_s)
            now_s, ended = time.monotonic(), self._ended
            if ended == sent:
                continue
            figures = {"live/num_ended": float(ended), "live/request_rps": (ended - sent) / (now_s - sent_s)}
            if self._planned:
                figures["live/done_frac"] = ended / self._planned
            self._send(figures, step=round(now_s - started_s))
            sent, sent_s = ended, now_s

    def _send(self, figures: dict[str, float], step: int) -> None:
        at_ms = round(time.time() * 1000)
        points = [Metric(name, value, at_ms, step) for name, value in figures.items()]
        self._tell(lambda: self._client.log_batch(self.run_id, metrics=points))

    def _tell(self, call: Callable[[], object]) -> None:
        try:
            with mlflow_errors(self._client.tracking_uri):
                call()
        except ServingError as error:
            self.trouble = error.message
