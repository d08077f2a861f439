"""The first requests to a fresh engine, so that no user sends them.

A completion and, for models with a chat template, a chat completion: they import, compile the template and
touch every weight once. A long prompt needs none of its own: the first of 512 or 1,500 tokens took as long as
the second (eager mode on CPU). Embedding models get one input.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from serving.core.errors import EngineError, UpstreamError
from serving.core.state import Task
from serving.engine.client import EngineClient
from serving.engine.weights import Weights

_NUM_TOKENS = 4


async def warm_up(client: EngineClient, *, model_name: str, task: Task, weights: Weights, timeout_s: float) -> None:
    """Sends the requests one after another.

    Raises:
        EngineError: the engine is healthy but does not answer them.
    """
    for path, body in _requests(model_name, task, weights):
        try:
            await client.post_json(path, body, timeout_s=timeout_s)
        except UpstreamError as error:
            raise EngineError(f"{model_name} is up but fails its first request: {error.message}") from error


def _requests(model_name: str, task: Task, weights: Weights) -> list[tuple[str, dict[str, Any]]]:
    if task is Task.EMBED:
        return [("/v1/embeddings", {"model": model_name, "input": "warm up"})]
    common = {"model": model_name, "max_tokens": _NUM_TOKENS, "temperature": 0}
    requests: list[tuple[str, dict[str, Any]]] = [("/v1/completions", common | {"prompt": "warm up"})]
    if has_chat_template(weights):
        messages = [{"role": "user", "content": "warm up"}]
        requests.append(("/v1/chat/completions", common | {"messages": messages}))
    return requests


def has_chat_template(weights: Weights) -> bool:
    """Whether the weights' folder brings one; False for a hub model, whose files are not here to read."""
    if weights.served != "local":
        return False
    config = weights.path / "tokenizer_config.json"
    has_file = (weights.path / "chat_template.jinja").is_file()
    return has_file or (config.is_file() and _names_template(config))


def _names_template(config: Path) -> bool:
    return bool(json.loads(config.read_text(encoding="utf-8")).get("chat_template"))
