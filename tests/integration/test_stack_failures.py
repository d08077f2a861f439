"""`workbench up` and what follows it, while MLflow is dead or an engine never becomes healthy."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator

import psutil
import pytest

from tests.integration.processes import free_port, text
from tests.integration.workplaces import ROOT, Workplace, new_workplace, running
from workbench.cli.exits import Exit

# `workbench` with shorter patience, or with another program in place of the engine.
PROGRAM = """
import sys
from dataclasses import replace
from types import SimpleNamespace
from workbench.cli.app import run_app
from workbench.stack import replicas
from workbench.stack.versions import Versions
{changes}
sys.exit(run_app(sys.argv[1:]))
"""
IMPATIENT = "Versions.of.__kwdefaults__.update(give_up_s=2.0, retry_s=0.5)"
DEAF_ENGINE = """#!{python}
import socket, sys, time
port = int(sys.argv[sys.argv.index("--port") + 1])
with socket.create_server(("127.0.0.1", port)):
    print("loading weights, shard 1 of 9", flush=True)
    time.sleep(60)
"""
WITH_DEAF_ENGINE = """
specs = replicas._specs
replicas._specs = lambda *given: (replace(spec, start_timeout_s=2.0) for spec in specs(*given))
replicas.sys = SimpleNamespace(executable={engine!r})
"""


@pytest.fixture
def workplace() -> Iterator[Workplace]:
    with new_workplace() as place:
        yield place


def change(place: Workplace, changes: str) -> None:
    path = place.folder / "program.py"
    path.write_text(PROGRAM.format(changes=changes))
    place.env["PYTHONPATH"] = str(ROOT)
    place.program = (str(path),)


def use_dead_mlflow(place: Workplace, known_at: str = "") -> None:
    """Nobody answers at MLflow's address; what was known of the one at `known_at` is known of this one."""
    dead = place.env["MLFLOW_TRACKING_URI"] = f"http://127.0.0.1:{free_port()}"
    for name in ("versions.json", "registry.json"):
        kept = place.folder / ".workbench" / name
        if known_at and kept.exists():
            kept.write_text(kept.read_text().replace(known_at, dead))


def left_over(place: Workplace) -> list[str]:
    """Processes that were started from the folder and still run."""
    lines = [" ".join(process.info["cmdline"] or ()) for process in psutil.process_iter(["cmdline"])]
    return [line for line in lines if str(place.folder) in line or place.model in line]


async def test_weights_without_a_version_wait_for_a_dead_mlflow_and_then_up_ends(workplace: Workplace):
    use_dead_mlflow(workplace)
    change(workplace, IMPATIENT)
    code, _ = await workplace.run("up", "--no-lab")
    said = text(workplace.folder / "err")
    assert code == Exit.UNAVAILABLE, said
    assert "waits for MLflow, to register its first version" in said
    assert f"{workplace.model} has no version to be served as" in said
    assert "leave MLFLOW_TRACKING_URI unset" in said
    assert workplace.state is None
    assert left_over(workplace) == []


async def test_with_mlflow_dead_a_known_version_serves_and_a_sweep_stays_on_disk(workplace: Workplace, mlflow_uri: str):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    async with running(workplace):
        pass
    use_dead_mlflow(workplace, mlflow_uri)
    async with running(workplace):
        said = text(workplace.folder / "err")
        assert "MLflow does not answer: served as version 1, as registered before" in said

        sweep = ("sweep", workplace.model, "--shape", "32x8", "--concurrency", "1")
        code, output = await workplace.run(*sweep, "--json", timeout_s=300)
        said = text(workplace.folder / "err")
        assert code == Exit.OK, said
        swept = json.loads(output)
        assert swept["mlflow_run_ids"] == [None]
        assert {cell["invalid"] for cell in swept["cells"]} == {None}
        assert list((workplace.folder / ".workbench" / "results").rglob("*.parquet")), "results stay on disk"

        code, output = await workplace.run(*sweep, timeout_s=300)
        assert code == Exit.OK
        assert "not in MLflow yet" in text(workplace.folder / "err") + output

        begun_s = time.monotonic()
        code, _ = await workplace.run("cost-table", "build", timeout_s=240)
        assert code == Exit.UNAVAILABLE
        assert "MLflow" in text(workplace.folder / "err").splitlines()[-1]
        assert time.monotonic() - begun_s < 60


async def test_an_engine_that_listens_and_never_is_healthy_ends_up(workplace: Workplace, mlflow_uri: str):
    workplace.env["MLFLOW_TRACKING_URI"] = mlflow_uri
    engine = workplace.folder / "engine"
    engine.write_text(DEAF_ENGINE.format(python=sys.executable))
    engine.chmod(0o755)
    change(workplace, WITH_DEAF_ENGINE.format(engine=str(engine)))
    code, _ = await workplace.run("up", "--no-lab")
    said = text(workplace.folder / "err")
    assert code == Exit.FAILED, said
    assert "not healthy within 2 s" in said
    assert "loading weights, shard 1 of 9" in said
    assert workplace.state is None
    assert left_over(workplace) == []
