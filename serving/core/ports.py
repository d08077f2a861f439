"""What the shell must provide to those who decide. Each port has a fake that passes the same contract tests."""

from __future__ import annotations

from typing import Protocol

from serving.core.policies.rollout import Judgement
from serving.core.state import RoutingTable


class Clock(Protocol):
    """The one source of time. Tests and the simulator own theirs."""

    def now_s(self) -> float:
        """Seconds since the Unix epoch."""
        ...

    def monotonic_s(self) -> float:
        """Seconds from an arbitrary start that never go back; for durations."""
        ...


class RoutingTableSource(Protocol):
    """Where workers read the routing table from."""

    async def read(self) -> RoutingTable | None:
        """The newest table, or None when none was ever published."""
        ...


class RoutingTableSink(Protocol):
    """Where the control plane publishes the routing table."""

    async def publish(self, table: RoutingTable) -> None:
        """Makes `table` the current one.

        Raises:
            StaleEpoch: a table with this epoch or a newer one is already there.
        """
        ...


class Judge(Protocol):
    """Who knows what the gates and the release managers say of a version. May block: it is asked in a thread."""

    def judge(self, model: str, version: str) -> Judgement:
        """The verdict of the gates and the approval that stands.

        Raises:
            ServingError: it is not known now.
        """
        ...


class Champions(Protocol):
    """The one writer of who is champion."""

    async def appoint(self, model: str, version: str, why: str) -> None:
        """Makes the version champion; nothing happens when it is.

        Raises:
            ServingError: it could not be written down; ask again.
        """
        ...
