"""What a sweep measures: shapes x concurrencies, and the cells that price them.

mixed    each shape at each concurrency        -> throughput, latency, output price
prefill  each prompt length, one output token  -> input price
cached   each prompt length, prompts repeated  -> cached-input price
gateway  one mixed cell through the gateway    -> what the gateway adds
embed    each prompt length at each concurrency, for embedding models
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from serving.core.state import Task
from workbench.loadgen import Slo
from workbench.sweeps.cells import CellKind, CellSpec, MeasuredReplica, Shape

DIGEST_LENGTH = 16
# One more than a multiple of every engine's block size in use (16, 32): all of a cached prompt but its last
# token then lies in whole blocks, and one token must be computed anyway to get the first output.
CACHE_BLOCK_TOKENS = 32


class SweepMode(StrEnum):
    """How much is measured."""

    SHORT = "short"
    FULL = "full"


@dataclass(frozen=True, slots=True)
class SweepPlan:
    """What to measure on one replica.

    Attributes:
        shapes: tokens of a request; an embedding's output is 0.
        concurrencies: of the closed loops, ascending.
        num_waves: requests of a cell are this many times its concurrency. The first wave is warm-up and the
            last one drains, so at least 3.
        min_requests: of a cell, whatever its concurrency.
        prefill_concurrency: of prefill and cached cells; enough to keep the engine's step full.
        slo: what counts as good, request by request.
        max_cell_s: bound on each cell.
    """

    mode: SweepMode
    task: Task
    shapes: tuple[Shape, ...]
    concurrencies: tuple[int, ...]
    slo: Slo
    num_waves: int = 4
    min_requests: int = 5
    prefill_concurrency: int = 4
    prefill_requests: int = 24
    gateway_concurrency: int | None = 4
    max_cell_s: float = 120.0

    def __post_init__(self) -> None:
        if not self.shapes or not self.concurrencies:
            raise ValueError("a sweep needs at least one shape and one concurrency")
        if min(self.concurrencies) < 1 or self.num_waves < 3:
            raise ValueError("concurrencies start at 1, and num_waves at 3: the first warms up, the last drains")

    def cells(self, *, with_gateway: bool) -> tuple[CellSpec, ...]:
        """The cells in the order in which they run: those behind the gateway last."""
        return tuple(self._embed_cells() if self.task is Task.EMBED else self._generate_cells(with_gateway))

    def _generate_cells(self, with_gateway: bool) -> Iterator[CellSpec]:
        for length in dict.fromkeys(shape.num_prompt_tokens for shape in self.shapes):
            yield self._prefill_cell(CellKind.PREFILL, length)
            yield self._prefill_cell(CellKind.CACHED, cached_length(length))
        for shape in self.shapes:
            for concurrency in self.concurrencies:
                yield self._cell(CellKind.MIXED, shape, concurrency)
        if with_gateway and self.gateway_concurrency is not None:
            yield self._cell(CellKind.GATEWAY, self.shapes[0], self.gateway_concurrency)

    def _embed_cells(self) -> Iterator[CellSpec]:
        for shape in self.shapes:
            for concurrency in self.concurrencies:
                yield self._cell(CellKind.EMBED, Shape(shape.num_prompt_tokens, 0), concurrency)

    def _prefill_cell(self, kind: CellKind, num_prompt_tokens: int) -> CellSpec:
        shape = Shape(num_prompt_tokens, 1)
        return CellSpec(kind, shape, self.prefill_concurrency, self.prefill_requests, self.max_cell_s)

    def _cell(self, kind: CellKind, shape: Shape, concurrency: int) -> CellSpec:
        num_requests = max(self.min_requests, self.num_waves * concurrency)
        return CellSpec(kind, shape, concurrency, num_requests, self.max_cell_s)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types."""
        return asdict(self)


def cached_length(num_prompt_tokens: int) -> int:
    """Prompt tokens of the cached cell that belongs to a prompt length: whole blocks and one token more."""
    return -(-num_prompt_tokens // CACHE_BLOCK_TOKENS) * CACHE_BLOCK_TOKENS + 1


def short_plan(task: Task, slo: Slo) -> SweepPlan:
    """About half a minute on one CPU core for a model of 0.1-0.3 B parameters."""
    if task is Task.EMBED:
        return SweepPlan(SweepMode.SHORT, task, (Shape(64, 0),), (1, 8), slo, num_waves=12, min_requests=40)
    return SweepPlan(SweepMode.SHORT, task, (Shape(64, 32),), (1, 4, 8), slo)


def full_plan(task: Task, slo: Slo) -> SweepPlan:
    """Two shapes up to a full batch, with samples that carry percentiles; many minutes a model on a CPU core."""
    if task is Task.EMBED:
        shapes, concurrencies = (Shape(32, 0), Shape(128, 0)), (1, 2, 4, 8, 16)
        return SweepPlan(SweepMode.FULL, task, shapes, concurrencies, slo, num_waves=20, min_requests=200)
    return SweepPlan(
        SweepMode.FULL,
        task,
        (Shape(64, 64), Shape(512, 64)),
        (1, 2, 4, 8, 16, 32),
        slo,
        num_waves=8,
        min_requests=32,
        prefill_requests=64,
        gateway_concurrency=8,
        max_cell_s=600.0,
    )


def sweep_digest(plan: SweepPlan, replica: MeasuredReplica) -> str:
    """Names a sweep: equal for the same plan on the same model version, configuration and hardware.

    Which of two equal replicas is measured, and at what address, makes no difference.
    """
    covers = {
        "plan": plan.to_json(),
        "model": replica.model,
        "version": replica.version,
        "hardware_class": replica.hardware_class,
        "num_units": replica.num_units,
        "engine_fingerprint": replica.engine_fingerprint,
        "hardware_fingerprint": replica.hardware_fingerprint,
    }
    text = json.dumps(covers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:DIGEST_LENGTH]
