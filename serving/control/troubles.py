"""Troubles that last: told when they begin, change and end, not twice a second."""

from __future__ import annotations

import logging


class Troubles:
    """What is in trouble now, by topic."""

    def __init__(self, logger: logging.Logger) -> None:
        """`logger` is that of whoever has the troubles."""
        self._logger = logger
        self._messages: dict[str, str] = {}

    def begin(self, topic: str, message: str) -> None:
        """Logs the trouble when it is new or another one than before."""
        if self._messages.get(topic) != message:
            self._logger.warning("%s", message)
            self._messages[topic] = message

    def over(self, topic: str) -> bool:
        """True, and logged, when `topic` was in trouble until now."""
        if self._messages.pop(topic, None) is None:
            return False
        self._logger.info("%s: well again", topic)
        return True
