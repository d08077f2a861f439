"""The loop, closed once on a running stack: measure every model, publish what it costs, ask through the router.

Measuring runs in child processes, so that the load client shares no event loop with what it measures.
`last-run.json` keeps what was done: cells, cost rows, the answer and who gave it, seconds of each phase.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import psutil

from serving.core.errors import UpstreamError
from serving.core.state import Task
from serving.engine.catalogue import CATALOGUE
from serving.engine.client import EngineClient
from serving.store.routing_table import StoreRoutingTable
from workbench.config import WorkbenchConfig
from workbench.stack.supervisor import Stack

OnChange = Callable[[str, str], None]
TAKE_UP_TIMEOUT_S = 10.0
FIRST_TABLE_TIMEOUT_S = 30.0
"""For the control plane to hear of champions: on a busy machine it takes long to import MLflow's client."""
SETUP_SECONDS = Path(sys.prefix) / "setup-seconds"
PROMPT = "What is the capital city of Japan?"


class LoopFailed(Exception):
    """A step of the loop did not succeed; the message says which and why."""


@dataclass(slots=True)
class LastRun:
    """What `last-run.json` holds."""

    cells: list[dict[str, Any]] = field(default_factory=list)
    cost_rows: list[dict[str, Any]] = field(default_factory=list)
    mlflow_run_ids: list[str] = field(default_factory=list)
    question: str | None = None
    answer: str | None = None
    answer_model: str | None = None
    served_by: str | None = None
    request_id: str | None = None
    urls: dict[str, str] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Adds the seconds that the block takes."""
        started_s = time.monotonic()
        try:
            yield
        finally:
            self.seconds[name] = round(time.monotonic() - started_s, 2)

    def add_start(self, stack: Stack) -> None:
        """Adds what the stack's start was made of, and the setup if the `make` that runs us made it."""
        self.seconds |= {name: round(seconds, 2) for name, seconds in stack.seconds().items()}
        setup_s = _setup_s()
        if setup_s is not None:
            self.seconds["setup"] = setup_s

    def add_total(self) -> None:
        """Adds the seconds since this process began, its imports and the setup included."""
        since_s = time.time() - psutil.Process().create_time()
        self.seconds["total"] = round(since_s + self.seconds.get("setup", 0.0), 2)

    def write(self, path: Path) -> None:
        """Replaces the file."""
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_suffix(".tmp")
        temporary.write_text(json.dumps(asdict(self), indent=2, default=str), "utf-8")
        temporary.replace(path)


def _setup_s() -> float | None:
    if not SETUP_SECONDS.is_file():
        return None
    seconds, make_pid = SETUP_SECONDS.read_text().split()
    return float(seconds) if int(make_pid) in {parent.pid for parent in psutil.Process().parents()} else None


async def until_served(stack: Stack, on_change: OnChange) -> None:
    """Returns when every gateway worker serves every model that has a started pool by its bare name.

    Says so and returns after 30 s: a registry may know a model without a champion.
    """
    wanted = {runner.pool.model for runner in stack.pools.values() if runner.is_started}
    on_change("gateway", "waits for the routing table to list what is ready")
    deadline_s = time.monotonic() + FIRST_TABLE_TIMEOUT_S
    listed_by_all = 0
    missing = wanted
    while time.monotonic() < deadline_s:
        missing = wanted - await _champions(stack.urls["gateway"])
        listed_by_all = 0 if missing else listed_by_all + 1
        if listed_by_all >= 2 * stack.config.gateway.workers:
            return
        if missing:
            await asyncio.sleep(0.1)
    names = ", ".join(sorted(missing))
    on_change("gateway", f"serves {names} only as NAME@VERSION: no champion is known, see `workbench logs control`")


async def _champions(gateway_url: str) -> set[str]:
    """Models that answer without a version, by one worker: each connection may meet another."""
    async with EngineClient(gateway_url) as client:
        try:
            listed = (await client.get_json("/v1/models"))["data"]
        except UpstreamError:
            return set()  # a worker without a table answers 503
    return {model["id"] for model in listed if model["champion"] is not None}


