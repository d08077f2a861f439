"""What notebooks call: connect to the stack, measure, look at what was measured, talk to the models.

    import workbench

    workbench.connect()                      the running stack of the nearest workbench.yaml
    sweep = workbench.sweep("smollm2-135m")  measures; sweep.cells is a pandas frame, sweep.run_id in MLflow
    workbench.bench("smollm2-135m", load="poisson:rate=2", workload="chat:prompt=64,output=32")
                                             one load on the stack or, with url=, on any endpoint; shows itself
    workbench.ab("smollm2-135m@1", "smollm2-135m@2")
                                             measures both in turns: is the second better?
    workbench.compare(a, b)                  is b better than a? sweeps, or lists of benchmarks run in turns
    workbench.slo_search("smollm2-135m")     the highest load that keeps the SLO
    workbench.tune("smollm2-135m", {"block_size": [32, 64]})
                                             the engine's fields with the most goodput
    workbench.evaluate("smollm2-135m", suite="smoke")
                                             how good a served model is on our tasks
    workbench.runs("smollm2-135m")           earlier sweeps, as a frame
    workbench.cost_table()                   the newest cost table, as a frame
    workbench.client()                       an openai.OpenAI client of the gateway
    workbench.plots                          figures from these frames

Calls are plain and blocking; they work inside JupyterLab's running event loop. Nothing heavy is imported
until it is used, so the command line and the gateway's base install import this for free.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from workbench import plots
    from workbench.benchmark.api import ab, abench, bench, compare, last_bench
    from workbench.connection import Connection, client, connect, cost_table, record_run, runs, sweep
    from workbench.evaluation import evaluate
    from workbench.searches import slo_search, tune

__all__ = [
    "Connection", "ab", "abench", "bench", "client", "compare", "connect", "cost_table", "evaluate", "last_bench",
    "plots", "record_run", "runs", "slo_search", "sweep", "tune",
]  # fmt: skip

_FROM_BENCH = frozenset({"ab", "abench", "bench", "compare", "last_bench"})
_FROM_SEARCHES = frozenset({"slo_search", "tune"})
_FROM_CLIENT = frozenset({"Connection", "client", "connect", "cost_table", "record_run", "runs", "sweep"})


def __getattr__(name: str) -> Any:
    if name == "plots":
        return importlib.import_module("workbench.plots")
    if name == "evaluate":
        return importlib.import_module("workbench.evaluation").evaluate
    if name in _FROM_CLIENT:
        return getattr(importlib.import_module("workbench.connection"), name)
    if name in _FROM_BENCH:
        return getattr(importlib.import_module("workbench.benchmark.api"), name)
    if name in _FROM_SEARCHES:
        return getattr(importlib.import_module("workbench.searches"), name)
    raise AttributeError(f"module 'workbench' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return sorted(set(globals()) | set(__all__))
