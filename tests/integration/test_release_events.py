"""What happens to releases reaches people: a line, a count, a webhook; an alarm that stands is told once."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest

from serving.clock import ManualClock
from serving.control.release_events import ReleaseEvents
from serving.core.approval import Alarm, Finding
from serving.core.policies.rollout import Judgement, Phase, Rollout, RolloutPlan
from serving.core.sequential import Verdict

FORGED = Finding(Alarm.ALIAS_FORGED, "m", "2", "the alias champion was 2")


class Hook:
    """A webhook on loopback."""

    def __init__(self) -> None:
        self.posted: SimpleQueue[dict[str, Any]] = SimpleQueue()
        posted = self.posted

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                posted.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, format: str, *args: Any) -> None:
                """Says nothing."""

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}/secret"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()


@pytest.fixture
def hook() -> Iterator[Hook]:
    hook = Hook()
    yield hook
    hook.server.shutdown()
    hook.server.server_close()


def test_an_alarm_is_told_when_it_begins_to_stand_and_when_it_comes_again(hook: Hook, tmp_path: Path) -> None:
    counted: list[str] = []
    events = ReleaseEvents(ManualClock(), tmp_path / "releases.jsonl", hook.url, counted.append)
    for found in ((FORGED,), (FORGED,), (), (FORGED,)):
        events.alarms("champion", "m", "1", found)
    assert counted == ["alias_forged"] * 2
    lines = [json.loads(line) for line in (tmp_path / "releases.jsonl").read_text().splitlines()]
    assert [(line["kind"], line["model"], line["version"]) for line in lines] == [("alias_forged", "m", "2")] * 2
    for _ in range(2):
        posted = hook.posted.get(timeout=60)
        assert (posted["kind"], posted["text"]) == ("alias_forged", "workbench release m@2: the alias champion was 2")


def test_a_waiting_approval_names_the_digest_to_approve(hook: Hook) -> None:
    events = ReleaseEvents(ManualClock(), webhook=hook.url)
    rollout = Rollout("r", "m", "1", "2", RolloutPlan(), 0.0, 0.0, Phase.STEP)
    events.approval_waits(rollout, Judgement(Verdict.PASS, digest="ab" * 32))
    posted = hook.posted.get(timeout=60)
    assert posted["kind"] == "approval_waits" and "abababababababab" in posted["text"]


def test_a_file_that_cannot_be_written_keeps_nobody_from_hearing(hook: Hook, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("no folder")
    events = ReleaseEvents(ManualClock(), tmp_path / "file" / "releases.jsonl", hook.url)
    events.alarms("champion", "m", "1", (FORGED,))
    assert hook.posted.get(timeout=60)["kind"] == "alias_forged"
