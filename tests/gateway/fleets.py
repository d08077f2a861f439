"""Pools and tables for tests of the gateway."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

from serving.core.state import CostRow, Model, Pool, Replica, ReplicaState, RoutingTable, Task
from serving.engine.fake import FakeEngine
from serving.gateway.app import Gateway
from tests.unit import core_examples

EMBEDDER = "embedder"
MODEL = "m"

MakeEngine = Callable[..., Awaitable[FakeEngine]]
MakeGateway = Callable[..., Awaitable[Gateway]]


def a_pool(pool_id: str, urls: dict[str, str], *, model: str = MODEL, task: Task = Task.GENERATE) -> Pool:
    return Pool(
        pool_id=pool_id,
        model=model,
        version="1",
        task=task,
        hardware_class="cpu",
        usd_per_hour=0.1,
        max_model_len=2048,
        engine_fingerprint="engine",
        hardware_fingerprint="hardware",
        replicas=tuple(Replica(replica_id, url, ReplicaState.READY) for replica_id, url in urls.items()),
    )


def a_table(*pools: Pool, epoch: int = 1, **changes: Any) -> RoutingTable:
    models = (
        Model(MODEL, Task.GENERATE, "1", ("1", "2"), tokens_per_byte=0.25),
        Model(EMBEDDER, Task.EMBED, "1", ("1",), tokens_per_byte=0.25),
    )
    return RoutingTable(epoch=epoch, published_at_s=0.0, models=models, pools=pools, **changes)


def a_row(**changes: Any) -> CostRow:
    """A small cell that does not expire."""
    forever = {"measured_at_s": 0.0, "expires_at_s": 4e9}
    return core_examples.a_row(**{"num_prompt_tokens": 10, "num_output_tokens": 10, **forever, **changes})
