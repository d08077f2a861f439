"""What the control plane counts; shown on the gateway's page where both share a folder (shared_folder.py)."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter


class ReleaseMetrics:
    """Counters of releases."""

    def __init__(self) -> None:
        self._events = Counter(
            "workbench_release_events",
            "Alarms about the model registry by kind, champions appointed, approvals waited for.",
            ("kind",),
            registry=CollectorRegistry(),
        )

    def count(self, kind: str) -> None:
        """One more of this kind."""
        self._events.labels(kind).inc()
