"""What each planted fault was measured to do, on which model, when; a fault that is not here was not measured yet.

Figures are of `python -m benchmarks.planted_regressions`: seed 0, SmolLM2-135M-Instruct in bf16 on vLLM for CPUs. The
change of accuracy, with its interval over many items, is not measured yet for any of them.
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
EFFECTS: dict[str, Effect] = {}
