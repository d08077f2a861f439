"""Runs a schedule's notebook in a child process, within its time limit, and takes all of the child's processes along.

The child holds the schedule's lock too and ends with its parent: whoever dies, two runs of a schedule never overlap.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, Protocol

import psutil

from workbench.schedule.history import Outcome

GRACE_S = 10.0
"""Between asking processes to end and ending them."""


@dataclass(frozen=True, slots=True)
class Job:
    """What a child is to do."""

    notebook: str
    parameters: Mapping[str, Any]
    config_file: Path
    notebooks_dir: Path
    out_dir: Path
    time_limit_s: float
    lock_descriptor: int
    on_line: Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Ran:
    """What came of it."""

    outcome: Outcome
    reason: str = ""
    notebook: str | None = None
    html: str | None = None
    mlflow_run_id: str | None = None
    remarks: tuple[str, ...] = ()


class Runner(Protocol):
    """Executes a job to its end or its time limit; a failure is an outcome."""

    def __call__(self, job: Job) -> Ran:
        """Runs it."""
        ...


def run_child(job: Job, module: str = "workbench.schedule.child") -> Ran:
    """Runs the job in a child process."""
    with tempfile.TemporaryDirectory(prefix="workbench-schedule-") as scratch:
        result = Path(scratch) / "result.json"
        request = {
            "notebook": job.notebook, "parameters": dict(job.parameters), "config_file": str(job.config_file),
            "notebooks_dir": str(job.notebooks_dir), "out_dir": str(job.out_dir), "result": str(result),
            "parent": os.getpid(),
        }  # fmt: skip
        with subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
            pass_fds=(job.lock_descriptor,),
        ) as child:
            return _attended(child, json.dumps(request), job, result)


def _attended(child: subprocess.Popen[str], request: str, job: Job, result: Path) -> Ran:
    assert child.stdin is not None and child.stdout is not None
    lines = threading.Thread(target=_hand_on, args=(child.stdout, job.on_line), daemon=True)
    lines.start()
    try:
        with contextlib.suppress(BrokenPipeError):
            child.stdin.write(request)
            child.stdin.close()
        code = child.wait(job.time_limit_s)
    except subprocess.TimeoutExpired:
        return Ran(Outcome.TIMED_OUT, f"it was ended after its time limit of {job.time_limit_s / 60:.4g} minutes")
    finally:
        if child.poll() is None:
            end_tree(child.pid)
            child.wait()
        lines.join(GRACE_S)
    if not result.exists():
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        return Ran(Outcome.INTERRUPTED if code < 0 else Outcome.FAILED, f"the process of the notebook ended {how}")
    data = json.loads(result.read_text(encoding="utf-8"))
    return Ran(**data | {"outcome": Outcome(data["outcome"]), "remarks": tuple(data.get("remarks", ()))})


def end_tree(pid: int) -> None:
    """Ends a process and all that it started. Kernels lead sessions of their own: a signal to a group misses them."""
    try:
        root = psutil.Process(pid)
        members = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for member in members:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.terminate()
    _, alive = psutil.wait_procs(members, GRACE_S)
    for member in alive:
        with contextlib.suppress(psutil.NoSuchProcess):
            member.kill()


def _hand_on(stream: IO[str], on_line: Callable[[str], None]) -> None:
    for line in stream:
        on_line(line.rstrip("\n"))
