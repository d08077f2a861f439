"""A cell of a sweep: what is to be measured, on what, and what came out.

    CellSpec        one point of the plan: kind, shape, concurrency, number of requests
    MeasuredReplica the replica under test and what makes it comparable (fingerprints, class, units)
    CellResult      the outcome: everything that the cost table, MLflow and the plots read

All of it is plain data that round-trips through JSON, so that a sweep is resumed from files alone.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from enum import StrEnum
from typing import Any

from serving.core.state import Task

CELL_SCHEMA = 1
MEASURED = "measured"


class CellKind(StrEnum):
    """What a cell is measured for.

    MIXED    prompts and outputs of the shape, closed loop: throughput and latency at one concurrency
    PREFILL  one output token: the prefill-only rate, which prices input tokens
    CACHED   a few prompts repeated under one cache salt: the time a cached input token takes
    GATEWAY  a mixed cell sent through the gateway: what the gateway adds
    EMBED    embedding requests: input tokens only
    """

    MIXED = "mixed"
    PREFILL = "prefill"
    CACHED = "cached"
    GATEWAY = "gateway"
    EMBED = "embed"


class TargetKind(StrEnum):
    """Where the client stood: in front of the engine itself or in front of the gateway."""

    ENGINE = "engine"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Shape:
    """Tokens of a request, exact in the model's own tokens."""

    num_prompt_tokens: int
    num_output_tokens: int

    def __str__(self) -> str:
        return f"{self.num_prompt_tokens}x{self.num_output_tokens}"


@dataclass(frozen=True, slots=True)
class CellSpec:
    """One measurement to make. `max_duration_s` bounds it whatever the engine does.

    `load` names an open loop, as imported results may have one; without it `concurrency` users wait for their answers.
    """

    kind: CellKind
    shape: Shape
    concurrency: int
    num_requests: int
    max_duration_s: float = 120.0
    load: str = ""

    @property
    def cell_id(self) -> str:
        """Name inside its sweep; also the stem of its files."""
        load = f"-{self.load}" if self.load else ""
        return f"{self.kind.value}-{self.shape}-c{self.concurrency}{load}"

    @property
    def is_closed(self) -> bool:
        """Whether users wait for their answers; what an open loop's timeline says depends on it."""
        return not self.load or self.load.startswith("closed:")

    @property
    def target(self) -> TargetKind:
        """Whether the load goes to the engine or through the gateway."""
        return TargetKind.GATEWAY if self.kind is CellKind.GATEWAY else TargetKind.ENGINE


@dataclass(frozen=True, slots=True)
class MeasuredReplica:
    """The replica under test.

    `request_model` is the name that the engine answers to; `cores` are the CPU cores it is pinned to
    (None on a GPU or an endpoint elsewhere). `engine_covers` and `hardware_covers` say what the two
    fingerprints are digests of.
    """

    replica_id: str
    url: str
    request_model: str
    model: str
    version: str
    task: Task
    hardware_class: str
    num_units: int
    engine_fingerprint: str
    hardware_fingerprint: str
    engine_covers: Mapping[str, Any] = field(default_factory=dict)
    hardware_covers: Mapping[str, Any] = field(default_factory=dict)
    cores: tuple[int, ...] | None = None
    gateway_url: str | None = None


