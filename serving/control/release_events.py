"""Tells people what happens to releases: a line in the log and in a file, a count, a webhook where one is set.

An alarm is told when it begins to stand, not at every look that finds it again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import orjson

from serving.core.approval import TAG_APPROVAL, Finding
from serving.core.gate_record import MIN_APPROVAL_DIGITS
from serving.core.policies.rollout import Judgement, Rollout
from serving.core.ports import Clock
from serving.telemetry.webhook import post

logger = logging.getLogger(__name__)

CHAMPION_APPOINTED, APPROVAL_WAITS = "champion_appointed", "approval_waits"


class ReleaseEvents:
    """May be told from any thread.

    Args:
        clock: times of events.
        path: file that gets a line an event; None writes none.
        webhook: address that each event is posted to as JSON, from a thread of its own.
        count: counts events by kind.
    """

    def __init__(
        self,
        clock: Clock,
        path: Path | None = None,
        webhook: str | None = None,
        count: Callable[[str], None] = lambda kind: None,
    ) -> None:
        self._clock = clock
        self._path = path
        self._webhook = webhook
        self._count = count
        self._lock = threading.Lock()
        self._standing: dict[tuple[str, str, str], frozenset[Finding]] = {}
        self._to_post: SimpleQueue[dict[str, Any]] = SimpleQueue()
        if webhook is not None:
            threading.Thread(target=self._post_all, args=(webhook,), name="release-webhook", daemon=True).start()

    def alarms(self, about: str, model: str, version: str, findings: Iterable[Finding]) -> None:
        """Tells those findings that did not stand at the last look at the same thing."""
        found = frozenset(findings)
        with self._lock:
            new = found - self._standing.get((about, model, version), frozenset())
            self._standing[about, model, version] = found
        for one in sorted(new, key=lambda one: one.alarm):
            self._tell(one.alarm, one.model, one.version, one.text, logging.ERROR)

    def notice(self, kind: str, model: str, version: str, text: str) -> None:
        """Tells of what is no alarm."""
        self._tell(kind, model, version, text, logging.INFO)

    def approval_waits(self, rollout: Rollout, judgement: Judgement) -> None:
        """Tells that the gates passed and a release manager's word is awaited."""
        digest = (judgement.digest or "")[:MIN_APPROVAL_DIGITS]
        text = f"waits for an approval: set the version's tag {TAG_APPROVAL} to {digest}"
        self.notice(APPROVAL_WAITS, rollout.model, rollout.candidate, text)

    def _tell(self, kind: str, model: str, version: str, text: str, level: int) -> None:
        logger.log(level, "%s@%s: %s (%s)", model, version, text, kind)
        self._count(kind)
        event = {"at_s": self._clock.now_s(), "kind": str(kind), "model": model, "version": version, "text": text}
        try:
            self._write(event)
        except OSError as error:
            logger.error("cannot write to %s: %s", self._path, error.strerror)
        if self._webhook is not None:
            self._to_post.put(event | {"text": f"workbench release {model}@{version}: {text}"})

    def _write(self, event: dict[str, Any]) -> None:
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("ab") as file:
                file.write(orjson.dumps(event) + b"\n")

    def _post_all(self, webhook: str) -> None:
        while True:
            event = self._to_post.get()
            if trouble := post(webhook, event):
                logger.warning("%s: an event of kind %s was not delivered", trouble, event["kind"])
