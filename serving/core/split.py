"""Which version a session gets while a rollout runs: a share of sessions by hash, the same for every worker.

    version named in the request    that version, whatever runs
    tenant on the deny list         stable
    tenant on the allow list        candidate; with an allow list nobody else gets it
    else                            candidate when the session's place in [0, 1) lies below the share

A session's place depends on the rollout, the tenant and the session alone: as the share grows sessions only come in,
never go out. A candidate without a ready replica gets nobody. The choice is made once for a request: trying another
replica never changes the version.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Split:
    """A running rollout as gateway workers need it; published with its model in the routing table.

    Attributes:
        rollout_id: seeds the places of sessions, so that each rollout draws anew who comes in first.
        stable: the version that the others get, whatever the registry's champion is.
        candidate: the version on trial.
        share_frac: of sessions that get the candidate, in [0, 1].
        allow: tenants that get the candidate, and no others; empty lets the share decide.
        deny: tenants that never get it.
        shadow_frac: of the requests of consenting tenants that are mirrored to the candidate.
    """

    rollout_id: str
    stable: str
    candidate: str
    share_frac: float
    allow: tuple[str, ...] = ()
    deny: tuple[str, ...] = ()
    shadow_frac: float = 0.0


@dataclass(frozen=True, slots=True)
class Place:
    """A tenant's session in a rollout; `at` in [0, 1) also names it where neither tenant nor session is to be told."""

    tenant_id: str
    at: float


def place(rollout_id: str, tenant_id: str, session: str) -> Place:
    """Where the session of a tenant stands in a rollout."""
    key = b"\0".join(part.encode("utf-8", "surrogatepass") for part in (rollout_id, tenant_id, session))
    # 53 bits: every one of them is a number of its own, and below 1.
    at = (int.from_bytes(hashlib.blake2b(key, digest_size=8).digest()) >> 11) / (1 << 53)
    return Place(tenant_id, at)


def choose(split: Split, place: Place, is_ready: Callable[[str], bool]) -> str:
    """The version for a request that names none.

    Args:
        split: of the model that is asked for.
        place: of the request's session in it.
        is_ready: whether a version has a replica that may serve the request now.
    """
    if split.share_frac <= 0.0 or place.tenant_id in split.deny:
        return split.stable
    is_in = place.tenant_id in split.allow if split.allow else place.at < split.share_frac
    return split.candidate if is_in and is_ready(split.candidate) else split.stable
