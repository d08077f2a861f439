"""`workbench up` on real vLLM, as the live tests use it."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import yaml

from tests.integration.processes import fetch
from workbench.stack.ports import free_port
from workbench.stack.state import StackState, StateFile

ROOT = Path(__file__).parents[2]
MINILM = "all-minilm-l6-v2"
# Three engines of some 2 GiB each, and room for what else runs.
MEMORY_FOR_THREE_BYTES = 10 * 2**30
START_TIMEOUT_S = 300.0
END_TIMEOUT_S = 90.0


def shared_memory_of(pids: set[int]) -> list[str]:
    """What processes left in shared memory, by the numbers in the files' names."""
    return [path.name for path in Path("/dev/shm").iterdir() if any(f"_{pid}_" in path.name for pid in pids)]


@dataclass
class LiveStack:
    """A running `workbench up`."""

    folder: Path
    child: asyncio.subprocess.Process
    gateway: str = ""

    @property
    def state(self) -> StackState:
        state = StateFile(self.folder / "data" / "run" / "stack.json").read()
        assert state is not None
        return state

    @property
    def log(self) -> str:
        return (self.folder / "up.err").read_text(errors="replace")

    async def workbench(self, *arguments: str) -> dict[str, Any]:
        """What a command says as JSON."""
        command = ["-m", "workbench", *arguments, "--json", "--config", str(self.folder / "workbench.yaml")]
        asking = await asyncio.create_subprocess_exec(
            sys.executable, *command, cwd=ROOT, stdout=asyncio.subprocess.PIPE
        )
        output, _ = await asyncio.wait_for(asking.communicate(), 60)
        assert asking.returncode == 0
        said: dict[str, Any] = json.loads(output)
        return said

    async def status(self) -> dict[str, Any]:
        return await self.workbench("status")

    async def report(self, model: str) -> dict[str, Any]:
        """What the stack says of the model's one replica."""
        reports = (await self.status())["replicas"]
        (found,) = [report for report in reports if report["replica"]["replica_id"].startswith(model)]
        return dict(found)

    async def engine(self, model: str) -> str:
        """The address of the model's one replica."""
        return str((await self.report(model))["replica"]["url"])


def write_config(folder: Path) -> None:
    """The default configuration on ports and in a folder of its own; only the models are shared."""
    config = yaml.safe_load((ROOT / "workbench.yaml").read_text())
    config["gateway"]["port"], config["mlflow"]["port"] = free_port(), free_port()
    config["data_dir"] = "data"
    (folder / "workbench.yaml").write_text(yaml.safe_dump(config))
    models = ROOT / ".workbench" / "models"
    models.mkdir(parents=True, exist_ok=True)
    (folder / "data").mkdir()
    (folder / "data" / "models").symlink_to(models)


async def serves(running: LiveStack) -> bool:
    """`up --json` writes its result once everything is ready."""
    assert running.child.returncode is None, running.log
    try:
        said = json.loads((running.folder / "up.out").read_text())
    except ValueError:
        return False
    running.gateway = said["urls"]["gateway"]
    body = await fetch(running.gateway, "GET", "/v1/models")
    return {"smollm2-135m", "gemma3-270m"} <= {model["id"] for model in orjson.loads(body[2])["data"]}


async def end(running: LiveStack) -> None:
    """SIGTERM must end it cleanly and leave nothing behind."""
    if running.child.returncode is not None:
        return
    records = running.state.processes
    running.child.terminate()
    try:
        code = await asyncio.wait_for(running.child.wait(), END_TIMEOUT_S)
    except TimeoutError:
        running.child.kill()
        raise
    left = [record.name for record in records if record.session()]
    assert (code, left) == (0, []), running.log
