"""Runs the search for the highest load under an SLO on one replica, cell by cell; each is on disk before the next.

    search (slo_search.py) says a load -> prompts sent -> readings of the SLO's limits -> kept -> search again

    results/slo-<digest>/search.json     what is searched, and the readings of every cell so far

The same search run again begins where the last one stopped. A cell is at least `min_requests` long, more near the
answer; requests that failed count as beyond every limit.
"""

from __future__ import annotations

import hashlib
import json
import secrets
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from serving.core.state import Task
from workbench.loadgen import (
    Arrival,
    ClosedLoop,
    LoadResult,
    Poisson,
    RequestRecord,
    Slo,
    Target,
    Vocabulary,
    embedding_prompts,
    run_load,
    synthetic_prompts,
)
from workbench.loadgen import TargetKind as LoadTargetKind
from workbench.slo.readings import Reading, p99_reading, share_reading
from workbench.slo.search import Capacity, Measure, Probe, SearchPlan, search
from workbench.sweeps.cells import MeasuredReplica, Shape

SEARCH_FILE = "search.json"
FAILED_FACTOR = 10.0
MIN_REQUESTS = 400
WAVES = 8
WARM_UP_FRAC = 0.2


class LoadKind(StrEnum):
    """What the load is: users in a closed loop, or requests a second in an open one (Poisson)."""

    CONCURRENCY = "concurrency"
    RATE = "rate"


class ClientTooSlow(Exception):
    """The load client itself fell behind, so that the engine cannot be judged at this load."""


@dataclass(frozen=True, slots=True)
class SloLimits:
    """P99 limits in seconds and the share of requests that must keep both; None asks for nothing."""

    ttft_p99_s: float | None
    tpot_p99_s: float | None
    served_within_frac: float | None

    def __post_init__(self) -> None:
        if self.ttft_p99_s is None and self.tpot_p99_s is None:
            raise ValueError("an SLO needs a limit on TTFT or on TPOT")


@dataclass(frozen=True, slots=True)
class SloQuestion:
    """What is searched: the load, its shape, the SLO, and how long cells are."""

    kind: LoadKind
    shape: Shape
    limits: SloLimits
    plan: SearchPlan
    min_requests: int = MIN_REQUESTS
    max_cell_s: float = 600.0


@dataclass(frozen=True, slots=True)
class SearchStep:
    """Told before each cell (`probe` None) and after it."""

    number: int
    measure: Measure
    probe: Probe | None


OnStep = Callable[[SearchStep], None]


@dataclass(frozen=True, slots=True)
class SloAnswer:
    """The capacity and every cell that it rests on."""

    capacity: Capacity
    probes: tuple[Probe, ...]
    folder: Path

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return {"capacity": asdict(self.capacity), "cells": [asdict(probe) for probe in self.probes]}


async def search_slo(
    question: SloQuestion,
    replica: MeasuredReplica,
    vocabulary: Vocabulary,
    results_dir: Path,
    *,
    is_resumed: bool = True,
    on_step: OnStep = lambda step: None,
) -> SloAnswer:
    """Searches to the end; the caller keeps others off the replica.

    Raises:
        ClientTooSlow: the client fell behind.
        WorkloadError: prompts of that length cannot be made.
        OSError: a cell cannot be written.
    """
    folder = results_dir / f"slo-{question_digest(question, replica)}"
    folder.mkdir(parents=True, exist_ok=True)
    probes = _read(folder) if is_resumed else []
    while isinstance(step := search(question.plan, probes), Measure):
        number = len(probes) + 1
        on_step(SearchStep(number, step, None))
        load = await _measure(question, replica, vocabulary, step)
        probe = read_probe(question, step.load, load.records)
        if load.client_error.invalid is not None:
            raise ClientTooSlow(f"at a load of {step.load:g}: {load.client_error.invalid}")
        probes.append(probe)
        _write(folder, question, replica, probes)
        on_step(SearchStep(number, step, probe))
    return SloAnswer(step, tuple(probes), folder)


