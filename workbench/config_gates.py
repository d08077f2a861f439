"""The gates' part of the configuration: what is asked of a candidate before it may serve."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from evals.readings import HASHED
from evals.suites import SUITES
from serving.core.policies.gate import GatePolicy
from workbench.config_layers import Strict, unknown

Price = Literal["usd_per_million_output_tokens", "usd_per_million_input_tokens", "usd_per_million_cached_input_tokens"]
Share = Annotated[float, Field(gt=0, lt=1)]
_DEFAULT = GatePolicy()


class GatesConfig(Strict):
    """Tolerances and what must be there; the fields are those of `serving/core/policies/gate.py`.

    Tolerances are shares: 0.02 is two percent, or two points of a rate.
    """

    metrics: tuple[str, ...] = _DEFAULT.metrics
    performance_tolerance: Share = _DEFAULT.performance_tolerance
    failures_tolerance: Share = _DEFAULT.failures_tolerance
    cost_metrics: tuple[Price, ...] = ("usd_per_million_output_tokens",)
    cost_tolerance: Share = _DEFAULT.cost_tolerance
    suites: tuple[str, ...] = _DEFAULT.suites
    quality_tolerance: Share = _DEFAULT.quality_tolerance
    needs_noise_floor: bool = True
    safety_tolerance: Share = _DEFAULT.safety_tolerance
    drift_may_miss: tuple[str, ...] = ()
    max_age_days: float = Field(default=_DEFAULT.max_age_days, gt=0, allow_inf_nan=False)
    alpha: float = Field(default=_DEFAULT.alpha, gt=0, lt=0.5)

    @model_validator(mode="after")
    def _can_be_judged(self) -> Self:
        for name in self.suites:
            if name not in SUITES:
                raise ValueError(f"suites: {unknown(name, 'suite', list(SUITES))}")
        for name in self.drift_may_miss:
            if name not in HASHED:
                raise ValueError(f"drift_may_miss: {unknown(name, 'tripwire', list(HASHED))}")
        self.policy()
        return self

    def policy(self) -> GatePolicy:
        """As the core takes it. Raises ValueError."""
        return GatePolicy(**self.model_dump())
