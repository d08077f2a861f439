"""One supervisor a data folder: the lock is the kernel's, so it ends with its process, however that ends."""

from __future__ import annotations

import fcntl
import os
from pathlib import Path


class AlreadyRunning(Exception):
    """Another stack runs from this data folder."""


class StackLock:
    """Held from `acquire` until `release` or the end of the process."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._descriptor: int | None = None

    @property
    def is_held(self) -> bool:
        """Whether this process holds it."""
        return self._descriptor is not None

    def acquire(self) -> None:
        """Takes the lock at once.

        Raises:
            AlreadyRunning: somebody holds it.
        """
        if not self.try_acquire():
            raise AlreadyRunning(
                f"a stack already runs from {self._path.parent.parent}: "
                "see `workbench status`, end it with `workbench down`"
            )

    def try_acquire(self) -> bool:
        """Takes the lock if nobody holds it; True when it is held afterwards."""
        if self._descriptor is not None:
            return True
        self._path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self._path, os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Gives the lock back."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None
