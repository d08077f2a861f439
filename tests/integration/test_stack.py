"""`workbench up` over fake engines: the loop closed once, what dies comes back, and nothing stays behind."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Iterator

import pytest
import yaml

from tests.integration.processes import text, until
from tests.integration.workplaces import Workplace, new_workplace, running
from workbench.cli.exits import Exit
from workbench.stack.state import StackState


@pytest.fixture
def workplace() -> Iterator[Workplace]:
    with new_workplace() as place:
        yield place


def names_running(state: StackState) -> list[str]:
    return [record.name for record in state.processes if record.session()]


async def test_the_loop_closed_once(workplace: Workplace):
    code, output = await workplace.run("up", "--sweep", "short", "--ask", "--once", "--json", timeout_s=300)
    assert code == Exit.OK, text(workplace.folder / "err")
    last_run = json.loads((workplace.folder / ".workbench" / "last-run.json").read_text())
    assert json.loads(output) == last_run
    assert {cell["model"] for cell in last_run["cells"]} == {workplace.model}
    assert {row["provenance"] for row in last_run["cost_rows"]} == {"measured"}
    assert last_run["answer"]
    assert last_run["served_by"].startswith("main; 1; ")
    assert last_run["served_by"].endswith(last_run["mlflow_run_ids"][-1])
    phases = set(last_run["seconds"]) - {"setup"}  # there when this test runs under the make that made the environment
    assert phases == {
        *("start", "fetch", "spawn", "import", "load", "warm_up", "mlflow", "sweep", "cost_table", "ask", "total")
    }
    assert workplace.state is None
    code, output = await workplace.run("cost-table", "show", "--json")
    by_engine = [row for row in last_run["cost_rows"] if row["target"] == "engine"]
    assert (code, len(json.loads(output)["rows"])) == (Exit.OK, len(by_engine))


async def test_what_dies_comes_back_and_nothing_stays(workplace: Workplace, mlflow_uri: str):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    async with running(workplace) as child:
        assert (await workplace.run("up", "--no-lab"))[0] == Exit.CONFLICT
        before = {record.name: record.pid for record in workplace.state.processes} if workplace.state else {}
        for name in ("main-0", "gateway-1", "control", "store"):
            os.kill(before[name], signal.SIGKILL)

        async def is_whole() -> bool:
            now = {record.name: record for record in workplace.state.processes} if workplace.state else {}
            back = all(
                name in now and now[name].pid != before[name] for name in ("main-0", "gateway-1", "control", "store")
            )
            return back and all(record.is_running for record in now.values())

        await until(is_whole, "what was killed to run again", 30.0)

        async def is_ready() -> bool:
            status = await workplace.status()
            states = {report["replica"]["replica_id"]: report["replica"]["state"] for report in status["replicas"]}
            return states == {"main-0": "ready", "main-1": "ready"} and await workplace.ask() == 200

        await until(is_ready, "both replicas to be ready again", 30.0)
        state = workplace.state
        assert state is not None
        assert (await workplace.run("down"))[0] == Exit.OK
        assert await asyncio.wait_for(child.wait(), 10) == Exit.OK
    assert names_running(state) == []
    assert (await workplace.run("down"))[0] == Exit.UNAVAILABLE


async def test_a_pool_on_demand(workplace: Workplace, mlflow_uri: str):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    async with running(workplace):
        code, output = await workplace.run("pool", "start", "spare", "--json")
        assert (code, json.loads(output)) == (Exit.OK, {"pool": "spare", "state": "ready"})
        assert "spare-0" in {report["replica"]["replica_id"] for report in (await workplace.status())["replicas"]}
        assert (await workplace.run("pool", "stop", "spare"))[0] == Exit.OK
        assert f"fake engine with model {workplace.model}" in (await workplace.run("logs", "spare-0"))[1]


async def test_what_a_killed_supervisor_leaves_is_ended(workplace: Workplace, mlflow_uri: str):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    async with running(workplace) as child:
        child.kill()
        await child.wait()
        state = workplace.state
        assert state is not None
        assert {"store", "control", "gateway-0", "main-0"} <= set(names_running(state))
        assert await workplace.ask() == 200, "the data plane needs no supervisor"
        assert (await workplace.run("status"))[0] == Exit.UNAVAILABLE
        code, output = await workplace.run("down", "--json")
        assert (code, json.loads(output)["was_running"]) == (Exit.OK, False)
        assert names_running(state) == []


async def test_a_taken_port_is_named_before_anything_starts(workplace: Workplace):
    port = yaml.safe_load((workplace.folder / "workbench.yaml").read_text())["gateway"]["port"]
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", port)
    async with server:
        assert (await workplace.run("up"))[0] == Exit.CONFLICT
    said = text(workplace.folder / "err")
    assert f"pid {os.getpid()} holds it" in said
    assert "WORKBENCH__GATEWAY__PORT=" in said
    assert workplace.state is None


async def test_ctrl_c_while_it_starts(workplace: Workplace):
    child = await workplace.start("up", "--no-lab")

    async def is_starting() -> bool:
        return "mlflow" in text(workplace.folder / "err") and workplace.state is not None

    await until(is_starting, "the stack to start")
    state = workplace.state
    child.send_signal(signal.SIGINT)
    assert await asyncio.wait_for(child.wait(), 60) == Exit.INTERRUPTED
    assert state is not None
    assert names_running(state) == []
    assert workplace.state is None


async def test_a_replica_that_cannot_start_says_why(workplace: Workplace, mlflow_uri: str):
    # No interface of this machine has that address, so the engine ends at its start.
    workplace.env |= {"MLFLOW_TRACKING_URI": mlflow_uri, "WORKBENCH__POOLS__0__ENGINE": "{host: 203.0.113.1}"}
    assert (await workplace.run("up", "--no-lab"))[0] == Exit.FAILED
    said = text(workplace.folder / "err")
    assert "replica main-0 died while starting: exit code 1" in said
    assert "cannot listen on 203.0.113.1" in said
    assert workplace.state is None
