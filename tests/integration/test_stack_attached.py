"""A pool that somebody else runs, and JupyterLab, in one running stack."""

from __future__ import annotations

import importlib.util
import json
import os
from collections.abc import AsyncIterator, Iterator
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
import yaml

from serving.core.errors import UpstreamError
from serving.engine.fake import FakeEngine, FakeSettings, ServerFaults
from tests.integration.processes import fetch, text, until
from tests.integration.workplaces import Workplace, new_workplace
from workbench.cli.exits import Exit

has_lab = importlib.util.find_spec("jupyterlab") is not None


@pytest_asyncio.fixture
async def engine() -> AsyncIterator[FakeEngine]:
    async with FakeEngine(
        FakeSettings(model="far", lora_modules=("near",), ttft_ms=1, itl_ms=1, max_model_len=777)
    ) as running:
        yield running


@pytest.fixture
def workplace(engine: FakeEngine) -> Iterator[Workplace]:
    with new_workplace() as place:
        file = place.folder / "workbench.yaml"
        config = yaml.safe_load(file.read_text())
        config["models"] = {"far": {"source": str(place.folder / "weights")}}
        pool = {"model": "far", "hardware": "cpu", "launcher": "attach", "urls": [engine.url], "id": "far"}
        config["pools"] = [pool | {"adapters": ["near"]}]
        file.write_text(yaml.safe_dump(config))
        place.model = "far"
        yield place


async def get(url: str, path: str) -> int:
    try:
        return (await fetch(url, "GET", path))[0]
    except UpstreamError:
        return 0


async def test_an_attached_pool_is_served_watched_and_never_ended(
    workplace: Workplace, engine: FakeEngine, mlflow_uri: str
):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    child = await workplace.start("up")  # with JupyterLab, where it is installed

    async def serves() -> bool:
        assert child.returncode is None, text(workplace.folder / "err")
        return "Serving until" in text(workplace.folder / "out") and await workplace.ask() == 200

    try:
        await until(serves, "the stack to serve", 180.0)
        assert len(engine.log.ended) >= 1
        listed = await fetch(workplace.gateway, "GET", "/v1/models")
        assert b'"max_model_len":777' in listed[2].replace(b" ", b"")  # as the engine says
        asked = {"model": "far+near", "messages": [{"role": "user", "content": "one"}], "max_tokens": 2}
        assert (await fetch(workplace.gateway, "POST", "/v1/chat/completions", json.dumps(asked).encode()))[0] == 200
        assert engine.log.ended[-1].body["model"] == "near"
        assert workplace.state is not None
        assert not any(record.pid == os.getpid() for record in workplace.state.processes)
        await judge_lab(workplace)
        await judge_measured(workplace)
        engine.faults = ServerFaults(health_status=503)

        async def is_down() -> bool:
            replicas = (await workplace.status())["replicas"]
            return [replica["replica"]["state"] for replica in replicas] == ["down"]

        await until(is_down, "the replica to count as down", 30.0)

        async def is_refused() -> bool:
            return await workplace.ask() == 503

        await until(is_refused, "the workers to have taken up that table", 10.0)
    finally:
        code, _ = await workplace.run("down", timeout_s=60)
        await child.wait()
    assert (code, child.returncode) == (Exit.OK, Exit.OK)
    engine.faults = None
    assert await get(engine.url, "/health") == 200


async def judge_measured(workplace: Workplace) -> None:
    """What the engine offers is scraped, and it can be benched by itself and through the gateway."""
    (replica,) = (await workplace.status())["replicas"]
    assert replica["snapshot"] is not None and replica["snapshot"]["num_prompt_tokens_total"] > 0
    for target in ("engine", "gateway"):
        words = ["--target", target, "--prompt-tokens", "24", "--output-tokens", "8", "--requests", "40", "--json"]
        code, output = await workplace.run("bench", "far", *words)
        told = json.loads(output)
        assert (code, told["invalid"]) == (Exit.OK, None)
        assert told["engine_counters"]["num_output_tokens"] == 40 * 8


async def judge_lab(workplace: Workplace) -> None:
    """JupyterLab answers behind its token alone; without the package the table says how to get one."""
    assert workplace.state is not None
    if not has_lab:
        assert "workbench lab" in text(workplace.folder / "out")
        return
    url = workplace.state.urls["lab"]
    assert url in text(workplace.folder / "out").replace("\n", "")
    parts = urlsplit(url)
    (token,) = parse_qs(parts.query)["token"]
    assert token not in " ".join(record.command for record in workplace.state.processes)
    base = f"http://{parts.netloc}"
    assert await get(base, f"/api/contents?token={token}") == 200
    assert await get(base, "/api/contents?token=wrong") == 403
