"""JupyterLab beside a whole stack: MLflow and the endpoint's docs through its proxy."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
from collections.abc import AsyncIterator
from urllib.parse import parse_qs, urlsplit

import pytest
import pytest_asyncio
import yaml

from tests.integration.processes import fetch, text, until
from tests.integration.workplaces import POOL, ROOT, Workplace, new_workplace

pytestmark = pytest.mark.asyncio(loop_scope="session")
SMALL = {"concurrencies": "1,2,4,8", "num_prompt_tokens": "24", "num_output_tokens": "8"}
IDLE = "idle-model"
"""Of a pool that does not run, so that its engine can be tuned."""


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def place(mlflow_uri: str) -> AsyncIterator[Workplace]:
    with new_workplace() as place:
        file = place.folder / "workbench.yaml"
        config = yaml.safe_load(file.read_text())
        config["models"][IDLE] = {"source": str(place.folder / "weights")}
        config["pools"] = [
            {**POOL, "model": place.model, "id": "main"},
            {**POOL, "model": IDLE, "id": "idle", "start": "on_demand"},
        ]
        file.write_text(yaml.safe_dump(config | {"stores": {"mlflow_tracking_uri": mlflow_uri}}))
        shutil.copytree(ROOT / "notebooks", place.folder / "notebooks")
        place.env["PYTHONPATH"] = str(ROOT)
        child = await place.start("up")

        async def serves() -> bool:
            assert child.returncode is None, text(place.folder / "err")
            return "Serving until" in text(place.folder / "out") and await place.ask() == 200

        try:
            await until(serves, "the stack to serve", 180.0)
            yield place
        finally:
            if child.returncode is None:
                child.terminate()
                await asyncio.wait_for(child.wait(), 60)


async def test_mlflow_and_the_endpoints_docs_are_behind_jupyterlab_and_in_its_launcher(
    place: Workplace, mlflow_uri: str
) -> None:
    assert place.state is not None
    url = urlsplit(place.state.urls["lab"])
    assert url.path == "/lab/tree/notebooks"
    lab, token = f"http://{url.netloc}", parse_qs(url.query)["token"][0]

    async def got(path: str) -> tuple[int, bytes]:
        return await asked(lab, path, token)

    status, docs = await got("/endpoint/docs")
    assert (status, b"/v1/chat/completions" in docs) == (200, True)
    assert place.gateway.encode() in docs, "examples name the endpoint and not JupyterLab"
    status, page = await got("/mlflow/")
    [script] = re.findall(rb'src="(static-files/[^"]*main[^"]*\.js)"', page)[:1]
    assert status == 200
    status, code = await got(f"/mlflow/{script.decode()}")
    assert (status, len(code) > 10_000) == (200, True)
    status, found = await got("/mlflow/ajax-api/2.0/mlflow/experiments/search?max_results=5")
    assert status == 200 and "experiments" in json.loads(found)
    entries = json.loads((await got("/server-proxy/servers-info"))[1])["server_processes"]
    assert {entry["launcher_entry"]["path_info"] for entry in entries} >= {"mlflow/", "endpoint/docs"}
    assert (await asked(lab, "/mlflow/", ""))[0] in (302, 403), "nobody gets there without the token"


async def asked(base: str, path: str, token: str) -> tuple[int, bytes]:
    status, _, body = await fetch(base, "GET", path, **({"authorization": f"token {token}"} if token else {}))
    return status, body
