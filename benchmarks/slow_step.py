"""A plugin of vLLM's (`vllm.general_plugins`) that makes each engine step longer by a share of its own time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

SLOWER_FRAC = 0.05


def register() -> None:
    """Called by vLLM in each of its processes: after a step the engine sleeps `SLOWER_FRAC` of its time."""
    from vllm.v1.engine.core import EngineCore

    for name in ("step", "step_with_batch_queue"):
        setattr(EngineCore, name, _slower(getattr(EngineCore, name)))


def _slower(step: Any) -> Any:
    def slow_step(core: Any) -> Any:
        began_s = time.perf_counter()
        found = step(core)
        time.sleep(SLOWER_FRAC * (time.perf_counter() - began_s))
        return found

    return slow_step


def metadata(folder: Path) -> Path:
    """A folder for PYTHONPATH in which vLLM finds the plugin, as if it were installed."""
    info = folder / "slow_step-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: slow-step\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nslow_step = benchmarks.slow_step:register\n")
    return folder
