"""Exit codes: one meaning each, the same for every command, printed in every command's help."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """What a command's exit code says."""

    OK = 0
    FAILED = 1
    USAGE = 2
    UNAVAILABLE = 3
    MISSING = 4
    CONFLICT = 5
    INTERRUPTED = 130


MEANINGS: dict[Exit, str] = {
    Exit.OK: "done",
    Exit.FAILED: "it was tried and failed",
    Exit.USAGE: "wrong command line or configuration",
    Exit.UNAVAILABLE: "nothing runs there, or it does not answer",
    Exit.MISSING: "a package or program is not installed",
    Exit.CONFLICT: "already running, a port is taken, or somebody else holds it",
    Exit.INTERRUPTED: "ended by Ctrl-C",
}


class CommandFailed(Exception):
    """A command cannot do its work; the message says what to do."""

    def __init__(self, message: str, code: Exit = Exit.FAILED) -> None:
        super().__init__(message)
        self.code = code
