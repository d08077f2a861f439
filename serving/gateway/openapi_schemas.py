"""Bodies and answers of the hot routes as OpenAPI shows them: the fields we read; every other passes to the engine."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from serving.core.errors import ErrorCode
from serving.core.state import Tier

_MODEL = Field(
    description="`name`, `name@version`, or either with `+adapter`; without a version the model's champion answers.",
    examples=["smollm2-135m"],
)
_SERVICE_TIER = Field(default=None, description="Priority: `priority` before `default` (= `auto`) before `flex`.")


class _Request(BaseModel):
    model_config = ConfigDict(extra="allow")

    model: str = _MODEL
    service_tier: Literal["priority", "default", "auto", "flex"] | None = _SERVICE_TIER


class _Generate(_Request):
    max_tokens: int | None = Field(default=None, description="Tokens to generate at most.")
    temperature: float | None = None
    top_p: float | None = None
    n: int | None = Field(default=None, ge=1, description="Answers to generate.")
    stop: str | list[str] | None = None
    seed: int | None = None
    stream: bool | None = Field(default=None, description="Server-sent events, ended by `data: [DONE]`.")
    stream_options: dict[str, Any] | None = Field(default=None, examples=[{"include_usage": True}])


class ChatCompletionRequest(_Generate):
    """A conversation to continue. Fields not listed pass to the engine."""

    messages: list[dict[str, Any]] = Field(min_length=1)
    max_completion_tokens: int | None = None


class CompletionRequest(_Generate):
    """A text to continue. Fields not listed pass to the engine."""

    prompt: str | list[str] | list[int] | list[list[int]]


class EmbeddingRequest(_Request):
    """Texts to embed. Fields not listed pass to the engine."""

    input: str | list[str] | list[int] | list[list[int]]


class Usage(BaseModel):
    """Tokens as the engine counted them."""

    prompt_tokens: int
    completion_tokens: int | None = None
    total_tokens: int
    prompt_tokens_details: dict[str, Any] | None = Field(default=None, examples=[{"cached_tokens": 0}])


class ChatCompletion(BaseModel):
    """The engine's answer, unchanged; as a stream, chunks of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[dict[str, Any]]
    usage: Usage | None = None


class Completion(ChatCompletion):
    """The engine's answer, unchanged; as a stream, chunks of it."""


class Embeddings(BaseModel):
    """The engine's answer, unchanged."""

    object: str
    model: str
    data: list[dict[str, Any]]
    usage: Usage


class ErrorBody(BaseModel):
    """What is inside `error`."""

    message: str
    type: str
    param: str | None
    code: ErrorCode


class ErrorAnswer(BaseModel):
    """Every error has this shape; a stream that breaks off ends with it as an event and without `[DONE]`."""

    error: ErrorBody


class GenerateRequest(BaseModel):
    """A text to continue or messages to answer, one of them."""

    model_config = ConfigDict(extra="forbid")

    model: str = _MODEL
    version: str | None = Field(default=None, description="Else the model's champion answers.")
    adapter: str | None = Field(default=None, description="One of the model's adapters; else the model alone answers.")
    text: str | None = Field(default=None, description="A text to continue.")
    messages: list[dict[str, Any]] | None = Field(default=None, description="A conversation to answer.")
    tier: Tier | None = Field(default=None, description="`interactive` before `default` before `batch`.")
    stream: bool | None = Field(default=None, description="Server-sent events, ended by `data: [DONE]`.")
    max_tokens: int | None = Field(default=None, ge=0, description="Tokens to generate at most.")
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    repetition_penalty: float | None = None


class GenerateUsage(BaseModel):
    """Tokens as the engine counted them, and what they cost by the cost table; null where nothing was measured."""

    num_prompt_tokens: int
    num_cached_tokens: int
    num_output_tokens: int
    usd: float | None


class GenerateAnswer(BaseModel):
    """As a stream: events `{text}`, then one with all but the text, then `[DONE]`."""

    id: str
    text: str
    model: str
    version: str
    adapter: str | None
    finish_reason: str | None
    usage: GenerateUsage


class ResponseRequest(_Request):
    """An input to answer. No response is kept here: `store` is false, and each request brings its whole input."""

    input: str | list[dict[str, Any]]
    instructions: str | None = None
    max_output_tokens: int | None = Field(default=None, ge=1)
    stream: bool | None = None


class Response(BaseModel):
    """The engine's answer, unchanged; as a stream, its events."""

    id: str
    object: str
    status: str
    model: str
    output: list[dict[str, Any]]


class TokenizeRequest(BaseModel):
    """A text, or messages as the model's chat template writes them."""

    model_config = ConfigDict(extra="allow")

    model: str = _MODEL
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None


class Tokens(BaseModel):
    """The engine's answer, unchanged."""

    count: int
    tokens: list[int]
    max_model_len: int


class ModerationRequest(BaseModel):
    """Texts to judge."""

    model: str | None = Field(default=None, description="`workbench-patterns` (default), `toxicity` or `guard_model`.")
    input: str | list[str] | list[dict[str, Any]]


class Moderation(BaseModel):
    """A result for each input."""

    id: str
    model: str
    results: list[dict[str, Any]]
