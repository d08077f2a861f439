"""A folder with a configuration in which tests run `workbench` commands over fake engines."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
import yaml

from serving.core.errors import UpstreamError
from tests.integration.processes import fetch, free_port, text, until
from tests.measured import make_vocabulary
from workbench.cli.exits import Exit
from workbench.stack.state import StackState, StateFile

ROOT = Path(__file__).parents[2]
ENGINE = {"ttft_ms": 4, "itl_ms": 2, "prefill_ms_per_token": 0.05}
NUM_ASKED = 6
POOL = {"hardware": "cpu", "launcher": "fake", "engine": ENGINE}


@dataclass
class Workplace:
    """A folder with a configuration, and commands run in it. Tests share an MLflow, so each has a model of its own."""

    folder: Path
    model: str
    env: dict[str, str] = field(default_factory=dict)
    program: tuple[str, ...] = ("-m", "workbench")

    @property
    def state(self) -> StackState | None:
        return StateFile(self.folder / ".workbench" / "run" / "stack.json").read()

    @property
    def gateway(self) -> str:
        state = self.state
        assert state is not None
        return state.urls["gateway"]

    async def start(self, *words: str) -> asyncio.subprocess.Process:
        command = [sys.executable, *self.program, *words, "--config", str(self.folder / "workbench.yaml")]
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("WORKBENCH_")}
        with (self.folder / "out").open("wb") as out, (self.folder / "err").open("ab") as err:
            return await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=inherited | self.env, stdout=out, stderr=err
            )

    async def run(self, *words: str, timeout_s: float = 180.0) -> tuple[int, str]:
        """Exit code and standard output."""
        command = [sys.executable, *self.program, *words, "--config", str(self.folder / "workbench.yaml")]
        with (self.folder / "err").open("ab") as err:
            child = await asyncio.create_subprocess_exec(
                *command, cwd=ROOT, env=os.environ | self.env, stdout=asyncio.subprocess.PIPE, stderr=err
            )
        try:
            output, _ = await asyncio.wait_for(child.communicate(), timeout_s)
        finally:
            if child.returncode is None:  # a test that fails leaves nothing running
                child.terminate()
        return child.returncode or 0, output.decode()

    async def status(self) -> dict[str, Any]:
        code, output = await self.run("status", "--json")
        assert code == Exit.OK, text(self.folder / "err")
        return dict(json.loads(output))

    async def ask(self) -> int:
        body = orjson.dumps({"model": self.model, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4})
        try:
            return (await fetch(self.gateway, "POST", "/v1/chat/completions", body))[0]
        except UpstreamError:
            return 0


@contextmanager
def new_workplace() -> Iterator[Workplace]:
    """Ports, store and data folder of its own."""
    # A socket's path holds 107 bytes: pytest's own folders can be longer.
    with tempfile.TemporaryDirectory(prefix="wb-") as name:
        folder, model = Path(name), f"tiny-{secrets.token_hex(4)}"
        make_vocabulary(folder / "weights")
        config = {
            "models": {model: {"source": str(folder / "weights")}},
            "pools": [
                {**POOL, "model": model, "id": "main", "replicas": 2},
                {**POOL, "model": model, "id": "spare", "start": "on_demand"},
            ],
            "gateway": {"port": free_port(), "workers": 2},
            "mlflow": {"port": free_port()},
            "lab": {"port": free_port()},
        }
        (folder / "workbench.yaml").write_text(yaml.safe_dump(config))
        yield Workplace(folder, model)


@asynccontextmanager
async def running(place: Workplace) -> AsyncIterator[asyncio.subprocess.Process]:
    """`workbench up` until it answers; ended at the end, with all it left."""
    child = await place.start("up", "--no-lab")

    async def serves() -> bool:
        assert child.returncode is None, text(place.folder / "err")
        if "Serving until" not in text(place.folder / "out"):
            return False
        # Each connection may meet another worker, and one takes a table up later than the other.
        return all([await place.ask() == 200 for _ in range(NUM_ASKED)])

    try:
        await until(serves, "the stack to serve", 180.0)
        yield child
    finally:
        if child.returncode is None:
            child.terminate()
            await asyncio.wait_for(child.wait(), 30)
        await place.run("down")
