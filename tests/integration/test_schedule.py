"""Scheduled runs with real kernels: killed ones are gone on with, late ones ended, and two never overlap."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
import psutil
import pytest

from workbench.config import load_config
from workbench.schedule.book import Book, Schedule, ScheduleRuns
from workbench.schedule.files import locked
from workbench.schedule.history import Outcome, Run
from workbench.schedule.job import Ports, run_now
from workbench.schedule.live import ports_of
from workbench.schedule.places import book_of, places_of
from workbench.schedule.runner import Job, run_child

ROOT = Path(__file__).parents[2]
# Three steps, each measured once: a step that lies on disk and is young enough is not done again, as in a sweep.
NOTEBOOK = """
# %% tags=["parameters"]
stops_at: int = 3
max_age_s: float | None = None

# %%
import os
import time
from pathlib import Path

Path("kernel.pid").write_text(str(os.getpid()))
print("it", "begins")

# %%
for step in range(3):
    path = Path(f"step-{step}")
    if path.exists() and time.time() - path.stat().st_mtime < (max_age_s or 0):
        print(f"step {step} kept")
        continue
    if step == stops_at and not Path("go-on").exists():
        Path("stopped").touch()
        time.sleep(60)
    path.touch()
    print(f"step {step} done")
"""


class Place:
    """A folder with a notebook and a schedule of it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.config = load_config(folder / "workbench.yaml")
        self.book: Book = book_of(self.config)
        self.ports: Ports = ports_of(self.config, lambda line: None)
        self.book.add(
            Schedule(name="nightly", cron="30 2 * * *", notebook="steps", parameters={"stops_at": 1}, created_at_s=0.0)
        )

    def run(self) -> Run:
        return run_now(self.book, "nightly", places_of(self.config), self.ports)

    def run_elsewhere(self) -> subprocess.Popen[bytes]:
        with (self.folder / "out").open("ab") as out:
            return subprocess.Popen(
                [sys.executable, "-m", "workbench", "schedule", "run-now", "nightly"],
                cwd=self.folder,
                env=os.environ | {"WORKBENCH_CONFIG": str(self.config.file), "PYTHONPATH": str(ROOT)},
                stdout=out,
                stderr=out,
            )

    def kernel(self) -> psutil.Process:
        return psutil.Process(int((self.folder / "kernel.pid").read_text()))


def until(holds: Callable[[], bool], what: str, limit_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < deadline_s, what
        time.sleep(0.05)


def has_ended(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Place]:
    monkeypatch.setenv("HOME", str(tmp_path))
    notebook = jupytext.reads(NOTEBOOK, fmt="py:percent")
    notebook.metadata["kernelspec"] = {"name": "python3", "display_name": "Python 3", "language": "python"}
    (tmp_path / "notebooks").mkdir()
    nbformat.write(notebook, tmp_path / "notebooks" / "steps.ipynb")
    (tmp_path / "workbench.yaml").write_text("models: {}\npools: []\n")
    place = Place(tmp_path)
    yield place
    with contextlib.suppress(OSError, psutil.Error):
        place.kernel().kill()


def test_a_killed_kernel_and_a_killed_run_are_gone_on_with(place: Place) -> None:
    stopped = place.folder / "stopped"
    ended: list[Run] = []
    running = threading.Thread(target=lambda: ended.append(place.run()))
    running.start()
    until(stopped.exists, "the notebook does not come to its second step")
    with pytest.raises(ScheduleRuns):
        place.run()
    place.kernel().kill()
    running.join(60)
    assert [(run.outcome, run.reason) for run in ended] == [(Outcome.INTERRUPTED, "the notebook's kernel died")]
    [cut_off] = list((place.folder / "reports" / "nightly").glob("*-interrupted.ipynb"))
    assert "it begins" in cut_off.read_text(), "what it did until then is kept"

    stopped.unlink()
    other = place.run_elsewhere()
    until(stopped.exists, "the second attempt does not come to its second step")
    kernel = place.kernel()
    other.send_signal(signal.SIGKILL)
    other.wait(10)
    until(lambda: has_ended(kernel), "the kernel outlives its run", 20)
    until(lambda: not place.book.is_running("nightly"), "the child outlives its run", 20)

    (place.folder / "go-on").touch()
    last = place.run()
    assert (last.attempt, last.outcome, last.run_id) == (3, Outcome.OK, ended[0].run_id)
    assert last.html is not None
    page = Path(last.html).read_text()
    assert "step 0 kept" in page and "step 1 done" in page and "step 2 done" in page, "it goes on at the next step"
    assert Path(last.html).name in (place.folder / "reports" / "index.html").read_text()


LATE = """
import json, subprocess, sys, time
request = json.load(sys.stdin)
print("begins", flush=True)
kernel = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
print(kernel.pid, flush=True)
time.sleep(60)
"""


def job(folder: Path, lines: list[str], descriptor: int, limit_s: float) -> Job:
    return Job("n", {}, folder / "workbench.yaml", folder, folder, limit_s, descriptor, lines.append)


def test_a_run_ends_at_its_time_limit_with_all_its_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "late.py").write_text(LATE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    lines: list[str] = []
    with locked(tmp_path / "lock") as descriptor:
        ran = run_child(job(tmp_path, lines, descriptor, 2.0), "late")
    assert ran.outcome is Outcome.TIMED_OUT
    assert "after its time limit of 0.03333 minutes" in ran.reason
    assert lines[0] == "begins"
    assert not psutil.pid_exists(int(lines[1])) or has_ended(psutil.Process(int(lines[1])))


@pytest.mark.parametrize(
    ("text", "outcome", "says"),
    [
        ("import sys; sys.exit(3)", Outcome.FAILED, "with exit code 3"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", Outcome.INTERRUPTED, "by signal 9"),
    ],
)
def test_a_child_that_says_nothing_is_named(
    text: str, outcome: Outcome, says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "silent.py").write_text(text)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with locked(tmp_path / "lock") as descriptor:
        ran = run_child(job(tmp_path, [], descriptor, 30.0), "silent")
    assert (ran.outcome, says in ran.reason) == (outcome, True), ran.reason
