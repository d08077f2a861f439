"""Sweeps side by side: a process a lane (workbench/sweeps/lanes.py), its load client on a core of its own."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

from workbench.sweeps.lanes import Lane, lanes

Measure = Callable[[Any], Any]


def side_by_side(cores: Mapping[str, Sequence[int]], requests: Sequence[Any], measure: Measure) -> list[Any]:
    """The result of each request, in the given order.

    Args:
        cores: of the replica that each model's sweep takes, by the model as it was asked for.
        requests: one a model.
        measure: a function of a module, called with a request in the lane's process.

    Raises:
        Exception: whatever a sweep raised; the other lanes finish first.
    """
    own = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    planned = lanes(cores, own)
    by_model = {request.model: request for request in requests}
    # A fork would copy this process's threads and event loop.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(len(planned), mp_context=context) as pool:
        running = [
            pool.submit(run_lane, lane, [by_model[name] for name in lane.names], measure, is_alone=len(planned) == 1)
            for lane in planned
        ]
        found = {request.model: result for future in running for request, result in future.result()}
    return [found[request.model] for request in requests]


def run_lane(lane: Lane, requests: Sequence[Any], measure: Measure, *, is_alone: bool) -> list[tuple[Any, Any]]:
    """Runs a lane's sweeps one after the other; in company its process keeps to the client's core."""
    if not is_alone and hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, {lane.client_core})
    return [(request, measure(request)) for request in requests]
