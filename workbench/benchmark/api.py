"""`workbench.bench()`, `abench()` and `compare()`: what notebooks call to put a load on something and to compare."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from serving.core.errors import ServingError
from workbench.benchmark.result import BenchResult
from workbench.benchmark.run import BenchRequest, keeping
from workbench.benchmark.run import abench as measure
from workbench.benchmark.turns import OnRun, in_turns, judged, request_of
from workbench.comparison.compare import Compared, compare
from workbench.config_layers import ConfigError
from workbench.connection import connected
from workbench.loadgen import Slo, TargetKind
from workbench.notebook_bar import NotebookBar, in_notebook
from workbench.sync import run_sync

if TYPE_CHECKING:
    from workbench.benchmark.logged import Following

__all__ = ["BenchResult", "Compared", "ab", "abench", "bench", "compare", "last_bench"]

PROGRESS_EVERY_S = 5.0
_last: list[BenchResult] = []


def bench(
    model: str,
    *,
    workload: str | None = None,
    load: str = "closed:concurrency=4",
    url: str | None = None,
    num_requests: int | None = None,
    max_duration_s: float = 120.0,
    target: str = "gateway",
    api_key: str | None = None,
    tokenizer: str | None = None,
    num_units: int = 1,
    usd_per_hour: float | None = None,
    slo: Slo | None = None,
    client_processes: int | None = None,
    log: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
) -> BenchResult:
    """Puts one load on a model and returns what came out. Blocks; works inside JupyterLab's running event loop.

    Stopped by Ctrl-C or JupyterLab's stop button it returns what had been measured by then, and its notes say so.

    Args:
        model: a served name; with `url` the name to send.
        workload: what is sent, in its short form (docs/users/loads.md); completions of 64 tokens in, 32 out when None.
        load: when it is sent, in its short form.
        url: of an endpoint instead of the running stack.
        num_requests: at most; all that the schedule holds when None, and of users who wait 8 each, 32 at least.
        max_duration_s: no request is sent after this.
        target: `gateway` or `engine` of the running stack.
        api_key: of the endpoint.
        tokenizer: of the endpoint's model: a folder, `hf:ORG/NAME`, or `none` with prompts of your own.
        num_units: GPUs behind the endpoint.
        usd_per_hour: what the endpoint costs, all units together.
        slo: what counts as a good request; the configuration's when None.
        client_processes: that share the load; one, or more where load and cores ask for it, when None.
        log: follow it in MLflow while it runs, and log it there at its end: what `result.log()` does afterwards.
        on_progress: told of (ended, planned) after each request; a bar, or a line now and then, when None.

    Raises:
        SpecError: a short form or the url cannot be read; the message says what would be right.
        NotRunning, NotFound, Unavailable, WorkloadError: as `workbench.benchmark.target`.
    """
    request = BenchRequest(
        model=model, load=load, workload=workload, num_requests=num_requests, max_duration_s=max_duration_s,
        target=TargetKind(target), url=url, api_key=api_key, tokenizer=tokenizer, num_units=num_units,
        usd_per_hour=usd_per_hour, slo=slo, client_processes=client_processes,
    )  # fmt: skip
    kept: list[BenchResult] = []
    following = _following(request) if log else None
    with keeping(kept):
        run_sync(lambda: _abench(request, on_progress, kept, following))
    return kept[0] if following is None else _logged(kept[0], following)


async def abench(
    model: str,
    *,
    workload: str | None = None,
    load: str = "closed:concurrency=4",
    url: str | None = None,
    log: bool = False,
    on_progress: Callable[[int, int], None] | None = None,
    **more: object,
) -> BenchResult:
    """As `bench`, to be awaited. When it is cancelled, what had been measured is `workbench.last_bench()`.

    Args:
        model: as `bench`, and so are the others.
        workload: what is sent.
        load: when it is sent.
        url: of an endpoint instead of the running stack.
        log: follow and log it in MLflow.
        on_progress: told of (ended, planned) after each request.
        more: the other arguments of `bench`.

    Raises:
        TypeError: an argument that `bench` does not have.
        SpecError, NotRunning, NotFound, Unavailable, WorkloadError: as `bench`.
    """
    if "target" in more:
        more["target"] = TargetKind(str(more["target"]))
    request = BenchRequest(model=model, load=load, workload=workload, url=url, **more)  # type: ignore[arg-type]
    following = _following(request) if log else None
    result = await _abench(request, on_progress, [], following)
    return result if following is None else await asyncio.to_thread(_logged, result, following)


def ab(
    a: str,
    b: str,
    *,
    pairs: int = 8,
    model: str | None = None,
    workload: str | None = None,
    load: str = "closed:concurrency=4",
    num_requests: int | None = None,
    api_key: str | None = None,
    tokenizer: str | None = None,
    metrics: Sequence[str] | None = None,
    seed: int | None = None,
    on_run: OnRun | None = None,
) -> Compared:
    """Measures A and B in turns, each run with fresh prompts and a cold cache, and says whether B is better. Blocks.

    Args:
        a: the baseline: a served model, NAME or NAME@VERSION, or the address of an endpoint.
        b: what is set against it, named in the same ways.
        pairs: runs of each; three metrics need 7.
        model: the model's name at addresses.
        workload: as `bench`, and so are the others.
        load: when it is sent.
        num_requests: of each run.
        api_key: of the endpoints.
        tokenizer: of the endpoints' model.
        metrics: instead of throughput and the medians of TTFT and TPOT.
        seed: of the coin that says who begins each pair.
        on_run: told of each run: number, how many there are, `A` or `B`, result; prints a line when None.

    Raises:
        NotComparable, UnknownMetric: nothing can be said of them, or not by that metric.
        SpecError, NotRunning, NotFound, Unavailable, WorkloadError: as `bench`.
    """
    more = {"workload": workload, "load": load, "num_requests": num_requests, "api_key": api_key}
    asked = [request_of(name, model, tokenizer=tokenizer, **more) for name in (a, b)]
    config = connected().config if any(request.url is None for request in asked) else None
    pair = run_sync(lambda: in_turns(config, *asked, num_pairs=pairs, seed=seed, on_run=on_run or _print_run))
    return Compared(judged(pair, metrics=metrics))


def _print_run(number: int, total: int, side: str, result: BenchResult) -> None:
    _print(f"[{number}/{total}] {side}: {result.invalid or result.metrics.get('output_tokens_per_s_per_gpu', '')}")


def last_bench() -> BenchResult | None:
    """The last result of this process, that of an interrupted run too; None when there is none."""
    return _last[0] if _last else None


async def _abench(
    request: BenchRequest,
    on_progress: Callable[[int, int], None] | None,
    kept: list[BenchResult],
    following: Following | None,
) -> BenchResult:
    def keep(result: BenchResult) -> None:
        _last[:] = [result]
        kept.append(result)

    try:
        config = connected().config
    except ConfigError:
        if request.url is None:
            raise
        config = None
    return await measure(
        config,
        request,
        on_progress=on_progress or _printer(request.model),
        keep=keep,
        open_run=None if following is None else following.open_run,
        on_trouble=lambda trouble: _print(f"MLflow does not follow it: {trouble}"),
    )


def _following(request: BenchRequest) -> Following:
    # MLflow takes seconds to import, and is needed only here.
    from workbench.benchmark.logged import Following

    return Following(connected().tracker, request)


def _logged(result: BenchResult, following: Following) -> BenchResult:
    """The result with its run's id; MLflow's trouble is a note on it, for a measurement is not to be lost by that."""
    try:
        logged = replace(result, run_id=following.log(result))
    except ServingError as error:
        logged = replace(result, load_notes=(*result.load_notes, f"not in MLflow: {error.message}"))
    _last[:] = [logged]
    return logged


def _printer(model: str) -> Callable[[int, int], None]:
    """A bar in a notebook, else a line now and then."""
    if in_notebook():
        return NotebookBar(model)
    printed_s = time.monotonic()

    def on_requests(done: int, total: int) -> None:
        nonlocal printed_s
        if time.monotonic() - printed_s >= PROGRESS_EVERY_S:
            printed_s = time.monotonic()
            _print(f"{done} of {total} requests")

    return on_requests


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
