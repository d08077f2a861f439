"""Which sweeps may run side by side: one cell a replica, a client core for each. Pure.

The rule: two cells run at once only if their replicas share no core, and each has a core for its client that no
replica and no other client uses. A replica elsewhere (no cores here) needs only the client's core. What finds no core
waits for a lane: on two cores with a replica on one of them, one cell runs at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Lane:
    """Sweeps that run one after the other, their client on one core."""

    client_core: int
    names: tuple[str, ...]


def lanes(replica_cores: Mapping[str, Sequence[int]], own_cores: Set[int]) -> tuple[Lane, ...]:
    """The sweeps by lane, in the given order.

    Args:
        replica_cores: cores of the replica that each sweep measures; empty when it is elsewhere.
        own_cores: cores that this process may use.

    Raises:
        ValueError: there is no core at all for clients.
    """
    if not own_cores:
        raise ValueError("no core for a load client")
    taken = {core for cores in replica_cores.values() for core in cores}
    # With no core to spare, clients share those of replicas, one at a time: as a single sweep does.
    free = sorted(own_cores - taken)[: len(replica_cores)] or sorted(own_cores)[:1]
    groups = _by_shared_cores(replica_cores)
    names: list[list[str]] = [[] for _ in free]
    for group in groups:
        shortest = min(names, key=len)
        shortest.extend(group)
    return tuple(Lane(core, tuple(lane)) for core, lane in zip(free, names, strict=True) if lane)


def _by_shared_cores(replica_cores: Mapping[str, Sequence[int]]) -> list[list[str]]:
    """Sweeps whose replicas share a core go together: they never run at once."""
    groups: list[tuple[set[int], list[str]]] = []
    for name, cores in replica_cores.items():
        joined: list[tuple[set[int], list[str]]] = []
        rest: list[tuple[set[int], list[str]]] = []
        for group in groups:
            (joined if group[0] & set(cores) else rest).append(group)
        merged = (set(cores).union(*(g[0] for g in joined)), [n for g in joined for n in g[1]] + [name])
        groups = [*rest, merged]
    return [names for _, names in groups]
