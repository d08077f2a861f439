"""Servers that several integration tests share."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio
import redis.asyncio

from serving.store.connection import connect
from serving.store.server import StoreServer
from tests.integration.replaying import Two, a_store
from workbench.mlflow_server import mlflow_server
from workbench.stack.ports import free_port


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def mlflow_uri(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[str]:
    """A real MLflow server on SQLite, one for all tests: each uses model and experiment names of its own."""
    port = free_port()
    server = mlflow_server(tmp_path_factory.mktemp("mlflow"), port)
    await server.start()
    yield f"http://127.0.0.1:{port}"
    await server.stop()


@pytest_asyncio.fixture
async def server() -> AsyncIterator[StoreServer]:
    """A store of the test's own."""
    async with a_store() as server:
        yield server


@pytest_asyncio.fixture
async def client(server: StoreServer) -> AsyncIterator[redis.asyncio.Redis]:
    """A client of that store."""
    client = connect(server.url)
    yield client
    await client.aclose()


@pytest_asyncio.fixture
async def two(server: StoreServer) -> AsyncIterator[Two]:
    """Two workers that keep idempotency keys in that store."""
    two = Two(server)
    for replays in two.workers:
        replays.start()
    yield two
    await two.close()
