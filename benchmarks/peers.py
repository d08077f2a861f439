"""Other people's programs that benchmarks run: each in an environment of its own below `.workbench/peers/`."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.harness import REPOSITORY

PEERS = REPOSITORY / ".workbench" / "peers"
INSTALL_TIMEOUT_S = 900.0


class PeerFailed(RuntimeError):
    """A peer could not be installed or started; the message ends with what it said."""


def environment(name: str, requirements: Sequence[str], console: Console) -> Path:
    """The folder of programs of the peer's environment, made if it is not there for exactly these requirements.

    Raises:
        PeerFailed: the installer refused.
    """
    folder = PEERS / name
    stamp, wanted = folder / ".installed", "\n".join(requirements)
    if stamp.is_file() and stamp.read_text() == wanted:
        return folder / "bin"
    console.print(f"[dim]installing {name}: {', '.join(requirements)} …")
    folder.parent.mkdir(parents=True, exist_ok=True)
    _uv("venv", "--quiet", "--clear", "--python", sys.executable, str(folder))
    _uv("pip", "install", "--quiet", "--python", str(folder / "bin" / "python"), *requirements)
    stamp.write_text(wanted)
    return folder / "bin"


def version(name: str, package: str) -> str:
    """The installed version of a package in the peer's environment."""
    code = f"from importlib.metadata import version; print(version({package!r}))"
    python = str(PEERS / name / "bin" / "python")
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True, timeout=60).stdout.strip()


def _uv(*arguments: str) -> None:
    # uv does not read pip's setting; both name the folder of wheels that a machine may carry.
    links = os.environ.get("UV_FIND_LINKS") or os.environ.get("PIP_FIND_LINKS", "")
    env = os.environ | ({"UV_FIND_LINKS": links} if links else {})
    program = Path(sys.executable).parent / "uv"
    outcome = subprocess.run(
        [str(program) if program.is_file() else "uv", *arguments],
        env=env, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False,
    )  # fmt: skip
    if outcome.returncode:
        raise PeerFailed(f"uv {' '.join(arguments)} ended with {outcome.returncode}: {outcome.stderr[-1500:]}")
