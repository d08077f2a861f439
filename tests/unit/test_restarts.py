"""A restart that a command asked for: workers one after another, up to the first that does not come up."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import cast

import pytest
import redis.asyncio

from workbench.stack import restarts as module
from workbench.stack import wanted
from workbench.stack.restarts import Restarts
from workbench.stack.service import Service, ServiceFailed
from workbench.stack.wanted import Restart


class Store:
    """What a restart needs of the store; away while `is_away`."""

    def __init__(self) -> None:
        self.values: dict[str, bytes] = {}
        self.lists: dict[str, list[bytes]] = {}
        self.is_away = False

    async def rpush(self, key: str, value: str) -> None:
        self.lists.setdefault(key, []).append(value.encode())

    async def lpop(self, key: str) -> bytes | None:
        waiting = self.lists.get(key)
        return waiting.pop(0) if waiting else None

    async def lrem(self, key: str, count: int, value: str) -> int:
        waiting = self.lists.get(key, [])
        found = waiting.count(value.encode())
        self.lists[key] = [one for one in waiting if one != value.encode()]
        return found

    async def set(self, key: str, value: str, ex: int) -> None:
        if self.is_away:
            raise redis.exceptions.ConnectionError
        self.values[key] = value.encode()

    async def get(self, key: str) -> bytes | None:
        return self.values.get(key)


class Worker:
    def __init__(self, name: str, pid: int, error: str | None = None) -> None:
        self.name, self.pid, self.error = name, pid, error

    async def replace(self, on_step: Callable[[str], None]) -> None:
        on_step("its successor starts")
        if self.error is not None:
            raise ServiceFailed(self.error)
        self.pid += 100


async def run(store: Store, *workers: Worker) -> tuple[Restart, list[str]]:
    client = cast("redis.asyncio.Redis", store)
    said: list[str] = []
    restarts = Restarts(client, lambda: cast("list[Service]", workers), lambda part, what: said.append(part))
    restart_id = await wanted.ask_restart(client)
    assert await wanted.restart_told(client, restart_id) is None
    await restarts.look()
    async with asyncio.timeout(5):
        while (told := await wanted.restart_told(client, restart_id)) is None or not told.is_over:
            await asyncio.sleep(0)
            store.is_away = False
    await restarts.stop()
    return told, said


async def test_all_are_replaced_one_after_another() -> None:
    told, said = await run(Store(), Worker("gateway-0", 1), Worker("gateway-1", 2))
    assert told.error is None
    assert [(one.name, one.old_pid, one.new_pid) for one in told.replaced] == [
        ("gateway-0", 1, 101),
        ("gateway-1", 2, 102),
    ]
    assert told.steps == tuple(
        (name, what) for name in ("gateway-0", "gateway-1") for what in ("its successor starts", "ready")
    )
    assert said == [name for name, _ in told.steps]


async def test_the_first_that_does_not_come_up_ends_it() -> None:
    second = Worker("gateway-1", 2, "gateway-1 ended at its start")
    told, _ = await run(Store(), Worker("gateway-0", 1), second, Worker("gateway-2", 3))
    assert told.error == "gateway-1 ended at its start"
    assert [one.name for one in told.replaced] == ["gateway-0"]
    assert told.steps[-1][1].startswith("failed to be replaced, and serves as before")
    assert second.pid == 2


async def test_a_store_that_is_away_holds_nothing_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TELL_EVERY_S", 0)
    store = Store()
    store.is_away = True
    told, _ = await run(store, Worker("gateway-0", 1))
    assert [one.new_pid for one in told.replaced] == [101]


async def test_a_request_can_be_taken_back_until_it_is_taken_up() -> None:
    client = cast("redis.asyncio.Redis", Store())
    first, second = await wanted.ask_restart(client), await wanted.ask_restart(client)
    assert await wanted.withdraw_restart(client, first)
    assert await wanted.next_restart(client) == second
    assert not await wanted.withdraw_restart(client, second)
    assert await wanted.next_restart(client) is None