async def measure(stack: Stack, mode: str, last_run: LastRun, on_change: OnChange) -> None:
    """Sweeps every model that is served, then builds and publishes the cost table and waits until it is taken up.

    Raises:
        LoopFailed: a child failed, or the control plane did not take the table up.
    """
    models = served_models(stack.config, stack)
    with last_run.phase("sweep"):
        swept = await run_child(stack.config, "sweep", [*models, "--mode", mode], on_change)
    last_run.cells = swept["cells"]
    last_run.mlflow_run_ids = [run_id for run_id in swept["mlflow_run_ids"] if run_id is not None]
    with last_run.phase("cost_table"):
        built = await run_child(stack.config, "cost-table", ["build", "--publish"], on_change)
        last_run.cost_rows = built["rows"]
        last_run.mlflow_run_ids.append(built["run_id"])
        on_change("cost-table", "waits for the control plane to take it up")
        await _taken_up(stack, built["run_id"])
    on_change("cost-table", f"ready: {len(last_run.cost_rows)} rows published and taken up")


async def ask(stack: Stack, last_run: LastRun, on_change: OnChange) -> None:
    """Sends one chat completion (a completion where no chat model is served) with the `openai` SDK.

    Raises:
        LoopFailed: there is nobody to ask, or the answer is an error or empty.
    """
    models = served_models(stack.config, stack)
    if not models:
        raise LoopFailed("no model that generates text is served: nobody to ask")
    chat = [name for name in models if name not in CATALOGUE or CATALOGUE[name].chat]
    model = (chat or models)[0]
    on_change("ask", f"asks {model} through {stack.urls['gateway']}")
    with last_run.phase("ask"):
        answer = await asyncio.to_thread(_ask, stack.urls["gateway"], model, bool(chat))
    last_run.question, last_run.answer_model = PROMPT, model
    last_run.answer, last_run.served_by, last_run.request_id = answer
    on_change("ask", "done")


def served_models(config: WorkbenchConfig, stack: Stack) -> list[str]:
    """Models that generate text and have a started pool, in the order of the configuration."""
    started = {runner.pool.model for runner in stack.pools.values() if runner.is_started}
    return [name for name, model in config.models.items() if name in started and model.task is Task.GENERATE]


async def run_child(config: WorkbenchConfig, command: str, arguments: list[str], on_change: OnChange) -> dict[str, Any]:
    """Runs one of our own commands with --json; its progress lines go to `on_change`.

    Raises:
        LoopFailed: it exited with another code than 0; the message holds its last words.
    """
    child = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "workbench", command, *arguments, "--json", "--config", str(config.file)),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    if child.stdout is None or child.stderr is None:
        raise RuntimeError("the child has no pipes")
    output_pipe, progress_pipe = child.stdout, child.stderr
    said: list[str] = []

    async def relay() -> None:
        async for line in progress_pipe:
            text = line.decode("utf-8", "replace").strip()
            if text:
                said.append(text)
                on_change(command, text)

    try:
        output, _ = await asyncio.gather(output_pipe.read(), relay())
        code = await child.wait()
    finally:
        if child.returncode is None:
            child.terminate()
            await child.wait()
    if code != 0:
        raise LoopFailed(f"workbench {command} failed with exit code {code}: " + "\n".join(said[-8:]))
    return dict(json.loads(output))


async def _taken_up(stack: Stack, run_id: str) -> None:
    source = StoreRoutingTable(stack.store)
    deadline_s = time.monotonic() + TAKE_UP_TIMEOUT_S
    while time.monotonic() < deadline_s:
        table = await source.read()
        if table is not None and table.cost_table_run_id == run_id:
            return
        await asyncio.sleep(0.1)
    raise LoopFailed(f"the control plane did not take up the cost table of run {run_id}: see `workbench logs control`")


def _ask(gateway_url: str, model: str, chat: bool) -> tuple[str, str | None, str | None]:
    # Seconds to import, and only `--ask` needs it.
    import openai

    client = openai.OpenAI(base_url=f"{gateway_url}/v1", api_key="not-needed-on-loopback", timeout=120.0)
    try:
        if chat:
            chatted = client.chat.completions.with_raw_response.create(
                model=model, messages=[{"role": "user", "content": PROMPT}], max_tokens=32, temperature=0
            )
            headers, text = chatted.headers, chatted.parse().choices[0].message.content
        else:
            completed = client.completions.with_raw_response.create(
                model=model, prompt=PROMPT, max_tokens=32, temperature=0
            )
            headers, text = completed.headers, completed.parse().choices[0].text
    except openai.OpenAIError as error:
        raise LoopFailed(f"asking {model} failed: {error}") from error
    if not text:
        raise LoopFailed(f"{model} answered without text")
    return text, headers.get("x-served-by"), headers.get("x-request-id")
