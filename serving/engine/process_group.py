"""A process and all that it started, seen as one: who is in it, what it holds, how to end it.

An engine is several processes (the API server, the engine core, helpers of Python's multiprocessing). Each
replica is the leader of its own process group, whose id is the leader's pid.
"""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

_PROC = Path("/proc")
_SHARED_MEMORY = Path("/dev/shm")


def pids_of(group_id: int) -> set[int]:
    """The pids of a process group, without zombies; empty when it is gone."""
    return {pid for pid in _all_pids() if _group_if_running(pid) == group_id}


def _all_pids() -> list[int]:
    return [int(entry.name) for entry in _PROC.iterdir() if entry.name.isdigit()]


def _group_if_running(pid: int) -> int | None:
    """The process group of `pid`; None for a zombie and for a pid that nobody has."""
    try:
        # After the command's name, which may hold spaces: state, parent, group.
        state, _, group = (_PROC / str(pid) / "stat").read_text().rpartition(")")[2].split()[:3]
    except (OSError, ValueError):
        return None  # it ended, perhaps while we looked
    return None if state == "Z" else int(group)


def memory_bytes(group_id: int) -> int:
    """Proportional set size of the whole group: pages shared with others count by their share."""
    total = 0
    for pid in pids_of(group_id):
        try:
            text = (_PROC / str(pid) / "smaps_rollup").read_text()
        except OSError:
            continue
        if match := re.search(r"^Pss:\s+(\d+) kB", text, re.MULTILINE):
            total += int(match[1]) * 1024
    return total


def kill(group_id: int) -> None:
    """SIGKILL to every process of the group; nothing when it is gone: a group of that id would be a stranger's."""
    if not pids_of(group_id):
        return
    try:
        os.killpg(group_id, signal.SIGKILL)
    except ProcessLookupError:
        return


def remove_shared_memory(pids: set[int]) -> list[str]:
    """Removes what dead processes left in /dev/shm, known by their pid in the file's name.

    OpenMP and Python's semaphores name their files so; a killed engine never removes them.

    Returns:
        The names of the files removed.
    """
    removed: list[str] = []
    dead = {pid for pid in pids if _group_if_running(pid) is None}
    if not dead or not _SHARED_MEMORY.is_dir():
        return removed
    pattern = re.compile(rf"(?:^|[_-])(?:{'|'.join(map(str, sorted(dead)))})(?:[_-]|$)")
    for path in _SHARED_MEMORY.iterdir():
        if pattern.search(path.name) and path.is_file():
            path.unlink(missing_ok=True)
            removed.append(path.name)
    return removed
