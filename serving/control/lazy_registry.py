"""The registry, imported by the thread that first asks: MLflow takes seconds, and is only in the `bench` extra."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cached_property
from typing import TYPE_CHECKING

from serving.control.compose import Registered

if TYPE_CHECKING:
    from serving.control.registry import Registry


class LazyRegistry:
    """What the control plane asks and tells the registry. Everything blocks, and raises ServingError."""

    def __init__(self, tracking_uri: str) -> None:
        self._tracking_uri = tracking_uri

    def read(self, names: frozenset[str]) -> Registered:
        """Champions by their alias; versions of the named models, with the tags that releases are judged by."""
        registry = self._registry
        found = {name: registry.details(name) for name in sorted(names)}
        return Registered(
            registry.champions(),
            {name: tuple(one.version for one in versions) for name, versions in found.items()},
            {name: {one.version: one.claims for one in versions} for name, versions in found.items()},
            registry.identity(),
        )

    def said_champion(self, model: str) -> str | None:
        """What the alias says."""
        return self._registry.said_champion(model)

    def set_champion(self, model: str, version: str) -> None:
        """Makes the alias say the version."""
        self._registry.set_champion(model, version)

    def tags(self, model: str, version: str) -> Mapping[str, str]:
        """Tags of a version."""
        return self._registry.tags(model, version)

    def write_tags(self, model: str, version: str, tags: Mapping[str, str | None]) -> None:
        """Sets tags; takes those away whose value is None."""
        self._registry.write_tags(model, version, tags)

    def artifact(self, run_id: str, path: str) -> bytes | None:
        """The bytes of a run's artifact, None where there is none."""
        return self._registry.artifact(run_id, path)

    def write_artifact(self, run_id: str, path: str, data: bytes) -> None:
        """Makes `data` the run's artifact."""
        self._registry.write_artifact(run_id, path, data)

    @cached_property
    def _registry(self) -> Registry:
        from serving.control.registry import Registry

        return Registry(self._tracking_uri)
