"""What a simulated fleet is: hardware classes, models, pools, tiers, traces. Read from a file and checked whole."""

from __future__ import annotations

import math
from importlib.resources import files
from pathlib import Path
from typing import Self

import yaml
from pydantic import BaseModel, ConfigDict, Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from serving.core.state import Tier

Share = float


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class ClassSpec(_Strict):
    """One device of a hardware class. `usd_per_hour` is on demand."""

    memory_gb: PositiveFloat
    bandwidth_tb_s: PositiveFloat
    bf16_tflops: PositiveFloat
    fp8_tflops: PositiveFloat | None
    watts: PositiveFloat
    usd_per_hour: PositiveFloat
    interconnect: str


class Efficiency(_Strict):
    """What kernels reach of a class's peaks: products, reading weights, reading the KV cache."""

    mfu: float = Field(gt=0, le=1)
    mbu_weights: float = Field(gt=0, le=1)
    mbu_kv: float = Field(gt=0, le=1)


class StepOverhead(_Strict):
    """Seconds that a step takes beside its kernels."""

    base: NonNegativeFloat
    per_sequence: NonNegativeFloat


class ModelSpec(_Strict):
    """A dense transformer with grouped-query attention, in two-byte floats."""

    parameters_b: PositiveFloat
    layers: PositiveInt
    kv_heads: PositiveInt
    head_dim: PositiveInt
    hidden: PositiveInt
    dtype: str = Field(pattern="^bf16$")

    @property
    def weights_bytes(self) -> float:
        """Bytes of the weights."""
        return self.parameters_b * 1e9 * 2

    @property
    def kv_bytes_per_token(self) -> int:
        """Keys and values of one token in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * 2


class PoolSpec(_Strict):
    """Replicas of a model on a class; `tp` devices each."""

    class_name: str = Field(alias="class")
    tp: PositiveInt
    replicas: PositiveInt


class TtftLimit(_Strict):
    """Seconds, and seconds more for each thousand prompt tokens."""

    base: PositiveFloat
    per_1k: NonNegativeFloat


class TierSpec(_Strict):
    """Share of the requests, and the SLO."""

    share: float = Field(gt=0, le=1)
    ttft_p99_s: TtftLimit
    tpot_p99_s: PositiveFloat

    def ttft_limit_s(self, num_prompt_tokens: int) -> float:
        """Of a prompt of that length."""
        return self.ttft_p99_s.base + self.ttft_p99_s.per_1k * num_prompt_tokens / 1000.0


class TraceSpec(_Strict):
    """A recorded trace, or requests drawn as said here."""

    file: str | None = None
    arrivals: str | None = Field(default=None, pattern="^poisson$")
    prompt_tokens: dict[str, tuple[int, int]] | None = None
    output_tokens: dict[str, tuple[int, int]] | None = None
    requests: PositiveInt | None = None
    prefixes: str = Field(pattern="^(none|hash_ids)$")
    block_tokens: PositiveInt | None = None


class EngineSpec(_Strict):
    """What every engine is started with."""

    max_num_seqs: PositiveInt
    max_num_batched_tokens: PositiveInt
    block_size: PositiveInt
    gpu_memory_utilization: float = Field(gt=0, le=1)
    prefix_caching: bool


class FleetSpec(_Strict):
    """The whole fleet, and what it is asked."""

    classes: dict[str, ClassSpec]
    efficiency: dict[str, Efficiency]
    step_overhead_s: StepOverhead
    models: dict[str, ModelSpec]
    pools: dict[str, tuple[PoolSpec, ...]]
    mix: dict[str, Share]
    tiers: dict[Tier, TierSpec]
    traces: dict[str, TraceSpec]
    max_prompt_tokens: PositiveInt
    loads: tuple[PositiveFloat, ...]
    seeds: tuple[int, ...]
    engine: EngineSpec

    @model_validator(mode="after")
    def _names_resolve(self) -> Self:
        for model, pools in self.pools.items():
            if model not in self.models:
                raise ValueError(f"pools: there is no model {model!r}; there are {', '.join(self.models)}")
            for pool in pools:
                if pool.class_name not in self.classes or pool.class_name not in self.efficiency:
                    raise ValueError(f"pools.{model}: class {pool.class_name!r} needs its figures and efficiency")
        for name, shares in (("mix", self.mix.values()), ("tiers", [tier.share for tier in self.tiers.values()])):
            if not math.isclose(sum(shares), 1.0, abs_tol=1e-6):
                raise ValueError(f"{name}: the shares add up to {sum(shares)}, not 1")
        if set(self.mix) != set(self.pools):
            raise ValueError("mix and pools must name the same models")
        return self

    def usd_per_hour(self, pool: PoolSpec) -> float:
        """Of one replica."""
        return self.classes[pool.class_name].usd_per_hour * pool.tp


def load_fleet(path: Path | None = None) -> FleetSpec:
    """The fleet in a YAML file; the one that comes along by default.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is no fleet; pydantic's message names the field.
    """
    text = path.read_text() if path else files("workbench").joinpath("data", "fleet.yaml").read_text()
    return FleetSpec.model_validate(yaml.safe_load(text))
