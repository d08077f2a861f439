"""litellm as a library: completion, streaming, async, text completion, embedding, errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import litellm  # type: ignore[import-not-found,unused-ignore]
from checks import check, report  # type: ignore[import-not-found,unused-ignore]

SERVER = {"api_base": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"], "num_retries": 0}
MODEL = f"openai/{os.environ['MODEL']}"
ASKED: dict[str, Any] = {
    "model": MODEL,
    "messages": [{"role": "user", "content": "What is the capital city of Japan?"}],
    "max_tokens": 8,
    **SERVER,
}


def completion() -> None:
    """A unary chat with its usage."""
    answer = litellm.completion(**ASKED)
    check(answer.choices[0].message.content and answer.usage.completion_tokens, answer)


def streaming() -> None:
    """Chunks, built together by litellm."""
    chunks = list(litellm.completion(**ASKED, stream=True, stream_options={"include_usage": True}))
    whole = litellm.stream_chunk_builder(chunks)
    check(whole.choices[0].message.content and whole.usage.prompt_tokens, whole)


async def asynchronous() -> None:
    """Eight at once, and a stream."""
    answers = await asyncio.gather(*(litellm.acompletion(**ASKED) for _ in range(8)))
    stream = await litellm.acompletion(**ASKED, stream=True)
    texts = [chunk.choices[0].delta.content async for chunk in stream]
    check(all(answer.choices[0].message.content for answer in answers) and any(texts), answers)


def text_completion() -> None:
    """The older completions."""
    model = f"text-completion-openai/{os.environ['MODEL']}"
    answer = litellm.text_completion(model=model, prompt="one two", max_tokens=4, **SERVER)
    check(answer.choices[0].text, answer)


def embedding() -> None:
    """Floats."""
    answer = litellm.embedding(model=f"openai/{os.environ['EMBEDDER']}", input=["one", "two"], **SERVER)
    check([len(row["embedding"]) > 8 for row in answer.data] == [True, True], len(answer.data))


def errors() -> None:
    """Each error as litellm's own class."""
    for kind, change in (
        (litellm.NotFoundError, {"model": "openai/no-such-model"}),
        (litellm.AuthenticationError, {"api_key": "wrong"}),
    ):
        try:
            answer = litellm.completion(**{**ASKED, **change})
        except kind:
            continue
        check(False, answer)


CHECKS: dict[str, Callable[[], Any]] = {
    "completion": completion,
    "streaming": streaming,
    "async": lambda: asyncio.run(asynchronous()),
    "text completion": text_completion,
    "embedding": embedding,
    "errors": errors,
}

report(CHECKS)
