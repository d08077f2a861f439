"""An engine's log file: what it says about the start that is under way, and about why it ended."""

from __future__ import annotations

import re
from pathlib import Path

_BANNER = b"non-default args:"  # vLLM's first line after its imports
_NUM_LINES = 20
_NUM_CAUSES = 3
_TAIL_BYTES = 64 * 1024
_CAUSE = re.compile(r"^(?!.*WARNING).*?\b((?:\w+\.)*\w+(?:Error|Exception): .+)$", re.MULTILINE)
# Triton's bindings report what they did not free, in dozens of lines, at every exit.
_NOISE = re.compile(r"^( - (leaked|\.\.\. skipped)|nanobind:|See https://nanobind)")


class EngineLog:
    """One file a replica, appended to at each start; reads only what the latest start wrote."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._start_bytes = 0

    def begin(self, command: str) -> None:
        """Marks a new start by its command line. Raises OSError when the file cannot be written."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("ab") as file:
            file.write(f"$ {command}\n".encode())
            file.flush()
            self._start_bytes = file.tell()

    def has_banner(self) -> bool:
        """Whether vLLM has got through its imports."""
        return _BANNER in self._read(self._start_bytes)

    def excerpt(self) -> str:
        """The last lines; before them the errors that scrolled out of them, for vLLM names the cause early."""
        whole = self._read(self._start_bytes).decode("utf-8", "replace")
        lines = self.tail()
        causes = [cause for cause in dict.fromkeys(_CAUSE.findall(whole)) if cause not in lines]
        named = "".join(f"error in the log: {cause}\n" for cause in causes[:_NUM_CAUSES])
        return f"{named}last lines of {self.path}:\n{lines}"

    def tail(self, num_lines: int = _NUM_LINES) -> str:
        """The last lines of this start."""
        size = self.path.stat().st_size if self.path.exists() else 0
        text = self._read(max(self._start_bytes, size - _TAIL_BYTES)).decode("utf-8", "replace")
        lines = [line for line in text.splitlines() if not _NOISE.match(line)]
        return "\n".join(lines[-num_lines:])

    def _read(self, start_bytes: int) -> bytes:
        if not self.path.exists():
            return b""
        with self.path.open("rb") as file:
            file.seek(start_bytes)
            return file.read()
