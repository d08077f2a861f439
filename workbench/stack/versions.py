"""Which registered version a set of weights is; remembered, so that the stack also starts with MLflow down."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

from serving.control.registered import ChampionExists
from serving.control.registry_watch import registry_name
from serving.core.errors import ServingError, Unavailable
from serving.core.state import Task

RETRY_S = 5.0
GIVE_UP_S = 60.0

Register = Callable[[str, str, str, Task], str]
"""(name, source, digest, task) → version; blocks, and raises ServingError when the registry does not answer."""


def import_registry() -> None:
    """Imports what `register_with` needs; seconds, better spent in a thread while MLflow's server starts."""
    import serving.control.registry  # noqa: F401 - for its effect


def register_with(tracking_uri: str) -> Register:
    """Registers weights in MLflow: as champion where the name has none, else as one more version for a rollout."""

    def register(name: str, source: str, digest: str, task: Task) -> str:
        # MLflow takes seconds to import and is in the `bench` extra: paid in the thread that needs it.
        from serving.control.registry import Registry

        registry = Registry(tracking_uri)
        try:
            return registry.register(name, source, digest, task=task, first=True)
        except ChampionExists:
            return registry.register(name, source, digest, task=task)

    return register


class Versions:
    """Asks the registry; falls back to its last answer for the same digest.

    Args:
        register: asks the registry, in a thread.
        path: where answers are remembered.
        on_wait: told which model waits for what.
        until_up: returns when the registry answers, or has had its time to.
        uri: the registry's address; what another one answered is not its answer.
    """

    def __init__(
        self,
        register: Register,
        path: Path,
        on_wait: Callable[[str, str], None],
        until_up: Callable[[], Awaitable[object]],
        *,
        uri: str = "",
    ) -> None:
        self._registry = registry_name(uri)
        self._register = register
        self._until_up = until_up
        self._path = path
        self._on_wait = on_wait
        self._lock = asyncio.Lock()

    async def of(
        self,
        name: str,
        source: str,
        digest: str,
        task: Task,
        *,
        retry_s: float = RETRY_S,
        give_up_s: float = GIVE_UP_S,
    ) -> str:
        """The version of `digest` under `name`: the registry's word, or what it said before when it is away.

        Weights that have no version yet wait `give_up_s` for the registry: none can be made up.

        Raises:
            Unavailable: it did not answer until then.
        """
        await self._until_up()
        deadline_s = time.monotonic() + give_up_s
        while True:
            try:
                async with self._lock:
                    version = await asyncio.to_thread(self._register, name, source, digest, task)
                    self._remember(name, digest, version)
            except ServingError as error:
                known = self._known().get(self._registry, {}).get(f"{name} {digest}")
                if known is not None:
                    self._on_wait(name, f"MLflow does not answer: served as version {known}, as registered before")
                    return known
                if time.monotonic() >= deadline_s:
                    raise _not_registered(name, give_up_s, error) from error
                self._on_wait(name, f"waits for MLflow, to register its first version: {error.message}")
            else:
                return version
            await asyncio.sleep(min(retry_s, max(deadline_s - time.monotonic(), 0.0)))

    def _known(self) -> dict[str, dict[str, str]]:
        """Versions by name and digest, by registry; a file that is not ours or is cut off knows nothing."""
        try:
            known = json.loads(self._path.read_text("utf-8"))
        except (FileNotFoundError, ValueError):
            return {}
        kept = known.items() if isinstance(known, dict) else ()
        return {registry: versions for registry, versions in kept if isinstance(versions, dict)}

    def _remember(self, name: str, digest: str, version: str) -> None:
        known = self._known()
        known[self._registry] = known.get(self._registry, {}) | {f"{name} {digest}": version}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        temporary = self._path.with_suffix(".tmp")
        temporary.write_text(json.dumps(known, indent=2), "utf-8")
        temporary.replace(self._path)


def _not_registered(name: str, waited_s: float, error: ServingError) -> Unavailable:
    return Unavailable(
        f"{name} has no version to be served as: its weights were never registered, and MLflow did not register them "
        f"within {waited_s:g} s ({error.message}). Start MLflow, or leave MLFLOW_TRACKING_URI unset: the stack then "
        "starts its own"
    )
