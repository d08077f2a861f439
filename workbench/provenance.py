"""Which code made a figure."""

from __future__ import annotations

import functools
import os
import subprocess
from pathlib import Path

COMMIT_VARIABLE = "WORKBENCH_COMMIT"
UNKNOWN_COMMIT = "unknown"
GIT_TIMEOUT_S = 5.0


@functools.cache
def git_commit(folder: Path = Path(__file__).parent) -> str:
    """The commit that runs, with `-dirty` when tracked files differ from it.

    $WORKBENCH_COMMIT wins, for an image without its history; `unknown` where neither is there.
    """
    if given := os.environ.get(COMMIT_VARIABLE):
        return given
    try:
        commit = _git(folder, "rev-parse", "HEAD")
        return f"{commit}-dirty" if _git(folder, "status", "--porcelain", "--untracked-files=no") else commit
    except (OSError, subprocess.SubprocessError):
        return UNKNOWN_COMMIT


def _git(folder: Path, *arguments: str) -> str:
    command = ["git", "-C", str(folder), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True, timeout=GIT_TIMEOUT_S).stdout.strip()