@dataclass(frozen=True, slots=True)
class CellResult:
    """What one cell measured. Totals and rates are of the measured window, of all units together.

    Attributes:
        window_s: length of the measured window (after the warm-up cut).
        num_prompt_tokens, num_cached_tokens, num_output_tokens: work of the served requests in the window;
            floats, because a token at the window's edge counts by the share of it that lies inside.
        decode_tokens_per_s: rate at which `concurrency` streams decode, without their prefill;
            None where nothing was decoded.
        metrics: by their MLflow names, finite, e.g. `ttft_s/p50`, `output_tokens_per_s_per_gpu`.
        intervals: 95 % intervals of some metrics, under the same names.
        weak: metrics that the sample is too small to carry; a p99 among them is the largest value seen.
        client_error_frac: what the client can have added at most, as a share of the median TTFT.
        engine_num_prompt_tokens, engine_num_output_tokens: growth of the engine's own counters.
        prefix_cache_hit_frac: hit tokens over queried tokens in the engine, in this cell alone.
        invalid: why the cell does not count, or None when it does.
        prompt_seed: what the prompts were drawn from; fresh for each measurement.
        commit: the code that measured.
        records_file: name of the parquet with one row a request, beside this cell's JSON.
        notes: what a reader of the figures must know, a sentence each.
        num_unsent: requests that came due and were never sent.
        energy: the counters that joules a token rest on, or why there are none.
        provenance: `measured` by us, or the tool that it is imported from.
    """

    sweep_digest: str
    spec: CellSpec
    model: str
    version: str
    task: Task
    hardware_class: str
    num_units: int
    engine_fingerprint: str
    hardware_fingerprint: str
    engine_covers: Mapping[str, Any]
    hardware_covers: Mapping[str, Any]
    replica_id: str
    started_at_s: float
    ended_at_s: float
    window_s: float
    num_requests: int
    num_failed: int
    failures: Mapping[str, int]
    num_prompt_tokens: float
    num_cached_tokens: float
    num_output_tokens: float
    engine_num_prompt_tokens: int
    engine_num_output_tokens: int
    prefix_cache_hit_frac: float
    decode_tokens_per_s: float | None
    metrics: Mapping[str, float]
    intervals: Mapping[str, tuple[float, float]]
    client_error_frac: float
    prompt_seed: int
    commit: str
    records_file: str | None
    weak: tuple[str, ...] = ()
    invalid: str | None = None
    notes: tuple[str, ...] = ()
    num_unsent: int = 0
    energy: str = "measured before energy was read"
    provenance: str = MEASURED
    schema: int = CELL_SCHEMA

    @property
    def measurement_id(self) -> str:
        """Unique per measurement: a cell that is measured again gets another one."""
        return f"{self.sweep_digest}/{self.spec.cell_id}/{round(self.started_at_s * 1000)}"

    @property
    def prompt_tokens_per_s(self) -> float:
        """Prompt tokens a second of the whole replica."""
        return self.num_prompt_tokens / self.window_s if self.window_s > 0 else 0.0

    @property
    def output_tokens_per_s(self) -> float:
        """Output tokens a second of the whole replica."""
        return self.num_output_tokens / self.window_s if self.window_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Plain JSON types.

        Raises:
            ValueError: a metric is NaN or infinite; such a figure is never stored.
        """
        for name, value in self.metrics.items():
            if not math.isfinite(value):
                raise ValueError(f"metric {name} of cell {self.spec.cell_id} is {value}: only finite figures are kept")
        return asdict(self)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> CellResult:
        """The cell that `to_json` wrote.

        Raises:
            ValueError: the schema is another one, or a field is missing or unknown.
        """
        if data.get("schema") != CELL_SCHEMA:
            raise ValueError(f"cell schema {data.get('schema')!r} is not {CELL_SCHEMA}: measure it again")
        spec = dict(data["spec"])
        fields = dict(data)
        fields["spec"] = CellSpec(
            kind=CellKind(spec["kind"]),
            shape=Shape(**spec["shape"]),
            concurrency=spec["concurrency"],
            num_requests=spec["num_requests"],
            max_duration_s=spec["max_duration_s"],
            load=spec.get("load", ""),
        )
        fields["task"] = Task(data["task"])
        fields["weak"] = tuple(data["weak"])
        fields["notes"] = tuple(data.get("notes", ()))
        fields["intervals"] = {name: (low, high) for name, (low, high) in data["intervals"].items()}
        try:
            return cls(**fields)
        except TypeError as error:
            raise ValueError(f"not a cell of schema {CELL_SCHEMA}: {error}") from error


def file_stem(cell_id: str, started_at_s: float) -> str:
    """Name of a measurement's files without their suffix."""
    return f"{cell_id}.{round(started_at_s * 1000)}"
