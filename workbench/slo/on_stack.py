"""The search for the highest load under an SLO on a replica of the running stack, which serves nobody else meanwhile.

wish → question (the hardware class's SLO where none is given) → replica held → search_slo → MLflow
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from serving.clock import SystemClock
from serving.core.errors import ServingError
from workbench.config import Slo, WorkbenchConfig
from workbench.loadgen import Vocabulary
from workbench.run_fields import RunFields, content_key
from workbench.slo.search import Probe, SearchPlan, verdict
from workbench.slo.searching import (
    MIN_REQUESTS,
    SEARCH_FILE,
    LoadKind,
    OnStep,
    SearchStep,
    SloAnswer,
    SloLimits,
    SloQuestion,
    search_slo,
)
from workbench.sweeps.cells import Shape
from workbench.sweeps.holds import StoreHold, owner_here
from workbench.sweeps.on_stack import found_replica
from workbench.sweeps.run import client_on_other_cores
from workbench.tracking import Tracker
from workbench.wiring import NotRunning, layout, mlflow_uri

LOWEST_RATE_RPS, HIGHEST_RATE_RPS = 0.001, 100_000.0
HIGHEST_CONCURRENCY = 10_000.0
FIRST_CONCURRENCY, FIRST_RATE_RPS = 4.0, 1.0


class UnclearWish(ValueError):
    """There is no such load, or its bounds are none."""


@dataclass(frozen=True, slots=True)
class SloWish:
    """What to search on a model of the stack; None takes the hardware class's SLO, or the search's own start.

    Attributes:
        load: `concurrency` (users in flight) or `rate` (requests a second).
        start, highest: loads to begin with, and never to exceed.
        served_within_frac: share of requests that must keep both limits too.
        min_requests: of a cell; a P99 needs 368.
        replica_id: which replica; any ready one when None.
    """

    model: str
    load: str = LoadKind.CONCURRENCY.value
    start: float | None = None
    highest: float | None = None
    num_prompt_tokens: int = 64
    num_output_tokens: int = 32
    ttft_p99_s: float | None = None
    tpot_p99_s: float | None = None
    served_within_frac: float | None = None
    min_requests: int = MIN_REQUESTS
    max_cells: int = 10
    max_cell_s: float = 600.0
    replica_id: str | None = None

    def question(self, config: WorkbenchConfig, hardware_class: str) -> SloQuestion:
        """What is searched on that hardware. Raises UnclearWish."""
        try:
            return self._question(config.slo.of(hardware_class), LoadKind(self.load))
        except ValueError as error:
            raise UnclearWish(str(error)) from None

    def _question(self, slo: Slo, kind: LoadKind) -> SloQuestion:
        is_closed = kind is LoadKind.CONCURRENCY
        lowest, first, top = (
            (1.0, FIRST_CONCURRENCY, HIGHEST_CONCURRENCY)
            if is_closed
            else (LOWEST_RATE_RPS, FIRST_RATE_RPS, HIGHEST_RATE_RPS)
        )
        plan = SearchPlan(
            start=self.start or first,
            lowest=lowest,
            highest=self.highest or top,
            is_whole=is_closed,
            max_cells=self.max_cells,
        )
        limits = SloLimits(
            self.ttft_p99_s or slo.ttft_p99_s, self.tpot_p99_s or slo.tpot_p99_s, self.served_within_frac
        )
        shape = Shape(self.num_prompt_tokens, self.num_output_tokens)
        return SloQuestion(kind, shape, limits, plan, self.min_requests, self.max_cell_s)


async def search_on_stack(
    config: WorkbenchConfig, wish: SloWish, *, is_resumed: bool = True, on_step: OnStep = lambda step: None
) -> SloAnswer:
    """Searches to the end.

    Raises:
        NotRunning, NotFound, Unavailable: as `workbench.sweeps.on_stack.sweep_on_stack`.
        ReplicaReserved, NotHeld: somebody else has the replica.
        UnclearWish: the wish cannot be searched.
        ClientTooSlow, WorkloadError, OSError: as `search_slo`.
    """
    owner = owner_here(f"slo-search of {wish.model}")
    async with found_replica(config, wish.model, wish.replica_id) as found:
        question = wish.question(config, found.pool.hardware_class)
        hold = StoreHold(found.store, found.tables, found.replica, owner=owner, clock=SystemClock())
        async with hold.exclusive():
            with client_on_other_cores(found.replica.cores):
                return await search_slo(
                    question,
                    found.replica,
                    Vocabulary.load(found.tokenizer),
                    layout(config).results_dir,
                    is_resumed=is_resumed,
                    on_step=on_step,
                )


def log_answer(config: WorkbenchConfig, model: str, answer: SloAnswer) -> tuple[str | None, str | None]:
    """The search as a run of the model's benchmarks, each cell nested: its run id, else why MLflow did not take it."""
    parent, children = search_fields(model, answer)
    experiment = f"benchmarks/{model.partition('@')[0]}"
    try:
        tracker = Tracker(mlflow_uri(config))
        run_id = tracker.log_family(experiment, parent, children, {"slo_search": [answer.folder / SEARCH_FILE]})
    except NotRunning as error:
        return None, str(error)
    except ServingError as error:
        return None, error.message
    return run_id, None


def search_fields(model: str, answer: SloAnswer) -> tuple[RunFields, list[RunFields]]:
    """The search's run and one of each cell. A search that goes on is the same run, one that began anew another."""
    found = answer.capacity
    children = [
        RunFields(
            key=f"{number}-{content_key(asdict(probe))}",
            name=f"cell {number}: load {probe.load:g}",
            tags={"kind": "slo-probe", "slo": verdict(probe).value, "complete": str(probe.is_complete).lower()},
            params={"load": probe.load},
            metrics={"load": probe.load} | _figures(probe),
        )
        for number, probe in enumerate(answer.probes, start=1)
    ]
    bounds = {"slo_load": found.load, "slo_load/ci_low": found.low, "slo_load/ci_high": found.high}
    parent = RunFields(
        key=f"{answer.folder.name}/{children[0].key if children else 'empty'}",
        name=f"SLO search of {model}",
        tags={"kind": "slo-search", "ending": found.ending.value, "reason": found.reason},
        metrics={name: value for name, value in bounds.items() if value is not None}
        | {"num_cells": float(found.num_cells)},
        is_failed=found.load is None,
    )
    return parent, children


def _figures(probe: Probe) -> dict[str, float]:
    p_kept = {f"{reading.name}/p_kept": reading.p_kept for reading in probe.readings}
    return p_kept | {f"{reading.name}/score": reading.score for reading in probe.readings}


def told(step: SearchStep) -> str:
    """A line about a step."""
    if step.probe is None:
        return f"cell {step.number}: load {step.measure.load:g}, {step.measure.why}"
    return f"cell {step.number}: load {step.probe.load:g} {verdict(step.probe).value}"
