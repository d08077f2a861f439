"""One reading of a replica: what it makes of fixed prompts, with what a comparison needs to know.

Everything goes through the engine's chat endpoint, so that template, tokenizer and sampling defaults are under test
too. Requests of a part run at a fixed concurrency: on one build an equal one
gives equal answers, another need not.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, TypeVar

from pydantic import TypeAdapter, ValidationError

from evals.drift_prompts import LONG, SHORT
from serving.core.errors import BadRequest, UpstreamError

TOP_TOKENS = 20
NUM_ANSWERS = 32
ANSWER_TOKENS = 64
KL_CONCURRENCY = 4
TIMEOUT_S = 300.0
TOKEN_PREFIX = "token_id:"
HASHED = ("token_ids", "settings")
"""Fields of a reading that are equal or not; None where nobody could see them."""
PROMPTS = (*SHORT, *LONG)
_SETTING_FILES = ("generation_config.json",)
_STOP_FIELDS = ("eos_token", "eos_token_id", "stop_strings")
T = TypeVar("T")


class Replica(Protocol):
    """Posts JSON to a replica; `serving.engine.client.EngineClient` does."""

    async def post_json(self, path: str, obj: Any, *, timeout_s: float = ...) -> Any:
        """The JSON answer. Raises UpstreamError."""
        ...


@dataclass(frozen=True, slots=True)
class Answer:
    """A greedy answer."""

    tokens: tuple[int, ...]
    finish_reason: str


@dataclass(frozen=True, slots=True)
class Reading:
    """What a replica said.

    Attributes:
        protocol: digest of prompts, lengths and concurrency; only equal ones compare.
        token_ids: digest of the rendered chats' token ids; None where the engine does not tell.
        settings: digest of generation config and stop tokens; None without the model's folder.
        is_long: of each prompt.
        next_tokens: of each prompt, the likeliest tokens' logprobs by id.
        answers: greedy, of the first prompts.
    """

    protocol: str
    token_ids: str | None
    settings: str | None
    is_long: tuple[bool, ...]
    next_tokens: tuple[dict[int, float], ...]
    answers: tuple[Answer, ...]


@dataclass(frozen=True, slots=True)
class Reference:
    """Two readings of what is to stay: the second is the floor. `model_digest` and `engine` say of what."""

    model: str
    model_digest: str
    engine: str
    taken_at: str
    first: Reading
    second: Reading
    covers: dict[str, Any] = field(default_factory=dict)

    @property
    def file_name(self) -> str:
        """Where it is kept below a folder: by model, weights and engine."""
        weights = self.model_digest.partition(":")[2][:16]
        return f"{self.model}-{weights}-{self.engine[:16]}.json"


_REFERENCE = TypeAdapter(Reference)


def write(reference: Reference, folder: Path) -> Path:
    """Keeps a reference; replaced in one step."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / reference.file_name
    partial = path.with_suffix(".partial")
    partial.write_bytes(_REFERENCE.dump_json(reference))
    return partial.replace(path)


def read(path: Path) -> Reference:
    """A kept reference.

    Raises:
        BadRequest: there is none, or it cannot be read.
    """
    try:
        return _REFERENCE.validate_json(path.read_bytes())
    except OSError as error:
        raise BadRequest(f"no reference at {path} ({error.strerror}): take one with --take-reference") from error
    except ValidationError as error:
        raise BadRequest(f"{path} is no reference of ours; take it anew with --take-reference") from error


async def take(replica: Replica, model: str, folder: Path | None = None) -> Reading:
    """Reads a replica: about 150 requests. It must be idle, or the answers are those of another concurrency.

    Args:
        replica: the engine's client.
        model: the name that requests use.
        folder: the model's, for what no endpoint tells.

    Raises:
        UpstreamError: it does not answer, or not with what was asked for.
    """
    token_ids = await _token_ids(replica, model, PROMPTS)
    next_tokens = await _all(KL_CONCURRENCY, PROMPTS, lambda prompt: _next_tokens(replica, model, prompt))
    answers = await _all(NUM_ANSWERS, PROMPTS[:NUM_ANSWERS], lambda prompt: _answer(replica, model, prompt))
    return Reading(
        protocol=PROTOCOL,
        token_ids=token_ids,
        settings=None if folder is None else settings_digest(folder),
        is_long=tuple(prompt in LONG for prompt in PROMPTS),
        next_tokens=tuple(next_tokens),
        answers=tuple(answers),
    )


