"""From a bare clone to a routed answer: `make up ARGS=--once` twice in a clone of HEAD, on ports of its own.

The first time installs, fetches, measures and asks, with caches of its own; the second finds all that done. The quick
form runs it twice too, but with the caches of this machine, and judges only the second time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console

from benchmarks.harness import REPOSITORY, Bar, Mode, at_most, equal_to, run
from benchmarks.processes import free_port

FIRST_WITHIN_S, SECOND_WITHIN_S = 600.0, 180.0
GIVE_UP_AFTER_S = 1500.0


@dataclass(frozen=True, slots=True)
class Outcome:
    """One `make up`: its exit code, how long it took, what it left."""

    code: int
    took_s: float
    last_run: dict[str, Any]
    num_left: int


def measure(mode: Mode, console: Console) -> list[Bar]:
    """Seconds from a clone to the answer, the first and the second time, and what they leave."""
    with tempfile.TemporaryDirectory(prefix="make-up-") as name:
        folder = Path(name)
        clone = folder / "clone"
        subprocess.run(["git", "clone", "-q", str(REPOSITORY), str(clone)], check=True, timeout=120)
        environment = _environment(folder, mode)
        bars: list[Bar] = []
        for turn, limit_s in (("first", FIRST_WITHIN_S), ("second", SECOND_WITHIN_S)):
            console.print(f"[dim]{turn} make up ARGS=--once …")
            judged = mode is Mode.FULL or turn == "second"
            bars += _judge(turn, limit_s, _make_up(clone, folder / f"{turn}.log", environment), judged=judged)
    return bars


def _environment(folder: Path, mode: Mode) -> dict[str, str]:
    """This environment without our settings and without the virtual environment that runs us."""
    env = {name: value for name, value in os.environ.items() if not name.startswith(("WORKBENCH_", "MAKE"))}
    env.pop("VIRTUAL_ENV", None)
    env |= {f"WORKBENCH__{part}__PORT": str(free_port()) for part in ("GATEWAY", "MLFLOW", "LAB")}
    if mode is Mode.FULL:
        env["XDG_CACHE_HOME"] = str(folder / "cache")
    return env


def _make_up(clone: Path, log: Path, environment: dict[str, str]) -> Outcome:
    last_run = clone / ".workbench" / "last-run.json"
    last_run.unlink(missing_ok=True)
    began_s = time.monotonic()
    with log.open("wb") as output:
        process = subprocess.Popen(
            ["make", "up", "ARGS=--once"],
            cwd=clone,
            env=environment,
            stdout=output,
            stderr=output,
            start_new_session=True,
        )
        try:
            code = process.wait(GIVE_UP_AFTER_S)
        finally:
            took_s = time.monotonic() - began_s
            left = _processes_of(clone)
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
                process.wait(60.0)
            for other in left:
                if other.is_running():
                    other.kill()
    if code != 0:
        raise RuntimeError(f"make up ended with code {code}:\n{log.read_text(errors='replace')[-2000:]}")
    return Outcome(code, took_s, json.loads(last_run.read_text()), len(left))


def _processes_of(clone: Path) -> list[psutil.Process]:
    """Whatever still runs in the clone's folder or from its environment."""
    found = []
    for process in psutil.process_iter():
        try:
            if str(clone) in process.cwd() or str(clone) in " ".join(process.cmdline()):
                found.append(process)
        except psutil.Error:
            continue  # not ours to look at, or just ended
    return found


def _judge(turn: str, limit_s: float, outcome: Outcome, *, judged: bool) -> list[Bar]:
    last_run = outcome.last_run
    seconds = [
        Bar(f"{turn}: {name}, s", float(value), "shown", None) for name, value in sorted(last_run["seconds"].items())
    ]
    provenance = ", ".join(sorted({row["provenance"] for row in last_run["cost_rows"]})) or "none"
    return [
        at_most(f"{turn}: make up, s", outcome.took_s, limit_s, judged=judged),
        equal_to(f"{turn}: exit code", outcome.code, 0),
        equal_to(f"{turn}: answer", "some" if last_run["answer"] else "empty", "some"),
        equal_to(f"{turn}: x-served-by", "some" if last_run["served_by"] else "none", "some"),
        equal_to(f"{turn}: provenance of the cost rows", provenance, "measured"),
        equal_to(f"{turn}: processes left", outcome.num_left, 0),
        *seconds,
    ]


if __name__ == "__main__":
    sys.exit(run("make_up", measure))
