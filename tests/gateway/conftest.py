"""A gateway in this process over fake engines in this process."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from serving.core.state import Pool, RoutingTable
from serving.engine.fake import FakeEngine, FakeSettings
from serving.gateway.app import Gateway
from serving.settings import GatewaySettings
from serving.store.routing_table import FileRoutingTable
from tests.gateway.fleets import MODEL, MakeEngine, MakeGateway, a_pool, a_table


@pytest_asyncio.fixture
async def make_engine() -> AsyncIterator[MakeEngine]:
    """Starts fake engines: fast ones, of model `m` unless said otherwise."""
    async with AsyncExitStack() as stack:

        async def make(**settings: Any) -> FakeEngine:
            fast = {"model": MODEL, "ttft_ms": 1.0, "itl_ms": 1.0, "embedding_dimensions": 8}
            return await stack.enter_async_context(FakeEngine(FakeSettings(**{**fast, **settings})))

        yield make


@pytest_asyncio.fixture
async def make_gateway(tmp_path: Path) -> AsyncIterator[MakeGateway]:
    """Starts gateways that serve from a file with the pools given, without a store."""
    async with AsyncExitStack() as stack:

        async def make(*pools: Pool, table: RoutingTable | None = None, **settings: Any) -> Gateway:
            path = tmp_path / "routing-table.json"
            await FileRoutingTable(path).publish(table or a_table(*pools))
            defaults = {"routing_table_path": path, "cache_salt_secret": "secret", "connect_timeout_s": 1.0}
            gateway = Gateway(GatewaySettings(**{**defaults, **settings}), seed=1)
            await stack.enter_async_context(gateway.running())
            return gateway

        yield make


@pytest_asyncio.fixture
async def engine(make_engine: MakeEngine) -> FakeEngine:
    return await make_engine()


@pytest_asyncio.fixture
async def gateway(make_gateway: MakeGateway, engine: FakeEngine) -> Gateway:
    """One replica of model `m`."""
    return await make_gateway(a_pool("pool-a", {"r1": engine.url}))


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("WORKBENCH_"):
            monkeypatch.delenv(name)
