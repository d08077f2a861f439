"""A stack for rollouts of planted faults: real vLLM, gateway, control plane and MLflow, spoken to by its commands."""

from __future__ import annotations

import asyncio
import hashlib
import json
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread
from typing import Any
from urllib.parse import urlsplit

import orjson
import yaml

from benchmarks.harness import REPOSITORY
from benchmarks.planted_engines import DATA_DIR, FOLDER, MODEL, Planted, in_background, served
from benchmarks.processes import free_port
from serving.control.registry import Registry, mlflow_client
from serving.core.errors import ServingError
from serving.core.gate_record import EVIDENCE_FILE
from serving.core.gate_record import FOLDER as GATE_FOLDER
from serving.core.policies.gate import Gate, canonical
from serving.core.policies.rollout import apply
from serving.core.sequential import Verdict
from serving.engine.client import EngineClient
from serving.engine.weights import Weights
from serving.telemetry.decision_log import read_rollouts
from workbench.config import WorkbenchConfig, load_config
from workbench.releases import record_evidence
from workbench.tracking import Tracker
from workbench.wiring import gateway_url, layout, mlflow_uri

STACK = FOLDER / "stack"
START_TIMEOUT_S, END_TIMEOUT_S, COMMAND_TIMEOUT_S = 300.0, 90.0, 600.0
LOOK_EVERY_S = 0.25
SESSION_EVERY_S = 1.0
EXPERIMENT = "canaries/"


class StackFailed(Exception):
    """A command of the stack failed; the message is what it said."""


class PlantedStack:
    """The running stack: the sound model on the last core, each fault a pool of its own that a rollout starts.

    Attributes:
        config: of the stack.
    """

    def __init__(self, config: WorkbenchConfig) -> None:
        self.config = config
        self._registry = Registry(mlflow_uri(config))

    @property
    def gateway(self) -> str:
        """Its address."""
        return gateway_url(self.config)

    def say(self, *words: str, codes: Sequence[int] = (0,)) -> Any:
        """What a command prints as JSON. Raises StackFailed unless its exit code is among `codes`."""
        command = [sys.executable, "-m", "workbench", *words, "--json", "--config", str(self.config.file)]
        done = subprocess.run(
            command, cwd=REPOSITORY, capture_output=True, text=True, timeout=COMMAND_TIMEOUT_S, check=False
        )
        if done.returncode not in codes:
            raise StackFailed(f"workbench {' '.join(words)} ended with {done.returncode}: {done.stderr[-600:]}")
        return json.loads(done.stdout)

    def register(self, one: Planted, weights: Weights) -> str:
        """Registers a candidate; its version. An attached pool's weights are known by their source alone."""
        digest = f"source:{weights.source}" if one.is_of_serving else weights.digest
        return self._registry.register(MODEL, weights.source, digest, task=self.config.models[MODEL].task)

    @contextmanager
    def served(self, one: Planted, weights: Weights) -> Iterator[None]:
        """A fault of serving runs outside the stack, which attaches to it; any other is the stack's own to start."""
        pool = self.config.pool(one.name)
        if not one.is_of_serving:
            yield
            return
        port, core = urlsplit(pool.urls[0]).port, min(os.sched_getaffinity(0))
        with in_background(served(one, weights, core, port or 0)):
            yield

    def champion(self) -> str:
        """The registry's."""
        return self._registry.champions()[MODEL]

    def begin(self, one: Planted, version: str, *words: str) -> None:
        """Starts the rollout, once the control plane has seen the version."""
        deadline_s = time.monotonic() + COMMAND_TIMEOUT_S
        while True:
            try:
                self.say("canary", "start", f"{MODEL}@{version}", "--pool", one.name, *words)
                return
            except StackFailed as error:
                if "no version" not in str(error) or time.monotonic() > deadline_s:
                    raise
                time.sleep(LOOK_EVERY_S)

    def wait_ready(self, one: Planted) -> None:
        """Returns when the rollout's own wish has brought the fault's pool up."""
        self.say("pool", "start", one.name)

    def standing(self) -> dict[str, Any] | None:
        """The model's rollout, as `canary status` shows it; None when there never was one."""
        found: list[dict[str, Any]] = self.say("canary", "status", MODEL)
        return found[0] if found else None

    def largest_share(self, rollout_id: str) -> float:
        """Of sessions, that the candidate ever had, by the control plane's own records."""
        records = [one for one in read_rollouts(layout(self.config).decisions_dir)
                   if one.view.rollout.rollout_id == rollout_id]  # fmt: skip
        return max((apply(one.view, one.decision).share_frac for one in records), default=0.0)

    def record(self, version: str, verdicts: Mapping[Gate, Verdict], document: Mapping[str, Any]) -> str:
        """Tells registry and control plane what the gates said, with the evidence for it; the digest to approve."""
        data = canonical(document)
        folder = FOLDER / "evidence" / version
        folder.mkdir(parents=True, exist_ok=True)
        file = folder / EVIDENCE_FILE
        file.write_bytes(data)
        uri = mlflow_uri(self.config)
        run_id = Tracker(uri).log_run(EXPERIMENT + MODEL, f"gates of {MODEL}@{version}", files={GATE_FOLDER: [file]})
        said = {gate.tag: verdict for gate, verdict in verdicts.items()}
        digests = {one.version: one.digest for one in self._registry.details(MODEL)}
        asyncio.run(record_evidence(self.config, MODEL, version, data, run_id, said, weights_digest=digests[version]))
        return hashlib.sha256(data).hexdigest()

    def approve(self, version: str, digest: str) -> None:
        """What a release manager does in MLflow."""
        mlflow_client(mlflow_uri(self.config)).set_model_version_tag(MODEL, version, "approval", digest[:16])


