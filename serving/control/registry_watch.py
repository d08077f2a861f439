"""Looks at the model registry in a thread of its own.

MLflow's client blocks, for tens of seconds when its server is down; composing must not wait for it. The
thread keeps the registry's last word, which stands while the registry is silent; a file keeps it for a
control plane that starts while the registry is silent. Another registry's word is nobody's: the file names whose it is.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from serving.control.compose import Registered
from serving.core.errors import ServingError
from serving.store.documents import Codec, read_file, write_file

logger = logging.getLogger(__name__)

# Reads champions, and all versions of the named models. Raises ServingError when the registry does not answer.
RegistryReader = Callable[[frozenset[str]], Registered]


@dataclass(frozen=True, slots=True)
class LastWord:
    """What a registry said; `registry` is its address without a password."""

    registry: str
    said: Registered


_CODEC = Codec(LastWord, "registry's last word")


def registry_name(uri: str) -> str:
    """The address of a registry as a name to keep what it said under: without user and password."""
    parts = urlsplit(uri)
    return parts._replace(netloc=parts.netloc.rpartition("@")[2], query="", fragment="").geturl().rstrip("/")


class RegistryWatch:
    """The registry's last word, renewed every `poll_s` in a daemon thread.

    Args:
        read: asks the registry.
        poll_s: seconds between two looks.
        path: file that keeps the last word over restarts; None keeps none.
        uri: the registry's address; what the file holds of another one is not believed.

    Attributes:
        last: None until the registry has answered once, ever.
        is_answering: whether the last look succeeded.
    """

    def __init__(self, read: RegistryReader, poll_s: float, path: Path | None = None, *, uri: str = "") -> None:
        self._read = read
        self._poll_s = poll_s
        self._path = path
        self._registry = registry_name(uri)
        self._names: frozenset[str] = frozenset()
        self._wake = threading.Event()
        self._thread: threading.Thread | None = None
        self._complaint: str | None = None
        self.last: Registered | None = self._kept()
        self.is_answering = False

    def start(self) -> None:
        """Starts looking. The thread ends with the process."""
        self._thread = threading.Thread(target=self._run, name="registry-watch", daemon=True)
        self._thread.start()

    def watch(self, names: Iterable[str]) -> None:
        """Sets the models whose versions are asked for; a new one is looked up at once."""
        wanted = frozenset(names)
        if wanted != self._names:
            self._names = wanted
            self._wake.set()

    def check(self) -> None:
        """Raises RuntimeError when the thread has ended by an unexpected error, which it has logged."""
        if self._thread is not None and not self._thread.is_alive():
            raise RuntimeError("the thread that watches the model registry has ended; its error is in the log")

    def look(self) -> None:
        """One look. A registry that does not answer is logged when that begins, not at every look."""
        names = self._names
        try:
            found = self._read(names)
        except ServingError as error:
            self.is_answering = False
            if self._complaint != error.message:
                logger.warning("%s; champions and versions stand as last known", error.message)
                self._complaint = error.message
            return
        if found != self.last:
            self.last = found
            self._keep(found)
        if not self.is_answering:
            logger.info("the model registry answers: %s", dict(found.champions) or "no champion yet")
        self.is_answering, self._complaint = True, None

    def _kept(self) -> Registered | None:
        try:
            data = None if self._path is None else read_file(self._path)
            kept = None if data is None else _CODEC.decode(data)
        except ServingError as error:
            logger.warning("%s; champions are unknown until the registry answers", error.message)
            return None
        return None if kept is None or kept.registry != self._registry else kept.said

    def _keep(self, found: Registered) -> None:
        if self._path is None:
            return
        try:
            write_file(self._path, _CODEC.encode(LastWord(self._registry, found)))
        except ServingError as error:
            logger.warning("%s; a restart without the registry would not know the champions", error.message)

    def _run(self) -> None:
        while True:
            self._wake.clear()
            self.look()
            self._wake.wait(self._poll_s)
