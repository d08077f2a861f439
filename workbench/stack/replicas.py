"""Replicas of one pool behind one interface: real engines, somebody else's, and fakes for tests and dry runs."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from serving.clock import SystemClock
from serving.core.errors import EngineError
from serving.core.state import ReplicaState
from serving.engine.catalogue import CATALOGUE
from serving.engine.environment import engine_environment
from serving.engine.fake.settings import FakeSettings
from serving.engine.flags import EngineFlags, HardwareKind, engine_build, engine_fingerprint
from serving.engine.launchers import ReplicaStatus
from serving.engine.launchers.attach import AttachLauncher
from serving.engine.launchers.local import Backoff, LocalLauncher
from serving.engine.process import Command, ReplicaSpec, vllm_command
from serving.engine.weights import Weights, resolve
from workbench.config import Launcher, ModelConfig, PoolConfig
from workbench.stack.service import OnChange
from workbench.wiring import Layout

ATTACH_TIMEOUT_S = 30.0
CPU_CLASS = "cpu"


class ReplicaSet(Protocol):
    """The replicas of one pool; keeps them up between `start` and `stop`."""

    @property
    def logs(self) -> Mapping[str, Path | None]:
        """Log file by replica id; None for somebody else's."""
        ...

    async def start(self) -> None:
        """Returns when one of them is ready; raises EngineError when none can be."""
        ...

    async def stop(self, settle_s: float) -> None:
        """Reports them as draining, waits `settle_s` until nothing new comes, and ends them."""
        ...

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Each of them as it stands now."""
        ...


@dataclass(frozen=True, slots=True)
class Engine:
    """Replicas ready to start. `covers` says what the fingerprint is a digest of; `weights_path` has the tokenizer."""

    replicas: ReplicaSet
    weights_digest: str
    weights_path: Path | None
    fingerprint: str
    covers: Mapping[str, Any]
    max_model_len: int


class LocalReplicas:
    """Child processes of this one, restarted when they end."""

    def __init__(self, pool: PoolConfig, specs: list[ReplicaSpec], command: Command, on_change: OnChange) -> None:
        self._specs = specs
        first_s = 0.2 if pool.launcher is Launcher.FAKE else Backoff().first_s
        self._launcher = LocalLauncher(
            clock=SystemClock(),
            rng=random.Random(),
            on_status=teller(on_change),
            command=command,
            backoff=Backoff(first_s=first_s),
        )

    @property
    def logs(self) -> Mapping[str, Path | None]:
        """Log file by replica id."""
        return {spec.replica_id: spec.log_path for spec in self._specs}

    async def start(self) -> None:
        """Starts all; returns when the first is ready, raises EngineError when each has failed once."""
        for spec in self._specs:
            self._launcher.launch(spec)
        waiting = [asyncio.create_task(self._launcher.until_ready(spec.replica_id)) for spec in self._specs]
        try:
            for ended in asyncio.as_completed(waiting):
                with contextlib.suppress(EngineError):
                    await ended
                    return
            await waiting[0]
        finally:
            for task in waiting:
                task.cancel()
            await asyncio.gather(*waiting, return_exceptions=True)

    async def stop(self, settle_s: float) -> None:
        """Drains and ends all."""
        await self._launcher.stop(settle_s=settle_s)

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Each as it stands now."""
        return self._launcher.statuses()


class AttachedReplicas:
    """Endpoints that somebody else runs."""

    def __init__(self, pool: PoolConfig, on_change: OnChange) -> None:
        self._urls = {f"{pool.pool_id}-{number}": url.rstrip("/") for number, url in enumerate(pool.urls)}
        self._launcher = AttachLauncher(self._urls, clock=SystemClock(), on_status=teller(on_change))

    @property
    def logs(self) -> Mapping[str, Path | None]:
        """None of theirs is ours to read."""
        return dict.fromkeys(self._urls)

    async def start(self) -> None:
        """Watches all; returns when the first is healthy.

        Raises:
            EngineError: none answered in time.
        """
        self._launcher.start()
        try:
            async with asyncio.timeout(ATTACH_TIMEOUT_S):
                while True:
                    if any(status.state is ReplicaState.READY for status in self.statuses()):
                        return
                    await asyncio.sleep(0.1)
        except TimeoutError:
            urls = ", ".join(self._urls.values())
            raise EngineError(f"none of {urls} answered GET /health within {ATTACH_TIMEOUT_S:g} s") from None

    async def stop(self, settle_s: float) -> None:
        """Stops watching; they run on, so there is nothing to wait for."""
        await self._launcher.stop()

    def statuses(self) -> tuple[ReplicaStatus, ...]:
        """Each as last probed."""
        return self._launcher.statuses()


