"""`workbench.slo_search()` and `workbench.tune()`: what the commands of these names do, from a notebook.

    found = workbench.slo_search("smollm2-135m", load="rate", start=1)
    found.capacity.load, found.frame()

    tuned = workbench.tune("smollm2-135m", {"max_num_batched_tokens": [256, 512]})
    tuned.best, tuned.frame()

Both go on where they stopped, work inside JupyterLab's running event loop, and print a line a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from workbench.connection import connected
from workbench.slo.on_stack import SloWish, log_answer, search_on_stack, told
from workbench.slo.search import Capacity, Probe, verdict
from workbench.slo.searching import SearchStep, SloAnswer
from workbench.sweeps.cells import Shape
from workbench.sync import run_sync
from workbench.tuning.halving import Trial, Tuned, Value, describe
from workbench.tuning.logged import log_tuning
from workbench.tuning.on_pool import Tuning, run_tuning, tuning_of

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True, slots=True)
class SloFound:
    """The highest load that keeps the SLO, and the cells that it rests on.

    Attributes:
        capacity: load, interval, and why the search ended.
        run_id: in MLflow; None where it did not take it, with `not_logged` saying why.
    """

    capacity: Capacity
    probes: tuple[Probe, ...]
    run_id: str | None
    not_logged: str | None

    def frame(self) -> pd.DataFrame:
        """A row a cell: its load, whether it keeps the SLO, and the chance that each limit is kept."""
        import pandas as pd

        rows = [
            {"load": probe.load, "slo": verdict(probe).value} | {one.name: one.p_kept for one in probe.readings}
            for probe in self.probes
        ]
        return pd.DataFrame(rows)

    def __repr__(self) -> str:
        where = f"MLflow run {self.run_id}" if self.run_id else f"not in MLflow ({self.not_logged})"
        return f"<SLO search: {self.capacity.reason}; {len(self.probes)} cells; {where}>"


@dataclass(frozen=True, slots=True)
class TuneFound:
    """The best configuration, all that cannot be told from it, and every trial.

    Attributes:
        tuned: the outcome.
        trials: those that were measured now.
        run_id: in MLflow; None where it did not take it, with `not_logged` saying why.
    """

    tuned: Tuned
    trials: tuple[Trial, ...]
    run_id: str | None
    not_logged: str | None

    @property
    def best(self) -> dict[str, Value] | None:
        """The engine's fields that were varied, at their best; None when no trial counts."""
        return None if self.tuned.best is None else dict(self.tuned.best.flags)

    def frame(self) -> pd.DataFrame:
        """A row a trial that was measured now: configuration, rung, good requests a second with interval, failure."""
        import pandas as pd

        columns = ("configuration", "rung", "goodput_rps", "goodput_rps/ci_low", "goodput_rps/ci_high", "failure")
        rows = [(describe(t.flags), t.rung, t.goodput_rps, t.low, t.high, t.failure) for t in self.trials]
        return pd.DataFrame(rows, columns=list(columns))

    def __repr__(self) -> str:
        where = f"MLflow run {self.run_id}" if self.run_id else f"not in MLflow ({self.not_logged})"
        return f"<tuning: {self.tuned.reason}; {len(self.trials)} trials; {where}>"


def slo_search(
    model: str,
    *,
    load: str = "concurrency",
    start: float | None = None,
    highest: float | None = None,
    num_prompt_tokens: int = 64,
    num_output_tokens: int = 32,
    ttft_p99_s: float | None = None,
    tpot_p99_s: float | None = None,
    served_within_frac: float | None = None,
    min_requests: int = 400,
    max_cells: int = 10,
    max_cell_s: float = 600.0,
    replica: str | None = None,
    resume: bool = True,
    on_step: Callable[[SearchStep], None] | None = None,
) -> SloFound:
    """Searches the highest load that keeps the SLO on a replica of the running stack. Blocks until it is done.

    Args:
        model: a served name, `name@version` for another version than the champion.
        load: `concurrency` (users in flight) or `rate` (requests a second).
        start: the first load; 4 in flight or 1 a second when None.
        highest: never exceeded.
        num_prompt_tokens: of each request.
        num_output_tokens: of each request.
        ttft_p99_s: limit; the hardware class's when None.
        tpot_p99_s: limit; the same.
        served_within_frac: share of requests that must keep both limits too.
        min_requests: of a cell; a P99 needs 368.
        max_cells: the search ends there at the latest.
        max_cell_s: in which a cell sends requests.
        replica: which; any ready one when None.
        resume: keep the cells of an earlier search.
        on_step: told before and after each cell; prints a line when None.

    Raises:
        NotRunning, NotFound, Unavailable, ReplicaReserved, UnclearWish, ClientTooSlow, WorkloadError: as
            `workbench.slo.on_stack.search_on_stack`.
    """
    config = connected().config
    wish = SloWish(
        model, load, start, highest, num_prompt_tokens, num_output_tokens, ttft_p99_s, tpot_p99_s, served_within_frac,
        min_requests, max_cells, max_cell_s, replica,
    )  # fmt: skip
    tell = on_step or (lambda step: _print(f"{model} {told(step)}"))
    answer: SloAnswer = run_sync(lambda: search_on_stack(config, wish, is_resumed=resume, on_step=tell))
    return SloFound(answer.capacity, answer.probes, *log_answer(config, model, answer))


def tune(
    model: str,
    vary: Mapping[str, Sequence[Value]],
    *,
    pool: str | None = None,
    num_prompt_tokens: int = 64,
    num_output_tokens: int = 32,
    concurrency: int = 8,
    num_requests: int = 100,
    eta: int = 3,
    max_rungs: int = 3,
    on_trial: Callable[[Trial], None] | None = None,
) -> TuneFound:
    """Tries every combination of an engine's fields by successive halving. Blocks until it is done.

    Each is an engine of its own beside the stack, on the cores of the pool's first replica: stop the pool before.

    Args:
        model: a model of workbench.yaml.
        vary: values by field, such as `{"block_size": [32, 64]}`; what is in use is tried too.
        pool: the pool to start from; the model's first when None.
        num_prompt_tokens: of each request.
        num_output_tokens: of each request.
        concurrency: requests in flight.
        num_requests: of a cell of the first rung.
        eta: each rung keeps one in so many, with so many times the requests.
        max_rungs: at most so many.
        on_trial: told after each trial; prints a line when None.

    Raises:
        CannotTune: no such pool, or one of the running stack is in its way.
        ValueError: a field that cannot be tuned, or fewer than two configurations.
    """
    config = connected().config
    shape = Shape(num_prompt_tokens, num_output_tokens)
    tuning: Tuning = tuning_of(
        config, model, vary, pool_id=pool, shape=shape, concurrency=concurrency, num_requests=num_requests, eta=eta,
        num_rungs=max_rungs,
    )  # fmt: skip
    trials: list[Trial] = []

    def keep(trial: Trial) -> None:
        trials.append(trial)
        (on_trial or _print_trial)(trial)

    tuned: Tuned = run_sync(lambda: run_tuning(config, tuning, on_trial=keep))
    return TuneFound(tuned, tuple(trials), *log_tuning(config, tuning, tuned))


def _print_trial(trial: Trial) -> None:
    figure = trial.failure or f"{trial.goodput_rps:.3g} good requests/s"
    _print(f"rung {trial.rung}: {describe(trial.flags)}: {figure}")


def _print(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()
