"""Rollouts on a real stack of fake engines: two versions, real gateway workers, control plane, store and MLflow."""

from __future__ import annotations

import asyncio
import json
import math
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from typing import Any

import mlflow
import orjson
import pytest
import redis.asyncio
import yaml

from serving.control.registry import Registry
from serving.core.policies.rollout import Action, Phase, Rollout, replay
from serving.core.state import Task
from serving.engine.client import EngineClient
from serving.store.connection import connect
from serving.store.replicas import ReplicaReports
from serving.store.rollouts import Rollouts
from serving.telemetry.decision_log import read_rollouts
from tests.integration.processes import fetch, text, until
from tests.integration.workplaces import POOL, Workplace, new_workplace, running
from workbench.cli.exits import Exit


@pytest.fixture
def workplace() -> Iterator[Workplace]:
    with new_workplace() as place:
        path = place.folder / "workbench.yaml"
        config = yaml.safe_load(path.read_text())
        candidate = {
            "id": "candidate",
            "model": place.model,
            **POOL,
            "source": str(place.folder / "tuned"),
            "start": "on_demand",
        }
        config["pools"].append(candidate)
        path.write_text(yaml.safe_dump(config))
        yield place


async def canary(workplace: Workplace, *words: str) -> Any:
    code, output = await workplace.run("canary", *words, "--json")
    assert code == Exit.OK, text(workplace.folder / "err")
    return json.loads(output)


@asynccontextmanager
async def store_of(workplace: Workplace) -> AsyncIterator[redis.asyncio.Redis]:
    assert workplace.state is not None
    client = connect(workplace.state.urls["store"])
    try:
        yield client
    finally:
        await client.aclose()


async def reaches(client: redis.asyncio.Redis, model: str, wanted: Phase) -> Rollout:
    async def is_there() -> bool:
        return (await Rollouts(client).all())[model].phase is wanted

    await until(is_there, f"the rollout to be {wanted}", 90.0)
    return (await Rollouts(client).all())[model]


async def start(workplace: Workplace, *words: str) -> None:
    """Starts a rollout of version 2 once the routing table knows of it."""
    wanted = ("canary", "start", f"{workplace.model}@2", "--pool", "candidate", "--no-gate", "--no-approval", *words)

    async def begins() -> bool:
        return (await workplace.run(*wanted))[0] == Exit.OK

    await until(begins, "the rollout to start", 60.0)


class Users:
    """Sessions that ask the bare name, one after another, until told to stop."""

    def __init__(self, workplace: Workplace) -> None:
        self._workplace = workplace
        self.versions: Counter[str] = Counter()
        self.statuses: Counter[int] = Counter()

    @asynccontextmanager
    async def asking(self, num: int = 4) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(self._ask_on(user)) for user in range(num)]
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            ended = await asyncio.gather(*tasks, return_exceptions=True)
            assert all(isinstance(one, asyncio.CancelledError) for one in ended), ended

    async def _ask_on(self, user: int) -> None:
        async with EngineClient(self._workplace.gateway) as client:
            number = 0
            while True:
                number += 1
                body = {
                    "model": self._workplace.model,
                    "messages": [{"role": "user", "content": f"hello {user} {number}"}],
                    "max_tokens": 4,
                }
                headers = [
                    (b"content-type", b"application/json"),
                    (b"x-session-id", f"{user}-{number}".encode()),
                ]
                answer = await client.request("POST", "/v1/chat/completions", headers=headers, body=orjson.dumps(body))
                await answer.read()
                self.statuses[answer.status] += 1
                self.versions[answer.headers.get(b"x-served-by", b";-").split(b";")[1].strip().decode()] += 1
                await asyncio.sleep(0.02)


async def shows(mlflow_uri: str, model: str, version: str) -> None:
    """Returns when the registry shows that champion; what is served doesn't wait for it."""
    client = mlflow.MlflowClient(mlflow_uri)

    async def does() -> bool:
        found = await asyncio.to_thread(client.get_registered_model, model)
        return str(found.aliases["champion"]) == version

    await until(does, f"the registry to show {version}", 60.0)


def register(mlflow_uri: str, workplace: Workplace) -> None:
    source = str(workplace.folder / "tuned")
    assert Registry(mlflow_uri).register(workplace.model, source, f"fake:{source}", task=Task.GENERATE) == "2"


async def all_of(users: Users, num: int) -> Counter[str]:
    """Versions that served the next `num` requests and more."""
    users.versions.clear()

    async def is_enough() -> bool:
        return users.versions.total() >= num

    await until(is_enough, "traffic", 60.0)
    return users.versions


async def tell_delay(client: redis.asyncio.Redis, workplace: Workplace) -> None:
    """Prints how long after the alarm the candidate still answered, for who measures it (pytest -s)."""
    (back,) = [
        record
        for record in read_rollouts(workplace.folder / ".workbench" / "decisions")
        if record.decision.action is Action.ROLL_BACK
    ]
    _, seen = await Rollouts(client).observed(back.view.rollout.rollout_id, "0")
    late_s = max(one.at_s for one in seen if one.version == "2") - back.view.now_s
    pairs = back.view.signals.num_pairs
    print(f"the candidate's last answer came {late_s:.2f} s after the alarm ({pairs} pairs, {back.decision.reason})")


async def answers_garbage(client: redis.asyncio.Redis) -> None:
    """Makes the candidate end its answers before the first token."""
    reports = [report for report in (await ReplicaReports(client).all()).values() if report.pool_id == "candidate"]
    body = orjson.dumps({"no_token": True})
    for report in reports:
        assert (await fetch(report.replica.url, "POST", "/fake/faults", body))[0] == 200
    assert reports


@pytest.mark.long  # minutes; test_rollout_keeper.py has every step of it in short
async def test_garbage_is_taken_back_and_a_good_candidate_promoted_without_an_error_to_anybody(
    workplace: Workplace, mlflow_uri: str
) -> None:
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    model = workplace.model
    async with running(workplace), store_of(workplace) as client:
        await asyncio.to_thread(register, mlflow_uri, workplace)
        users = Users(workplace)
        async with users.asking():
            await start(workplace, "--steps", "5,100", "--min-pairs", "100000")
            await reaches(client, model, Phase.STEP)
            await answers_garbage(client)
            users.versions.clear()
            bad = await reaches(client, model, Phase.ROLLED_BACK)
            served = Counter(users.versions)
            assert bad.reason.startswith("worse online: ")
            await tell_delay(client, workplace)
            num, share = served.total(), served["2"]
            assert share <= 0.05 * num + 4.0 * math.sqrt(0.05 * 0.95 * num)
            assert set(await all_of(users, 100)) == {"1"}

            await start(workplace, "--steps", "25,100", "--min-step-s", "3", "--min-pairs", "5")
            await reaches(client, model, Phase.PROMOTED)
            await shows(mlflow_uri, model, "2")
            assert set(await all_of(users, 100)) == {"2"}
            assert (await canary(workplace, "rollback", model))["is_taken_back"]
            await reaches(client, model, Phase.ROLLED_BACK)
            await shows(mlflow_uri, model, "1")
            assert set(await all_of(users, 100)) == {"1"}
        assert set(users.statuses) == {200}
        (standing,) = await canary(workplace, "status")
        assert (standing["phase"], standing["waits_for"]) == ("rolled_back", [])
        assert standing["signals"]["errors"]["num_pairs"] >= 5
    records = list(read_rollouts(workplace.folder / ".workbench" / "decisions"))
    assert all(replay(record) == record.decision for record in records)
    assert [record.decision.phase for record in records].count(Phase.PROMOTED) == 1