async def _measure(
    question: SloQuestion, replica: MeasuredReplica, vocabulary: Vocabulary, step: Measure
) -> LoadResult:
    target = Target(replica.url, replica.request_model, replica.task, LoadTargetKind.ENGINE, replica.replica_id)
    shape, seed, salt = question.shape, secrets.randbits(32), f"slo-{secrets.token_hex(8)}"
    if replica.task is Task.EMBED:
        prompts = embedding_prompts(vocabulary, num_prompt_tokens=shape.num_prompt_tokens, seed=seed)
    else:
        prompts = synthetic_prompts(
            vocabulary,
            num_prompt_tokens=shape.num_prompt_tokens,
            num_output_tokens=shape.num_output_tokens,
            seed=seed,
        )
    is_closed = question.kind is LoadKind.CONCURRENCY
    arrival: Arrival = ClosedLoop(round(step.load)) if is_closed else Poisson(step.load)
    count = question.min_requests * step.effort
    num_requests = max(count, WAVES * round(step.load)) if is_closed else count
    return await run_load(
        target,
        prompts,
        arrival,
        num_requests=num_requests + num_warm_up(question, step.load, num_requests),
        max_duration_s=question.max_cell_s,
        cache_salt=salt,
        seed=seed,
        run_id=salt,
    )


def num_warm_up(question: SloQuestion, load: float, num_requests: int) -> int:
    """Requests cut from the start: a closed loop's first wave; a fifth of an open loop, whose queue starts empty."""
    return round(load) if question.kind is LoadKind.CONCURRENCY else round(WARM_UP_FRAC * num_requests)


def read_probe(question: SloQuestion, load: float, records: Sequence[RequestRecord]) -> Probe:
    """What a cell's requests say of the SLO; incomplete where they are too few for a P99."""
    limits = question.limits
    ordered = sorted(records, key=lambda record: record.index)
    if question.kind is LoadKind.CONCURRENCY:
        cut = num_warm_up(question, load, len(ordered))
    else:
        cut = round(len(ordered) * WARM_UP_FRAC / (1 + WARM_UP_FRAC))
    measured = ordered[cut:]
    wanted: list[Reading | None] = []
    for name, limit in (("ttft_s", limits.ttft_p99_s), ("tpot_s", limits.tpot_p99_s)):
        if limit is not None:
            values = [_latency(record, name, limit) for record in measured]
            present = [value for value in values if value is not None]
            if present or name == "ttft_s":
                wanted.append(p99_reading(f"{name}/p99", present, limit))
    if limits.served_within_frac is not None and measured:
        slo = Slo(limits.ttft_p99_s or 1e9, limits.tpot_p99_s or 1e9)
        is_good = [slo.is_met(record) for record in measured]
        wanted.append(share_reading("slo_good_frac", is_good, limits.served_within_frac))
    readings = tuple(reading for reading in wanted if reading is not None)
    return Probe(load, readings, is_complete=bool(wanted) and None not in wanted)


def _latency(record: RequestRecord, name: str, limit: float) -> float | None:
    if not record.ok:
        return FAILED_FACTOR * limit
    if name == "ttft_s" and record.task is Task.EMBED:
        return record.e2e_s
    value: float | None = getattr(record, name)
    return value


def question_digest(question: SloQuestion, replica: MeasuredReplica) -> str:
    """Names a search: the same question on the same model version, configuration and hardware."""
    covers = {
        "question": {name: value for name, value in asdict(question).items() if name != "plan"},
        "model": replica.model,
        "version": replica.version,
        "engine_fingerprint": replica.engine_fingerprint,
        "hardware_fingerprint": replica.hardware_fingerprint,
        "is_whole": question.plan.is_whole,
    }
    return hashlib.sha256(json.dumps(covers, sort_keys=True).encode()).hexdigest()[:16]


def _read(folder: Path) -> list[Probe]:
    path = folder / SEARCH_FILE
    if not path.exists():
        return []
    cells = json.loads(path.read_text("utf-8"))["cells"]
    return [Probe(c["load"], tuple(Reading(**r) for r in c["readings"]), c["is_complete"]) for c in cells]


def _write(folder: Path, question: SloQuestion, replica: MeasuredReplica, probes: Sequence[Probe]) -> None:
    data = {
        "question": asdict(question),
        "replica": asdict(replica),
        "cells": [asdict(probe) for probe in probes],
    }
    partial = folder / f"{SEARCH_FILE}.partial"
    partial.write_text(json.dumps(data, indent=1, allow_nan=False), "utf-8")
    partial.replace(folder / SEARCH_FILE)
