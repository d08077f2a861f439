"""The openai SDK: sync, async, streaming, completions, embeddings, models, errors."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

import openai
from checks import check, report  # type: ignore[import-not-found,unused-ignore]

URL, KEY, MODEL = os.environ["BASE_URL"], os.environ["API_KEY"], os.environ["MODEL"]
MESSAGES: Any = [{"role": "user", "content": "What is the capital city of Japan?"}]
ASKED: dict[str, Any] = {"model": MODEL, "messages": MESSAGES, "max_tokens": 8}


def client(**options: Any) -> openai.OpenAI:
    """As an app makes it."""
    return openai.OpenAI(**{"base_url": URL, "api_key": KEY, "max_retries": 0, **options})


def sync_chat() -> None:
    """A unary chat with its usage."""
    answer = client().chat.completions.create(**ASKED)
    check(answer.choices[0].message.content and answer.usage and answer.usage.completion_tokens, answer)


def sync_stream() -> None:
    """Chunks, the last with usage."""
    options: Any = {"include_usage": True}
    chunks = list(client().chat.completions.create(**ASKED, stream=True, stream_options=options))
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    check(text and chunks[-1].usage and chunks[-1].usage.total_tokens, chunks[-1])


def sync_completion() -> None:
    """The older completions, as text and as a stream."""
    answer = client().completions.create(model=MODEL, prompt="one two", max_tokens=4)
    stream = client().completions.create(model=MODEL, prompt="one two", max_tokens=4, stream=True)
    check(answer.choices[0].text and "".join(c.choices[0].text for c in stream if c.choices), answer)


def embeddings() -> None:
    """Floats, which the SDK asks for in base64."""
    answer = client().embeddings.create(model=os.environ["EMBEDDER"], input=["one", "two"])
    check([len(row.embedding) > 8 for row in answer.data] == [True, True], len(answer.data))


def models() -> None:
    """The list of models."""
    check(MODEL in [model.id for model in client().models.list()], "the model is not in the list")


def headers() -> None:
    """The raw response with its request id."""
    raw = client().chat.completions.with_raw_response.create(**ASKED)
    check(raw.headers.get("x-request-id") and raw.parse().choices, dict(raw.headers))


def errors() -> None:
    """Each error as the SDK's own class."""
    cases: list[tuple[type[Exception], Callable[[], object]]] = [
        (openai.NotFoundError, lambda: client().chat.completions.create(**{**ASKED, "model": "no-such-model"})),
        (openai.AuthenticationError, lambda: client(api_key="wrong").chat.completions.create(**ASKED)),
        (openai.BadRequestError, lambda: client().chat.completions.create(**{**ASKED, "messages": 5})),
        (openai.BadRequestError, lambda: client().chat.completions.create(**{**ASKED, "max_tokens": 10**6})),
    ]
    for kind, ask in cases:
        try:
            answer = ask()
        except kind as error:
            check(getattr(error, "code", None), error)
        else:
            check(False, answer)


async def async_chat() -> None:
    """Eight at once."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as asynchronous:
        answers = await asyncio.gather(*(asynchronous.chat.completions.create(**ASKED) for _ in range(8)))
    check(all(answer.choices[0].message.content for answer in answers), answers)


async def async_stream() -> None:
    """A stream by the SDK's accumulator, and one that is left in the middle."""
    async with openai.AsyncOpenAI(base_url=URL, api_key=KEY, max_retries=0) as asynchronous:
        # Without max_tokens: the SDK's accumulator raises at an answer that was cut by it, whoever gave it.
        async with asynchronous.chat.completions.stream(model=MODEL, messages=MESSAGES) as stream:
            final = await stream.get_final_completion()
        left = await asynchronous.chat.completions.create(**ASKED, stream=True)
        async for _ in left:
            break
        await left.close()
    check(final.choices[0].message.content, final)


CHECKS: dict[str, Callable[[], Any]] = {
    "sync": sync_chat,
    "streaming": sync_stream,
    "completions": sync_completion,
    "async": lambda: asyncio.run(async_chat()),
    "async streaming": lambda: asyncio.run(async_stream()),
    "embeddings": embeddings,
    "models": models,
    "headers": headers,
    "errors": errors,
}

report(CHECKS)