async def prepare(pool: PoolConfig, model: ModelConfig, where: Layout, on_change: OnChange) -> Engine:
    """Resolves the weights and sets up the replicas.

    Raises:
        WeightsError: the weights are missing, broken, or the disk is full.
    """
    if pool.launcher is Launcher.FAKE:
        return _fake(pool, model, where, on_change)
    flags = engine_flags(pool, model)
    if pool.launcher is Launcher.ATTACH:
        return _attached(pool, model, flags, on_change)
    loop = asyncio.get_running_loop()

    def say(line: str) -> None:
        loop.call_soon_threadsafe(on_change, pool.pool_id, line)

    weights = await asyncio.to_thread(resolve, model.source, where.models_dir, on_progress=say)
    kind = hardware_kind(pool)
    environment = engine_environment(kind, flags, is_offline=weights.served != "hf")
    for note in environment.notes:
        on_change(pool.pool_id, note)
    build, version = engine_build()
    digest, covers = engine_fingerprint(
        engine=build,
        engine_version=version,
        flags=flags,
        weights_digest=weights.digest,
        runtime=environment.runtime,
    )
    specs = list(_specs(pool, model, weights, flags, where))
    return Engine(
        replicas=LocalReplicas(pool, specs, vllm_command, on_change),
        weights_digest=weights.digest,
        weights_path=weights.path if weights.served == "local" else None,
        fingerprint=digest,
        covers=covers,
        max_model_len=flags.max_model_len or _context_length(pool) or 0,
    )


def hardware_kind(pool: PoolConfig) -> HardwareKind:
    """Which vLLM build runs a pool."""
    return HardwareKind.CPU if pool.hardware == CPU_CLASS else HardwareKind.GPU


def engine_flags(pool: PoolConfig, model: ModelConfig) -> EngineFlags:
    """The engine's configuration: the defaults of hardware and task under the pool's `engine:` section."""
    kind = hardware_kind(pool)
    units = {} if kind is HardwareKind.CPU else {"tensor_parallel_size": pool.num_units}
    return EngineFlags.defaults(kind, model.task, context_length=_context_length(pool), **(units | pool.engine))


def _context_length(pool: PoolConfig) -> int | None:
    entry = CATALOGUE.get(pool.model)
    return None if entry is None else entry.context_length


def _attached(pool: PoolConfig, model: ModelConfig, flags: EngineFlags, on_change: OnChange) -> Engine:
    """What somebody else runs is known by what the configuration says of it."""
    digest, covers = engine_fingerprint(
        engine="attached",
        engine_version="",
        flags=flags,
        weights_digest=f"source:{model.source}",
        runtime={"adapters": ",".join(pool.adapters)} if pool.adapters else None,
    )
    local = Path(model.source).expanduser()
    return Engine(
        replicas=AttachedReplicas(pool, on_change),
        weights_digest=f"source:{model.source}",
        weights_path=local if local.is_dir() else None,
        fingerprint=digest,
        covers=covers,
        # The defaults are those of engines that we start; this one is asked, unless the configuration says.
        max_model_len=int(pool.engine.get("max_model_len") or 0),
    )


def _fake(pool: PoolConfig, model: ModelConfig, where: Layout, on_change: OnChange) -> Engine:
    settings = FakeSettings.model_validate({"lora_modules": pool.adapters, **pool.engine, "model": pool.model})
    flags = EngineFlags(max_model_len=settings.max_model_len)
    digest, covers = engine_fingerprint(
        engine="fake",
        engine_version="",
        flags=flags,
        weights_digest=f"fake:{model.source}",
        runtime={"settings": settings.model_dump_json(exclude={"port", "log", "host"})},
    )
    weights = Weights(Path(model.source), f"fake:{model.source}", model.source, "local")

    def command(spec: ReplicaSpec, port: int) -> list[str]:
        given = {"model": pool.model, "port": port, "lora_modules": ",".join(pool.adapters), **pool.engine}
        options = [part for name, value in given.items() for part in (f"--{name.replace('_', '-')}", _text(value))]
        return [sys.executable, "-m", "serving.engine.fake", *options]

    specs = list(_specs(pool, model, weights, flags, where))
    return Engine(
        replicas=LocalReplicas(pool, specs, command, on_change),
        weights_digest=weights.digest,
        weights_path=weights.path if weights.path.is_dir() else None,
        fingerprint=digest,
        covers=covers,
        max_model_len=settings.max_model_len,
    )


def _specs(
    pool: PoolConfig, model: ModelConfig, weights: Weights, flags: EngineFlags, where: Layout
) -> Iterator[ReplicaSpec]:
    for number in range(pool.replicas):
        replica_id = f"{pool.pool_id}-{number}"
        yield ReplicaSpec(
            replica_id=replica_id,
            model_name=pool.model,
            weights=weights,
            flags=flags,
            log_path=where.log_dir / f"{replica_id}.log",
            task=model.task,
            hardware=hardware_kind(pool),
            cores=None if pool.cores is None else pool.cores[number],
        )


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def teller(on_change: OnChange) -> Callable[[ReplicaStatus], None]:
    """Turns statuses into the stack's words."""

    def tell(status: ReplicaStatus) -> None:
        what = status.phase or status.state.value
        if status.state is ReplicaState.READY:
            phases = ", ".join(f"{name} {seconds:.1f} s" for name, seconds in status.phases_s.items())
            what = f"ready ({phases})" if phases else "ready"
        elif status.error is not None and status.state is ReplicaState.DOWN:
            what = f"down: {status.error}"
        on_change(status.replica_id, what)

    return tell
