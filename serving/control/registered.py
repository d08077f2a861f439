"""What the registry holds, and what may go wrong with asking it; without MLflow, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from urllib.error import URLError
from urllib.request import urlopen

from serving.core.errors import ServingError, Unavailable
from serving.core.state import Task

PROBE_TIMEOUT_S = 2.0
ENGINE_PART = "+engine:"
"""Stands in a version's digest between weights and engine, where a pool makes its engine's flags a version."""


class RegistryUnavailable(Unavailable):
    """MLflow does not answer; what was asked for was not done, or may have been done in part: ask again."""


class RegistryRefused(ServingError):
    """MLflow answered with an error; the message holds its own words."""

    status = 502


class ChampionExists(ServingError):
    """`first` was asked for, and another version is champion already."""

    status = 409


@dataclass(frozen=True, slots=True)
class RegisteredVersion:
    """One version as registered. `digest`, `source` and `task` are None for a version that somebody else made.

    `claims` are the tags that releases are judged by, as they stand there.
    """

    name: str
    version: str
    source: str | None
    digest: str | None
    task: Task | None
    run_id: str | None
    claims: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Manifest:
    """What a registration run keeps of the weights it registered."""

    name: str
    source: str
    weights_digest: str
    task: Task
    tags: dict[str, str]


def answers(tracking_uri: str) -> bool:
    """Whether an MLflow server answers its health check there within two seconds. Asks once."""
    try:
        with urlopen(f"{tracking_uri.rstrip('/')}/health", timeout=PROBE_TIMEOUT_S) as response:
            return response.status == 200
    except (URLError, OSError, ValueError):
        return False