@contextmanager
def planted_stack(faults: Sequence[Planted], cores: tuple[int, int]) -> Iterator[PlantedStack]:
    """`workbench up` until the block ends. What it keeps below `.workbench/planted/stack` stays for the next run.

    Args:
        faults: what may be deployed beside the sound model.
        cores: the candidates' and the champion's.
    """
    config = _configured(faults, cores)
    log = STACK / "up.err"
    with (STACK / "up.out").open("wb") as out, log.open("wb") as err:
        command = [sys.executable, "-m", "workbench", "up", "--no-lab", "--json", "--config", str(config.file)]
        up = subprocess.Popen(command, cwd=REPOSITORY, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
    try:
        deadline_s = time.monotonic() + START_TIMEOUT_S
        while not (STACK / "up.out").stat().st_size:
            if up.poll() is not None or time.monotonic() > deadline_s:
                raise StackFailed(f"the stack did not start: {log.read_text()[-1000:]}")
            time.sleep(LOOK_EVERY_S)
        yield PlantedStack(config)
    finally:
        up.terminate()
        try:
            up.wait(END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            up.kill()
            raise


def folder_of(one: Planted) -> Path:
    """Where the stack looks for the fault's weights."""
    return FOLDER / "made" / one.name


def _configured(faults: Sequence[Planted], cores: tuple[int, int]) -> WorkbenchConfig:
    shipped = yaml.safe_load((REPOSITORY / "workbench.yaml").read_text())
    candidate, champion = cores
    pool = {"model": MODEL, "hardware": "cpu", "replicas": 1}
    content = {
        "models": {MODEL: shipped["models"][MODEL]},
        "slo": shipped["slo"],
        "pools": [
            {**pool, "id": "champion", "cores": [[champion]]},
            *(
                {**pool, "id": one.name, "source": str(folder_of(one)), "start": "on_demand", **_launch(one, candidate)}
                for one in faults
            ),
        ],
        "gateway": {"port": free_port()},
        "mlflow": {"port": free_port()},
        "data_dir": ".",
    }
    STACK.mkdir(parents=True, exist_ok=True)
    models = STACK / "models"
    if not models.exists():
        models.symlink_to((DATA_DIR / "models").resolve())
    file = STACK / "workbench.yaml"
    file.write_text(yaml.safe_dump(content), encoding="utf-8")
    return load_config(file, env={})


def _launch(one: Planted, core: int) -> dict[str, Any]:
    if one.is_of_serving:
        return {"launcher": "attach", "urls": [f"http://127.0.0.1:{free_port()}"]}
    return {"cores": [[core]]}


class Sessions:
    """Users that ask the bare name, a session each, until the block ends; counts by whom they were served.

    Attributes:
        versions: answers by the version that gave them.
        num_failed: requests without an answer.
    """

    def __init__(self, gateway: str) -> None:
        self.versions: Counter[str] = Counter()
        self.num_failed = 0
        self._gateway = gateway
        self._over = Event()
        self._thread = Thread(target=lambda: asyncio.run(self._ask()), name="sessions", daemon=True)

    def __enter__(self) -> Sessions:
        """Begins to ask."""
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        """Returns when the last one is answered."""
        self._over.set()
        self._thread.join()

    async def _ask(self) -> None:
        number = 0
        async with EngineClient(self._gateway) as client:
            while not self._over.is_set():
                number += 1
                try:
                    await self._one(client, f"session-{number}-{time.monotonic_ns()}")
                except ServingError:
                    self.num_failed += 1
                await asyncio.sleep(SESSION_EVERY_S)

    async def _one(self, client: EngineClient, session: str) -> None:
        body = {"model": MODEL, "messages": [{"role": "user", "content": f"Hello from {session}"}], "max_tokens": 8}
        headers = [(b"content-type", b"application/json"), (b"x-session-id", session.encode())]
        answer = await client.request("POST", "/v1/chat/completions", headers=headers, body=orjson.dumps(body))
        async with answer:
            await answer.read()
        if answer.status != 200:
            self.num_failed += 1
            return
        self.versions[answer.headers[b"x-served-by"].split(b";")[1].strip().decode()] += 1
