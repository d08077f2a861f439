"""Request bodies and answers in the shapes that vLLM 0.32 gives them."""

from __future__ import annotations

import array
import base64
import time
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeGuard

from serving.core.errors import BadRequest, NotFound
from serving.engine.fake.language import embedding, next_tokens, token_of, word_of, words_of_chat, words_of_prompt
from serving.engine.fake.settings import FakeSettings


class Kind(StrEnum):
    """The two ways to ask for text, by the prefix of their answers' ids."""

    CHAT = "chatcmpl"
    COMPLETION = "cmpl"


@dataclass(frozen=True, slots=True)
class Generate:
    """A request for text, understood, with the answer already known; `model` is the name that it asks for."""

    kind: Kind
    model: str
    prompt_words: list[str]
    tokens: list[int]
    finish_reason: str
    stream: bool
    include_usage: bool
    continuous_usage: bool
    return_token_ids: bool
    priority: int
    cache_salt: str
    echoes_logprobs: bool = False

    def text(self, begin: int, end: int) -> str:
        """The text of some of the answer's tokens; only a chat's first has no space before it."""
        text = "".join(f" {word_of(token_id)}" for token_id in self.tokens[begin:end])
        return text[1:] if begin == 0 and self.kind is Kind.CHAT else text


def parse_generate(kind: Kind, body: dict[str, Any], settings: FakeSettings) -> Generate:
    """Reads a body as vLLM would.

    Raises:
        BadRequest: a field has a value that vLLM refuses or that is not modelled here.
        NotFound: another model is asked for.
    """
    model = asked_model(body, settings)
    adapter = "" if model == settings.model else model
    stream = bool(body.get("stream"))
    options = optional(body, "stream_options", dict) or {}
    if options and not stream:
        raise BadRequest("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.get("n") not in (None, 1):
        raise BadRequest("The fake engine gives one choice.", param="n")
    cache_salt = optional(body, "cache_salt", str)
    if cache_salt == "":
        raise BadRequest("Parameter 'cache_salt' must be a non-empty string if provided.", param="cache_salt")
    words, form = _prompt(kind, body)
    seed = settings.seed * 1_000_003 + (optional(body, "seed", int) or 0)
    num_tokens, finish_reason = _output_length(body, len(words), settings)
    return Generate(
        kind=kind,
        model=model,
        prompt_words=words,
        tokens=next_tokens(words, num_tokens, seed=seed, form=form + adapter),
        finish_reason=finish_reason,
        stream=stream,
        include_usage=bool(options.get("include_usage")),
        continuous_usage=bool(options.get("include_usage") and options.get("continuous_usage_stats")),
        return_token_ids=bool(body.get("return_token_ids")),
        priority=optional(body, "priority", int) or 0,
        cache_salt=(cache_salt or "") + adapter,
        echoes_logprobs=bool(body.get("echo")) and body.get("logprobs") is not None,
    )


def optional(body: dict[str, Any], name: str, kind: type) -> Any:
    """A field that may be left out.

    Raises:
        BadRequest: it is of another type.
    """
    value = body.get(name)
    if value is not None and type(value) is not kind:
        raise BadRequest(f"{name}: Input should be a valid {kind.__name__}", param=name)
    return value


def asked_model(body: dict[str, Any], settings: FakeSettings) -> str:
    """The name of the model or of the adapter that is asked for; a body may leave it out, as with vLLM.

    Raises:
        NotFound: another is asked for.
    """
    name = settings.model if body.get("model") is None else body["model"]
    if name not in (settings.model, *settings.lora_modules):
        raise NotFound(f"The model `{name}` does not exist.", param="model")
    return str(name)


def _prompt(kind: Kind, body: dict[str, Any]) -> tuple[list[str], str]:
    if kind is Kind.CHAT:
        messages = body.get("messages")
        if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
            raise BadRequest("messages: a list of objects is required", param="messages")
        if not all(_is_content(message.get("content")) for message in messages):
            raise BadRequest("messages: content is a text or a list of parts", param="messages")
        adds_turn = body.get("add_generation_prompt", True) and not body.get("continue_final_message")
        return words_of_chat(messages, adds_turn=adds_turn)
    prompt = body.get("prompt")
    if isinstance(prompt, list) and len(prompt) == 1 and isinstance(prompt[0], str | list):
        prompt = prompt[0]
    if isinstance(prompt, str) or _is_token_ids(prompt):
        return words_of_prompt(prompt), ""
    raise BadRequest("prompt: the fake engine takes one text or one list of token ids", param="prompt")


def _is_content(content: object) -> bool:
    if isinstance(content, list):
        return all(isinstance(part, dict) and isinstance(part.get("text", ""), str) for part in content)
    return content is None or isinstance(content, str)


def _output_length(body: dict[str, Any], num_prompt_tokens: int, settings: FakeSettings) -> tuple[int, str]:
    limit = body.get("max_completion_tokens") or body.get("max_tokens")
    num_tokens = limit if limit is not None else settings.default_output_tokens
    if not isinstance(num_tokens, int) or num_tokens < 1:
        raise BadRequest(f"max_tokens must be at least 1, got {num_tokens}.", param="max_tokens")
    if num_prompt_tokens + num_tokens > settings.max_model_len:
        raise BadRequest(
            f"This model's maximum context length is {settings.max_model_len} tokens. However, you requested "
            f"{num_tokens} output tokens and your prompt contains {num_prompt_tokens} input tokens.",
            param="input_tokens",
        )
    return num_tokens, "stop" if limit is None else "length"


class Answer:
    """Builds the chunks or the body of one answer."""

    def __init__(self, request: Generate, request_id: str, settings: FakeSettings) -> None:
        self.num_cached_tokens = 0
        self._request = request
        self._settings = settings
        self._is_chat = request.kind is Kind.CHAT
        object_name = "chat.completion" if self._is_chat else "text_completion"
        head = {"id": f"{request.kind}-{request_id}", "object": object_name}
        self._head = head | {"created": int(time.time()), "model": request.model}
        self._chunk_head = self._head | ({"object": "chat.completion.chunk"} if self._is_chat else {})

    def role_chunk(self) -> dict[str, Any]:
        """The first chunk of a chat, without text."""
        delta = {"role": "assistant", "content": ""}
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = {**self._chunk_head, "choices": [choice], "prompt_token_ids": self._prompt_token_ids()}
        return self._with_usage(chunk, 0)

    def token_chunk(self, begin: int, end: int, *, finish: str | None, is_reasoning: bool = False) -> dict[str, Any]:
        """A chunk with the tokens from `begin` to before `end`; `finish` is the reason if these are the last."""
        request = self._request
        text = request.text(begin, end)
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            choice["delta"] = {"reasoning" if is_reasoning else "content": text}
        else:
            choice["text"] = text
        choice |= {"logprobs": None, "finish_reason": finish}
        if finish is not None or not self._is_chat:
            choice["stop_reason"] = None
        if not self._is_chat:
            choice["prompt_token_ids"] = self._prompt_token_ids() if begin == 0 else None
        choice["token_ids"] = request.tokens[begin:end] if request.return_token_ids else None
        return self._with_usage({**self._chunk_head, "choices": [choice]}, end)

    def usage_chunk(self, num_output_tokens: int) -> dict[str, Any]:
        """The chunk after the last, without choices."""
        return {**self._chunk_head, "choices": [], "usage": self._usage(num_output_tokens, with_details=True)}

    def body(self, num_output_tokens: int, *, num_reasoning_tokens: int = 0) -> dict[str, Any]:
        """The whole answer to a request that does not stream."""
        request = self._request
        tokens = request.tokens[:num_output_tokens]
        choice: dict[str, Any] = {"index": 0}
        if self._is_chat:
            num_reasoning = min(num_reasoning_tokens, num_output_tokens)
            reasoning = request.text(0, num_reasoning) if num_reasoning else None
            content = request.text(num_reasoning, num_output_tokens)
            choice["message"] = {"role": "assistant", "content": content, "reasoning": reasoning}
        else:
            choice["text"] = request.text(0, num_output_tokens)
        choice |= {"logprobs": None, "finish_reason": request.finish_reason, "stop_reason": None}
        choice["token_ids"] = tokens if request.return_token_ids else None
        body = {**self._head, "choices": [choice], "system_fingerprint": None}
        if self._is_chat:
            body["prompt_token_ids"] = self._prompt_token_ids()
        else:
            if request.echoes_logprobs:
                choice["logprobs"] = _echoed([*request.prompt_words, *map(word_of, tokens)])
            choice["prompt_token_ids"] = self._prompt_token_ids()
        return body | {"usage": self._usage(num_output_tokens, with_details=True)}

    def _prompt_token_ids(self) -> list[int] | None:
        if not self._request.return_token_ids:
            return None
        return [token_of(word) for word in self._request.prompt_words]

    def _with_usage(self, chunk: dict[str, Any], num_output_tokens: int) -> dict[str, Any]:
        if self._request.continuous_usage:
            chunk["usage"] = self._usage(num_output_tokens, with_details=False)
        return chunk

    def _usage(self, num_output_tokens: int, *, with_details: bool) -> dict[str, Any]:
        num_prompt_tokens = len(self._request.prompt_words)
        usage: dict[str, Any] = {
            "prompt_tokens": num_prompt_tokens,
            "total_tokens": num_prompt_tokens + num_output_tokens,
            "completion_tokens": num_output_tokens,
        }
        if with_details and self._settings.enable_prompt_tokens_details:
            usage["prompt_tokens_details"] = {"cached_tokens": self.num_cached_tokens}
        return usage


def parse_inputs(body: dict[str, Any]) -> list[str]:
    """The texts to embed; token ids become their words.

    Raises:
        BadRequest: `input` is neither texts nor token ids.
    """
    inputs = body.get("input")
    if isinstance(inputs, str):
        return [inputs]
    if isinstance(inputs, list) and inputs:
        if all(isinstance(item, int) for item in inputs):
            inputs = [inputs]
        if all(isinstance(item, str) or _is_token_ids(item) for item in inputs):
            return [item if isinstance(item, str) else " ".join(words_of_prompt(item)) for item in inputs]
    raise BadRequest("input: a text, token ids, or a list of either is required", param="input")


def _is_token_ids(item: object) -> TypeGuard[list[int]]:
    return isinstance(item, list) and all(isinstance(token, int) for token in item)


def embeddings_body(body: dict[str, Any], inputs: Sequence[str], request_id: str, settings: FakeSettings) -> Any:
    """The answer to an embeddings request, as floats or, as the OpenAI SDK asks for it, base64.

    Raises:
        BadRequest: `dimensions` is over what the model has or below one.
    """
    num_dimensions = optional(body, "dimensions", int)
    if num_dimensions is None:
        num_dimensions = settings.embedding_dimensions
    if not 1 <= num_dimensions <= settings.embedding_dimensions:
        raise BadRequest(f"dimensions: from 1 to {settings.embedding_dimensions}", param="dimensions")
    data = []
    for index, text in enumerate(inputs):
        vector: list[float] | str = embedding(text, num_dimensions)
        if body.get("encoding_format") == "base64":
            vector = base64.b64encode(array.array("f", vector).tobytes()).decode("ascii")
        data.append({"index": index, "object": "embedding", "embedding": vector})
    num_tokens = sum(len(text.split()) for text in inputs)
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens, "completion_tokens": 0}
    head = {"id": f"embd-{request_id}", "object": "list", "created": int(time.time()), "model": settings.model}
    return head | {"data": data, "usage": usage}


