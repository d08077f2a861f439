"""The lines that make cron start the schedules: a block of ours in the user's crontab, and always a file to install.

Nothing outside the block is touched. A second block is of another data folder: its marker names the folder.
"""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from workbench.schedule.book import Book, Schedule

TIMEOUT_S = 20.0
WATCH_CRON = "*/15 * * * *"


class CrontabFailed(Exception):
    """The user's crontab could not be read or written; the message says what cron said. It is as it was."""


def block(schedules: Sequence[Schedule], config_file: Path, folder: Path) -> str:
    """Our lines: one a schedule, and one that looks for runs that never came."""
    if not schedules:
        return ""
    python = f"{shlex.quote(sys.executable)} -m workbench schedule"
    at = f"cd {shlex.quote(str(config_file.parent))} && {python}"
    config = f"--config {shlex.quote(str(config_file))}"
    lines = [
        f"{one.cron} {_escaped(f'{at} run-now {one.name} {config} >>{_log(folder, one.name)} 2>&1')}"
        for one in schedules
    ]
    watch = f"{WATCH_CRON} {_escaped(f'{at} status {config} >{_log(folder)} 2>&1')}"
    return "\n".join([_begin(folder), *lines, watch, _end(folder)]) + "\n"


def install(book: Book, config_file: Path) -> tuple[Path, bool]:
    """Writes the file, and the user's crontab where there is cron.

    Returns:
        The file, and whether cron has the lines now.

    Raises:
        CrontabFailed: cron refused.
    """
    schedules = [schedule for schedule in book.all() if schedule.in_crontab]
    lines = block(schedules, config_file, book.folder)
    path = book.folder / "crontab"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(block(book.all(), config_file, book.folder), encoding="utf-8")
    if shutil.which("crontab") is None:
        return path, False
    before = read()
    after = without(before, book.folder) + lines
    if after != before:
        _crontab(["-"], after)
    return path, bool(lines)


def read() -> str:
    """The user's crontab; empty when there is none. Raises CrontabFailed."""
    done = _run(["-l"])
    if done.returncode and "no crontab for" not in done.stderr:
        raise CrontabFailed(f"`crontab -l` failed: {done.stderr.strip() or f'exit code {done.returncode}'}")
    return "" if done.returncode else done.stdout


def without(text: str, folder: Path) -> str:
    """The crontab without our block. Raises CrontabFailed when the block has no end: somebody has edited it."""
    kept, is_ours = [], False
    for line in text.splitlines(keepends=True):
        if line.rstrip("\n") == _begin(folder):
            is_ours = True
        elif line.rstrip("\n") == _end(folder):
            is_ours = False
        elif not is_ours:
            kept.append(line)
    if is_ours:
        raise CrontabFailed(f"the crontab has {_begin(folder)!r} without its end: mend it with `crontab -e`")
    if kept and not kept[-1].endswith("\n"):
        kept[-1] += "\n"
    return "".join(kept)


def _crontab(arguments: list[str], text: str) -> None:
    done = _run(arguments, text)
    if done.returncode:
        raise CrontabFailed(f"cron refused the new crontab: {done.stderr.strip() or f'exit code {done.returncode}'}")


def _run(arguments: list[str], text: str | None = None) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(
            ["crontab", *arguments], input=text, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
        )
    except (OSError, subprocess.SubprocessError) as error:
        raise CrontabFailed(f"`crontab` failed: {error}") from error


def _escaped(command: str) -> str:
    """cron reads a percent sign as the end of the line."""
    return command.replace("%", "\\%")


def _log(folder: Path, name: str | None = None) -> str:
    return shlex.quote(str(folder / name / "cron.log" if name else folder / "watch.log"))


def _begin(folder: Path) -> str:
    return f"# workbench schedules of {folder} begin (edited by `workbench schedule`)"


def _end(folder: Path) -> str:
    return f"# workbench schedules of {folder} end"
