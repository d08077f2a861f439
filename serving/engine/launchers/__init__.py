"""Who runs the replicas: `local` starts child processes, `attach` watches URLs that somebody else runs.

Both report through the same status, whole, at every change.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from serving.core.state import ReplicaState


@dataclass(frozen=True, slots=True)
class ReplicaStatus:
    """A replica as its launcher knows it.

    Attributes:
        replica_id: unique in the fleet.
        state: of those that a launcher sees: starting, ready, draining, down.
        changed_at_s: since the Unix epoch.
        url: None until a port is chosen.
        pid: the group's leader; None when nothing runs, or when somebody else runs it.
        phase: of the cold start that is under way.
        phases_s: seconds of each phase of the last start, as far as it came.
        num_restarts: since the launcher took it.
        error: why it is down or was last down; cleared when ready.
    """

    replica_id: str
    state: ReplicaState
    changed_at_s: float
    url: str | None = None
    pid: int | None = None
    phase: str | None = None
    phases_s: Mapping[str, float] = field(default_factory=dict)
    num_restarts: int = 0
    error: str | None = None


OnStatus = Callable[[ReplicaStatus], None]


class Launcher(Protocol):
    """What the stack needs of either."""

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """All replicas, in the order in which they were added."""
        ...

    async def stop(self) -> None:
        """Ends what the launcher started, and its watching."""
        ...