def tokenize_body(body: dict[str, Any], settings: FakeSettings) -> dict[str, Any]:
    """The answer to /tokenize, for a `prompt` or for `messages`.

    Raises:
        BadRequest: neither is given.
    """
    words, _ = _prompt(Kind.CHAT if "messages" in body else Kind.COMPLETION, body)
    tokens = [token_of(word) for word in words]
    return {"count": len(tokens), "max_model_len": settings.max_model_len, "tokens": tokens, "token_strs": None}


_ERROR_TYPES = {404: "NotFoundError", 429: "TooManyRequests", 500: "InternalServerError", 503: "ServiceUnavailable"}


def error_body(status: int, message: str, param: str | None = None) -> dict[str, Any]:
    """vLLM's error object; the same under an HTTP error status and as an event."""
    kind = _ERROR_TYPES.get(status, "BadRequestError")
    return {"error": {"message": message, "type": kind, "param": param, "code": status}}


def _echoed(words: list[str]) -> dict[str, Any]:
    """Logprobs of a prompt and its answer; the first token has none, and each third is not the likeliest."""
    token_logprobs: list[float | None] = [None]
    top_logprobs: list[dict[str, float] | None] = [None]
    for word in words[1:]:
        token_id = token_of(word)
        own = -1.0 - token_id % 10
        token_logprobs.append(own)
        top_logprobs.append({word: own} | ({f"{word}?": -0.5} if token_id % 3 == 0 else {}))
    return {"tokens": words, "token_logprobs": token_logprobs, "top_logprobs": top_logprobs, "text_offset": []}
