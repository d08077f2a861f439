"""The base install is the gateway: it serves without torch, transformers, MLflow, Jupyter or data frames installed."""

from __future__ import annotations

import asyncio
import re
import shutil
import sys
from pathlib import Path

import orjson
import pytest

from serving.store.routing_table import FileRoutingTable
from tests.gateway.fleets import MODEL, a_pool, a_table
from tests.integration.processes import fake_engine, fetch, free_port, process, until

REPOSITORY = Path(__file__).parents[2]
SOURCES = ("pyproject.toml", "README.md", "LICENSE", "NOTICE", "serving", "workbench", "evals", "benchmarks")
FORBIDDEN = (
    "torch",
    "transformers",
    "vllm",
    "mlflow",
    "jupyter_client",
    "IPython",
    "pandas",
    "pyarrow",
    "numpy",
    "plotly",
)
PINNED = re.compile(r"^([A-Za-z0-9._-]+)==([^\s\\;]+)", re.MULTILINE)
INSTALL_TIMEOUT_S = 240.0


async def test_the_gateway_serves_from_the_base_install_alone(tmp_path: Path) -> None:
    python = await install(tmp_path)
    missing = f"import importlib.util as u; print([n for n in {FORBIDDEN!r} if u.find_spec(n)])"
    assert await output([python, "-c", missing], tmp_path) == "[]"
    table_path = tmp_path / "table.json"
    port = free_port()
    async with fake_engine(tmp_path, "--model", MODEL) as engine_url:
        await FileRoutingTable(table_path).publish(a_table(a_pool("pool-a", {"r1": engine_url})))
        env = {"WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(table_path), "PYTHONPATH": ""}
        arguments = ["-m", "serving.gateway", "--port", str(port)]
        async with process(arguments, tmp_path / "gateway.log", env, python=python, folder=tmp_path) as gateway:

            async def is_up() -> bool:
                assert gateway.child.returncode is None, "the gateway ended"
                return await answers(port)

            await until(is_up, "the gateway of the base install")
            body = orjson.dumps({"model": MODEL, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 3})
            status, headers, answer = await fetch(f"http://127.0.0.1:{port}", "POST", "/v1/chat/completions", body)
    assert (status, headers[b"x-served-by"]) == (200, b"pool-a; 1; 1/-")
    assert orjson.loads(answer)["usage"]["completion_tokens"] == 3


async def install(folder: Path) -> str:
    """A new environment with the base package at the versions of the lock; returns its python."""
    uv = shutil.which("uv") or shutil.which("uv", path=str(Path(sys.executable).parent))
    if uv is None:
        pytest.skip("needs uv (`make setup` installs it) to make an environment of its own")
    source = copy_sources(folder / "source")
    constraints = write_constraints(folder / "constraints.txt")
    environment = folder / "environment"
    await output([uv, "venv", "--quiet", "--python", sys.executable, str(environment)], folder)
    python = str(environment / "bin" / "python")
    await output(
        [uv, "pip", "install", "--quiet", "--python", python, "--constraint", str(constraints), str(source)], folder
    )
    return python


def copy_sources(target: Path) -> Path:
    target.mkdir()
    for name in SOURCES:
        source = REPOSITORY / name
        if source.is_dir():
            shutil.copytree(source, target / name, ignore=shutil.ignore_patterns("__pycache__"))
        elif source.exists():
            shutil.copy(source, target / name)
    return target


def write_constraints(target: Path) -> Path:
    lock = (REPOSITORY / "requirements" / "cpu.lock").read_text()
    target.write_text("".join(f"{name}=={version}\n" for name, version in PINNED.findall(lock)))
    return target


async def output(command: list[str], folder: Path) -> str:
    child = await asyncio.create_subprocess_exec(
        *command, cwd=folder, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    try:
        stdout, stderr = await asyncio.wait_for(child.communicate(), INSTALL_TIMEOUT_S)
    except TimeoutError:
        child.kill()
        raise
    assert child.returncode == 0, f"{command[:4]}: {stderr.decode()}"
    return stdout.decode().strip()


async def answers(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True
