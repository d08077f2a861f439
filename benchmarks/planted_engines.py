"""What benchmarks of planted faults share: the faults, their folders, and real engines on them."""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import Thread
from typing import TypeVar

from benchmarks.harness import REPOSITORY, Mode
from benchmarks.processes import child, free_port, until
from evals import faults
from serving.clock import SystemClock
from serving.engine.catalogue import CATALOGUE
from serving.engine.client import EngineClient
from serving.engine.flags import EngineFlags
from serving.engine.process import ReplicaProcess, ReplicaSpec
from serving.engine.weight_files import MANIFEST
from serving.engine.weights import Weights, resolve

MODEL = "smollm2-135m"
DATA_DIR = Path(os.environ.get("WORKBENCH_DATA_DIR", REPOSITORY / ".workbench"))
FOLDER = DATA_DIR / "planted"
"""What was measured, by digest: a run that was cut off goes on where it was."""
BASE = "base"
QUICK_KINDS = ("int4-channel", "missing-template", "dropped-layer")
SEEDS = {Mode.QUICK: (0,), Mode.FULL: (0, 1, 2)}
DRAWN = ("noise-", "merge-")
CHANGED_NOT_WORSE = ("int8-group128", "int8-channel", "merge-weak")
T = TypeVar("T")
OnProgress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Planted:
    """A fault, or the sound model (`base`); the seed draws what is random of it."""

    kind: str
    seed: int = 0

    @property
    def name(self) -> str:
        """For files, pools and people."""
        return f"{self.kind}-{self.seed}"

    @property
    def is_of_serving(self) -> bool:
        """Whether its weights are sound, and a proxy before the engine is what is wrong."""
        return self.kind != BASE and faults.BY_KIND[self.kind].proxy is not None


def planted(mode: Mode) -> list[Planted]:
    """The faults of this form: each once, then those that are drawn under the other seeds."""
    chosen = [kind for kind in faults.BY_KIND if mode is Mode.FULL or kind in QUICK_KINDS]
    return [Planted(kind, seed) for seed in SEEDS[mode] for kind in chosen if seed == 0 or kind.startswith(DRAWN)]


def sound(on_progress: OnProgress) -> Weights:
    """The model without a fault; converted once."""
    return resolve(CATALOGUE[MODEL].source, DATA_DIR / "models", on_progress=on_progress)


def make(one: Planted, base: Weights, folder: Path) -> Weights:
    """The fault in `folder`, which may be there already. The sound model there is the same under another digest."""
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        if one.kind == BASE:
            shutil.copytree(base.path, folder, ignore=shutil.ignore_patterns(MANIFEST))
            (folder / "note.txt").write_text("the sound model, as a version of its own", encoding="utf-8")
        else:
            faults.make(one.kind, base.path, folder, seed=one.seed)
    return resolve(str(folder), DATA_DIR / "models", on_progress=lambda _: None)


@contextmanager
def made(one: Planted, base: Weights) -> Iterator[Weights]:
    """The fault in a folder that goes when the block ends."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        yield base if one.kind == BASE else make(one, base, Path(scratch) / one.kind)


def flags() -> EngineFlags:
    """Of every engine here."""
    return EngineFlags.defaults(context_length=CATALOGUE[MODEL].context_length, shutdown_timeout_s=5)


@asynccontextmanager
async def served(one: Planted, weights: Weights, core: int, port: int = 0) -> AsyncIterator[str]:
    """The fault on real vLLM until the block ends, behind its proxy where it is one of serving; yields its URL.

    Args:
        one: which; `weights` lie in the folder that `make` wrote for it.
        weights: what the engine loads.
        core: the engine's.
        port: of the proxy; a free one for 0.
    """
    async with engine_on(weights, one.name, core) as url:
        if not one.is_of_serving:
            yield url
            return
        port, log = port or free_port(), FOLDER / f"{one.name}-proxy.log"
        words = ["evals.faulty_proxy", str(weights.path), "--upstream", url, "--port", str(port)]
        behind = f"http://127.0.0.1:{port}"
        async with child([*words, "--seed", str(one.seed)], log), EngineClient(behind) as proxy:

            async def answers() -> bool:
                async with await proxy.request("GET", "/health") as response:
                    return response.status == 200

            await until(answers, "the faulty proxy", log)
            yield behind


@contextmanager
def in_background(context: AbstractAsyncContextManager[T]) -> Iterator[T]:
    """An asynchronous context for plain code: it lives on a loop of its own, in a thread of its own."""
    loop = asyncio.new_event_loop()
    thread = Thread(target=loop.run_forever, name="planted-background", daemon=True)
    thread.start()
    try:
        value = asyncio.run_coroutine_threadsafe(context.__aenter__(), loop).result()
        try:
            yield value
        finally:
            asyncio.run_coroutine_threadsafe(context.__aexit__(None, None, None), loop).result()
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


@asynccontextmanager
async def engine_on(weights: Weights, name: str, core: int) -> AsyncIterator[str]:
    """Real vLLM on one core until the block ends; yields its URL."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    spec = ReplicaSpec(name, MODEL, weights, flags(), FOLDER / f"{name}.log", cores=(core,))
    replica = ReplicaProcess(spec, SystemClock())
    try:
        await replica.start(lambda _: None)
        yield replica.url
    finally:
        await replica.stop()