def settings_digest(folder: Path) -> str:
    """Digest of the generation config and of what ends an answer."""
    found: list[Any] = []
    for name in (*_SETTING_FILES, "config.json", "tokenizer_config.json"):
        path = folder / name
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
        chosen = content if name in _SETTING_FILES else {k: content[k] for k in _STOP_FIELDS if k in content}
        found.append([name, chosen])
    return digest(found)


def digest(content: Any) -> str:
    """SHA-256 of anything that JSON holds."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


PROTOCOL = digest([PROMPTS, TOP_TOKENS, KL_CONCURRENCY, NUM_ANSWERS, ANSWER_TOKENS])


async def _all(concurrency: int, prompts: Sequence[str], ask: Callable[[str], Awaitable[T]]) -> list[T]:
    """In batches that start together: who runs beside whom is the same each time."""
    found: list[T] = []
    for begin in range(0, len(prompts), concurrency):
        found += await asyncio.gather(*(ask(prompt) for prompt in prompts[begin : begin + concurrency]))
    return found


def _chat(model: str, prompt: str, **fields: Any) -> dict[str, Any]:
    return {"model": model, "messages": [{"role": "user", "content": prompt}], **fields}


async def _token_ids(replica: Replica, model: str, prompts: Sequence[str]) -> str:
    async def ask(prompt: str) -> list[int]:
        answer = await replica.post_json("/tokenize", _chat(model, prompt), timeout_s=TIMEOUT_S)
        try:
            return [int(token) for token in answer["tokens"]]
        except (KeyError, TypeError, ValueError) as error:
            raise UpstreamError(f"/tokenize did not answer with tokens: {error!r}") from error

    return digest(await _all(KL_CONCURRENCY, prompts, ask))


async def _next_tokens(replica: Replica, model: str, prompt: str) -> dict[int, float]:
    body = _chat(model, prompt, max_tokens=1, temperature=0.0, logprobs=True, top_logprobs=TOP_TOKENS)
    answer = await _ask(replica, body)
    try:
        top = answer["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
        found = {token_id(entry["token"]): float(entry["logprob"]) for entry in top}
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UpstreamError(f"the engine did not answer with {TOP_TOKENS} logprobs: {error!r}") from error
    if len(found) < TOP_TOKENS:
        raise UpstreamError(f"the engine shows {len(found)} logprobs of the {TOP_TOKENS} that were asked for")
    return found


async def _answer(replica: Replica, model: str, prompt: str) -> Answer:
    body = _chat(model, prompt, max_tokens=ANSWER_TOKENS, temperature=0.0, seed=0, logprobs=True)
    answer = await _ask(replica, body)
    try:
        choice = answer["choices"][0]
        tokens = tuple(token_id(entry["token"]) for entry in choice["logprobs"]["content"])
        return Answer(tokens, str(choice["finish_reason"]))
    except (KeyError, IndexError, TypeError, ValueError) as error:
        raise UpstreamError(f"the engine did not answer with its tokens: {error!r}") from error


async def _ask(replica: Replica, body: dict[str, Any]) -> Any:
    # A salt of its own: what an earlier request left in the prefix cache changes how a prompt is computed.
    body = {**body, "return_tokens_as_token_ids": True, "cache_salt": secrets.token_hex(8)}
    return await replica.post_json("/v1/chat/completions", body, timeout_s=TIMEOUT_S)


def token_id(text: str) -> int:
    """The id in vLLM's `token_id:17`. Raises ValueError."""
    if not text.startswith(TOKEN_PREFIX):
        raise ValueError(f"{text!r} is no {TOKEN_PREFIX}N")
    return int(text.removeprefix(TOKEN_PREFIX))
