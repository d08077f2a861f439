"""How a sweep and its cells are called in MLflow: names of tags, parameters and metrics. Pure."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from workbench.sweeps.cells import CellResult

TAG_KIND = "kind"
TAG_SWEEP = "sweep.digest"
TAG_MEASUREMENT = "measurement.id"
TAG_CELL_KEY = "cell.key"
TAG_CELL_ID = "cell.id"
TAG_VALID = "valid"
KIND_ATTEMPT = "attempt"
"""A cell that is being measured; its run becomes the measurement's when it is whole."""
PARENT_RUN = "mlflow.parentRunId"
MAX_VALUE_LENGTH = 6000

_REPLICA_FIELDS = ("model", "version", "task", "hardware_class", "engine_fingerprint", "hardware_fingerprint")


@dataclass(frozen=True, slots=True)
class RunFields:
    """What a run says. `key` names it: a parent among those of its experiment, a child among its siblings."""

    key: str
    name: str
    tags: Mapping[str, str] = field(default_factory=dict)
    params: Mapping[str, object] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    is_failed: bool = False


def content_key(content: object) -> str:
    """Names what has no id of its own by all that it says: equal for equal plain values."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:16]


def cell_key(cell: CellResult) -> str:
    """Equal for two measurements of the same thing: model, hardware, configuration, shape, concurrency."""
    return "|".join([*(str(getattr(cell, name)) for name in _REPLICA_FIELDS), cell.spec.cell_id])


def cell_tags(cell: CellResult, parent_run_id: str) -> dict[str, str]:
    """Tags of a measurement's run."""
    tags = {
        TAG_KIND: "cell",
        PARENT_RUN: parent_run_id,
        TAG_SWEEP: cell.sweep_digest,
        TAG_MEASUREMENT: cell.measurement_id,
        TAG_CELL_KEY: cell_key(cell),
        TAG_CELL_ID: cell.spec.cell_id,
        TAG_VALID: "false" if cell.invalid else "true",
        "cell.kind": cell.spec.kind.value,
        "target": cell.spec.target.value,
        "commit": cell.commit,
        **{name: str(getattr(cell, name)) for name in _REPLICA_FIELDS},
    }
    return tags | told(cell.invalid, cell.notes)


def told(invalid: str | None, notes: Sequence[str]) -> dict[str, str]:
    """Why a measurement does not count, and what a reader must know, where there is something."""
    texts = {"invalid": invalid or "", "notes": "\n".join(notes)}
    return {name: text[:MAX_VALUE_LENGTH] for name, text in texts.items() if text}


def cell_params(cell: CellResult) -> dict[str, str]:
    """Parameters of a measurement's run."""
    params = {
        "kind": cell.spec.kind.value,
        "num_prompt_tokens": cell.spec.shape.num_prompt_tokens,
        "num_output_tokens": cell.spec.shape.num_output_tokens,
        "concurrency": cell.spec.concurrency,
        "num_requests": cell.spec.num_requests,
        "num_units": cell.num_units,
        "replica_id": cell.replica_id,
        "prompt_seed": cell.prompt_seed,
        "weak": ",".join(cell.weak),
        "energy": cell.energy[:MAX_VALUE_LENGTH],
    }
    return {name: str(value) for name, value in params.items()}


def cell_metrics(cell: CellResult) -> dict[str, float]:
    """Figures of a measurement, intervals as `METRIC/ci_low` and `METRIC/ci_high`."""
    metrics = with_intervals(cell.metrics, cell.intervals)
    metrics["window_s"] = cell.window_s
    metrics["num_requests"] = float(cell.num_requests)
    metrics["num_failed"] = float(cell.num_failed)
    metrics["num_unsent"] = float(cell.num_unsent)
    metrics["prefix_cache_hit_frac"] = cell.prefix_cache_hit_frac
    metrics["client_error_frac"] = cell.client_error_frac
    if cell.decode_tokens_per_s is not None:
        metrics["decode_tokens_per_s"] = cell.decode_tokens_per_s
    return metrics


def with_intervals(figures: Mapping[str, float], intervals: Mapping[str, tuple[float, float]]) -> dict[str, float]:
    """The figures, and beside each that has one its interval as `METRIC/ci_low` and `METRIC/ci_high`."""
    metrics = dict(figures)
    for name, (low, high) in intervals.items():
        metrics[f"{name}/ci_low"], metrics[f"{name}/ci_high"] = low, high
    return metrics


def sweep_tags(sweep: Mapping[str, Any], sweep_digest: str) -> dict[str, str]:
    """Tags of a sweep's parent run, from what its folder keeps."""
    replica = sweep["replica"]
    own = {TAG_KIND: "sweep", TAG_SWEEP: sweep_digest, "commit": str(sweep["commit"])}
    return own | {name: str(replica[name]) for name in _REPLICA_FIELDS}


def sweep_params(sweep: Mapping[str, Any]) -> dict[str, str]:
    """Parameters of a sweep's parent run: the plan, and what the two fingerprints cover."""
    replica = sweep["replica"]
    return (
        flat("plan", sweep["plan"])
        | flat("engine", replica["engine_covers"])
        | flat("hardware", replica["hardware_covers"])
    )


def flat(prefix: str, values: Mapping[str, Any]) -> dict[str, str]:
    """`{"flags": {"dtype": "bfloat16"}}` under `engine` as `engine.flags.dtype`; lists stay together as JSON."""
    found: dict[str, str] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= flat(f"{prefix}.{name}", value)
        else:
            text = json.dumps(value) if isinstance(value, list | tuple) else str(value)
            found[f"{prefix}.{name}"] = text[:MAX_VALUE_LENGTH]
    return found
