"""A pool that does not come up: nothing of it stays, and it can be started again."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import ClassVar

import pytest

from serving.core.errors import ServingError, Unavailable, WeightsError
from serving.core.state import Pool
from workbench.config import load_config
from workbench.stack import pools
from workbench.stack.pools import PoolRunner
from workbench.wiring import layout

CONFIG = 'models: {m: {source: "/weights"}}\npools: [{model: m, hardware: cpu, launcher: fake, cores: [[0]]}]\n'


class Replicas:
    """Replicas that are up at once."""

    def __init__(self) -> None:
        self.logs: dict[str, Path] = {}
        self.is_running = False

    def statuses(self) -> tuple[()]:
        return ()

    async def start(self) -> None:
        self.is_running = True

    async def stop(self, settle_s: float) -> None:
        self.is_running = False


class Prepared:
    weights_path = None
    weights_digest = "sha256:0"
    covers: ClassVar[dict[str, str]] = {}
    max_model_len = 64
    fingerprint = "f"

    def __init__(self, replicas: Replicas) -> None:
        self.replicas = replicas


class Reports:
    def __init__(self) -> None:
        self.error: ServingError | None = None
        self.pools: list[str] = []

    async def publish_pool(self, pool: Pool) -> None:
        if self.error is not None:
            raise self.error
        self.pools.append(pool.pool_id)

    async def remove_pool(self, pool_id: str) -> None:
        self.pools = [other for other in self.pools if other != pool_id]


class Versions:
    async def of(self, *_: object) -> str:
        return "1"


@pytest.mark.parametrize("step", ["weights", "cancelled", "publish"])
async def test_a_pool_that_failed_to_start_is_not_started_and_can_be(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, step: str
):
    file = tmp_path / "workbench.yaml"
    file.write_text(CONFIG)
    config = load_config(file)
    replicas, reports = Replicas(), Reports()
    failure: BaseException | None = None

    async def prepare(*_: object) -> Prepared:
        if failure is not None:
            raise failure
        return Prepared(replicas)

    monkeypatch.setattr(pools, "prepare", prepare)
    runner = PoolRunner(config.pools[0], config, layout(config), reports, Versions(), lambda *_: None)  # type: ignore[arg-type]
    if step == "publish":
        reports.error = Unavailable("the store is away")
    else:
        failure = WeightsError("model.safetensors is cut off") if step == "weights" else asyncio.CancelledError()
    with pytest.raises((ServingError, asyncio.CancelledError)):
        await runner.start()
    assert not runner.is_started and not replicas.is_running and runner.facts is None and runner.processes() == []

    failure = reports.error = None
    await runner.start()
    assert runner.is_started and replicas.is_running and reports.pools == [runner.pool.pool_id]
    await runner.stop()
    assert not runner.is_started and not replicas.is_running and reports.pools == []


async def test_an_adapter_that_the_engine_does_not_list_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    file = tmp_path / "workbench.yaml"
    file.write_text(CONFIG.replace("cores: [[0]]", "adapters: [french]"))
    config = load_config(file)
    replicas, reports = Replicas(), Reports()

    async def prepare(*_: object) -> Prepared:
        return Prepared(replicas)

    monkeypatch.setattr(pools, "prepare", prepare)
    runner = PoolRunner(config.pools[0], config, layout(config), reports, Versions(), lambda *_: None)  # type: ignore[arg-type]
    with pytest.raises(
        ServingError, match="serve no adapter 'french', they list nothing; start them with --lora-modules"
    ):
        await runner.start()
    assert not runner.is_started and not replicas.is_running and reports.pools == []
