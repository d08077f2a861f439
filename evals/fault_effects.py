"""What each planted fault was measured to do, on which model, when; a fault that is not here was not measured yet.

Figures are of `python -m benchmarks.planted_tripwires`, those of accuracy of `planted_effects` beside it: seed
0, SmolLM2-135M-Instruct in bf16 on vLLM for CPUs, the 2,150 items of suite `gate` asked of both.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Effect:
    """One fault's measured effect.

    Attributes:
        action: what the tripwires decided.
        kl_mean: of the next token's 20 likeliest, in nats, over 60 prompts.
        found_by_prompts: as in `evals.drift.Drift`.
        agreement_frac: share of 32 greedy answers that stay equal.
        first_difference: as in `evals.drift.Drift`.
        measured_on: date.
        accuracy_points: change of accuracy and its 95 % interval; None is not measured yet.
    """

    action: str
    kl_mean: float
    found_by_prompts: int | None
    agreement_frac: float
    first_difference: int | None
    measured_on: str
    accuracy_points: tuple[float, float, float] | None = None

    def as_json(self) -> dict[str, Any]:
        """For commands."""
        return asdict(self)


MODEL = "smollm2-135m"
EFFECTS: dict[str, Effect] = {
    "lost-stop": Effect("full_gate", 0.0, None, 0.34375, 171, "2026-12-01"),
    "int8-group128": Effect("label", 0.0041, 7, 0.3125, 18, "2026-12-01"),
    "int8-channel": Effect("label", 0.0052, 7, 0.375, 18, "2026-12-01"),
    "wrong-rope": Effect("label", 0.0099, 7, 0.28125, 18, "2026-12-01"),
    "noise-weak": Effect("label", 0.0171, 7, 0.21875, 15, "2026-12-01"),
    "merge-weak": Effect("label", 0.0176, 7, 0.21875, 18, "2026-12-01"),
    "truncated-context": Effect("full_gate", 0.0297, 52, 1.0, None, "2026-12-01"),
    "wrong-bos": Effect("full_gate", 0.0648, 7, 0.125, 14, "2026-12-01"),
    "noise-middle": Effect("full_gate", 0.0913, 7, 0.09375, 8, "2026-12-01"),
    "noise-strong": Effect("block", 0.2272, 7, 0.0, 8, "2026-12-01"),
    "dropped-layer": Effect("block", 0.2379, 7, 0.0, 8, "2026-12-01"),
    "int4-group128": Effect("block", 0.2766, 7, 0.0625, 9, "2026-12-01"),
    "int4-channel": Effect("block", 0.5276, 7, 0.0, 7, "2026-12-01"),
    "missing-template": Effect("block", 1.3266, 7, 0.0, 1, "2026-12-01"),
    "merge-bad": Effect("block", 1.771, 7, 0.0, 1, "2026-12-01"),
}
