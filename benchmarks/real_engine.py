"""Real vLLM for benchmarks: a model of the catalogue on the first core, the client's being the last."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

from benchmarks.harness import REPOSITORY
from benchmarks.processes import put_first
from serving.clock import SystemClock
from serving.engine import weights
from serving.engine.catalogue import CATALOGUE
from serving.engine.flags import EngineFlags
from serving.engine.process import ReplicaProcess, ReplicaSpec, vllm_command

MODELS = REPOSITORY / ".workbench" / "models"


@asynccontextmanager
async def vllm_engine(
    folder: Path, model: str, name: str = "vllm", *, python_path: Sequence[Path] = ()
) -> AsyncIterator[str]:
    """An engine until the block ends, run before ordinary processes where the system permits it; yields its URL.

    Args:
        folder: for its log, `NAME.log`.
        model: a name of the catalogue, also the one that it serves under.
        name: of the replica.
        python_path: folders that it imports from besides its own, such as a plugin's.
    """
    entry = CATALOGUE[model]

    def command(spec: ReplicaSpec, port: int) -> list[str]:
        words = vllm_command(spec, port)
        return ["env", f"PYTHONPATH={os.pathsep.join(map(str, python_path))}", *words] if python_path else words

    spec = ReplicaSpec(
        replica_id=name,
        model_name=model,
        weights=weights.resolve(entry.source, MODELS, on_progress=lambda _: None),
        flags=EngineFlags.defaults(task=entry.task, context_length=entry.context_length, shutdown_timeout_s=5),
        log_path=folder / f"{name}.log",
        task=entry.task,
        cores=(min(os.sched_getaffinity(0)),),
    )
    replica = ReplicaProcess(spec, SystemClock(), command=command)
    await replica.start()
    if replica.pid is not None:
        put_first(replica.pid)
    try:
        yield replica.url
    finally:
        await replica.stop()
