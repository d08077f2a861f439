"""LangChain's ChatOpenAI and OpenAIEmbeddings: invoke, stream, batch, async, embeddings."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from typing import Any

from checks import check, report  # type: ignore[import-not-found,unused-ignore]
from langchain_openai import ChatOpenAI, OpenAIEmbeddings  # type: ignore[import-not-found,unused-ignore]

SERVER = {"base_url": os.environ["BASE_URL"], "api_key": os.environ["API_KEY"], "max_retries": 0}
QUESTION = "What is the capital city of Japan?"


def chat(**options: Any) -> Any:
    """As an app makes it."""
    return ChatOpenAI(model=os.environ["MODEL"], max_tokens=8, **SERVER, **options)


def invoke() -> None:
    """A unary chat with its usage."""
    answer = chat().invoke(QUESTION)
    check(answer.content and answer.usage_metadata["output_tokens"], answer)


def stream() -> None:
    """Chunks, the last with usage."""
    chunks = list(chat(stream_usage=True).stream(QUESTION))
    whole = chunks[0]
    for chunk in chunks[1:]:
        whole += chunk
    check(whole.content and whole.usage_metadata["total_tokens"], whole)


def batch() -> None:
    """Eight in threads."""
    answers = chat().batch([QUESTION] * 8)
    check(len(answers) == 8 and all(answer.content for answer in answers), answers)


async def asynchronous() -> None:
    """Async, whole and streamed."""
    model = chat()
    answer = await model.ainvoke(QUESTION)
    texts = [chunk.content async for chunk in model.astream(QUESTION)]
    check(answer.content and any(texts), answer)


def embeddings() -> None:
    """Texts, not the token ids of OpenAI's own models."""
    model = OpenAIEmbeddings(model=os.environ["EMBEDDER"], check_embedding_ctx_length=False, **SERVER)
    check([len(vector) > 8 for vector in model.embed_documents(["one", "two"])] == [True, True], "vectors")


CHECKS: dict[str, Callable[[], Any]] = {
    "invoke": invoke,
    "stream": stream,
    "batch": batch,
    "async": lambda: asyncio.run(asynchronous()),
    "embeddings": embeddings,
}

report(CHECKS)
