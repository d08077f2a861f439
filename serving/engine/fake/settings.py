"""What can be set on the fake engine: its size and speed at the start, its faults at any time."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


class QueuePolicy(StrEnum):
    """Order of waiting requests: as they came, or by the body's `priority` (lower first), then as they came."""

    FCFS = "fcfs"
    PRIORITY = "priority"


class RejectAs(StrEnum):
    """How a full queue turns a stream away: vLLM does either, depending on when it notices."""

    STATUS = "status"
    EVENT = "event"


def _names(value: Any) -> Any:
    return tuple(name for name in value.split(",") if name) if isinstance(value, str) else value


class FakeSettings(BaseModel):
    """The fake engine's size and speed.

    Time to the first token = `ttft_ms` + `prefill_ms_per_token` times prompt tokens that are not cached; time of a
    step = `itl_ms` + `itl_ms_per_seq` times running requests. A chunk comes every `tokens_per_chunk` steps.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    model: str = Field(default="fake-model", description="served model name; any other is answered 404")
    lora_modules: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        default=(), description="names of adapters that are served too, with commas between; each says other text"
    )
    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: int = Field(default=0, ge=0, le=65535, description="port to listen on; 0 takes a free one")
    log: Path | None = Field(default=None, description="JSONL file to which each request is appended when it ends")
    log_limit: int = Field(default=10_000, ge=1, description="ended requests kept in memory; older ones are forgotten")
    seed: int = Field(default=0, description="the model's weights, so to speak: another seed says other text")
    ttft_ms: float = Field(default=20.0, ge=0, description="time to the first token of an empty prompt")
    prefill_ms_per_token: float = Field(
        default=0.0, ge=0, description="added to it per prompt token that is not cached"
    )
    itl_ms: float = Field(default=10.0, ge=0, description="time of a decoding step")
    itl_ms_per_seq: float = Field(default=0.0, ge=0, description="added to a step per running request")
    tokens_per_chunk: int = Field(default=1, ge=1, description="tokens in a streamed chunk")
    default_output_tokens: int = Field(
        default=16, ge=1, description="tokens after which a request without max_tokens stops"
    )
    max_model_len: int = Field(default=4096, ge=2, description="most tokens of prompt and output together")
    max_num_seqs: int = Field(default=256, ge=1, description="requests that run at once; the others wait")
    max_num_queued_reqs: int | None = Field(
        default=None, ge=0, description="requests that may wait; more are turned away"
    )
    reject_as: RejectAs = Field(
        default=RejectAs.STATUS, description="turn streams away by status 503 or by a first event"
    )
    scheduling_policy: QueuePolicy = Field(default=QueuePolicy.FCFS, description="order of the waiting requests")
    block_size: int = Field(default=16, ge=1, description="tokens in a block of KV cache")
    num_gpu_blocks: int = Field(default=8192, ge=1, description="blocks of KV cache")
    enable_prefix_caching: bool = Field(
        default=True, description="reuse blocks of equal prompt beginnings and cache_salt"
    )
    enable_prompt_tokens_details: bool = Field(default=True, description="say in the usage how many tokens were cached")
    embedding_dimensions: int = Field(default=384, ge=1, description="length of an embedding")

    @property
    def kv_cache_capacity_tokens(self) -> int:
        """Tokens that fit the KV cache."""
        return self.block_size * self.num_gpu_blocks

    @model_validator(mode="after")
    def _longest_request_fits(self) -> Self:
        if self.max_model_len > self.kv_cache_capacity_tokens:
            raise ValueError(
                f"max_model_len {self.max_model_len} exceeds the KV cache of {self.kv_cache_capacity_tokens} tokens "
                "(block_size * num_gpu_blocks)"
            )
        return self


class Faults(BaseModel):
    """What goes wrong, or otherwise than set, with one request: header `x-fake` or body key `fake`, as JSON."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    status: int | None = Field(default=None, ge=400, le=599, description="answer with this status and an error body")
    retry_after_s: int | None = Field(default=None, ge=0, description="Retry-After header of that answer")
    hang: bool = Field(default=False, description="take the request and never answer")
    head_late_ms: float = Field(default=0.0, ge=0, description="begin so much later, head included")
    role_at_once: bool = Field(
        default=False, description="send the role event with the head, long before the first token"
    )
    role_late_ms: float = Field(
        default=0.0, ge=0, description="send the role event so long after the first token was due"
    )
    usage_late_ms: float = Field(default=0.0, ge=0, description="send the usage event so long after the last token")
    done_late_ms: float = Field(default=0.0, ge=0, description="send [DONE] so long after what comes before it")
    no_token: bool = Field(default=False, description="end under status 200 without a single token")
    error_after_tokens: int | None = Field(default=None, ge=0, description="send an error event after so many tokens")
    error_code: int = Field(default=503, description="code in that event")
    die_after_tokens: int | None = Field(default=None, ge=0, description="close the socket after so many tokens")
    hang_after_tokens: int | None = Field(default=None, ge=0, description="fall silent after so many tokens")
    pause_after_tokens: int | None = Field(
        default=None, ge=1, description="wait after so many tokens until POST /fake/resume"
    )
    reasoning_tokens: int = Field(default=0, ge=0, description="the first tokens of a chat come as reasoning deltas")
    tokens_per_chunk: int | None = Field(default=None, ge=1, description="instead of the setting")
    ttft_ms: float | None = Field(default=None, ge=0, description="instead of the setting")
    itl_ms: float | None = Field(default=None, ge=0, description="instead of the setting; no part per running request")

    def overridden_by(self, other: Faults) -> Faults:
        """These faults, with what `other` sets in place of the same fields."""
        return self.model_copy(update={name: getattr(other, name) for name in other.model_fields_set & FAULT_NAMES})


FAULT_NAMES = frozenset(Faults.model_fields)


class ServerFaults(Faults):
    """Faults of all requests, set by `POST /fake/faults` and ended by `DELETE /fake/faults`."""

    num_requests: int | None = Field(default=None, ge=1, description="only the next so many requests")
    health_status: int = Field(default=200, ge=200, le=599, description="what /health answers")
