"""Items asked through lm-eval's API models, over HTTP, as an app would ask them.

Likelihoods are of prompts sent as token ids (lm-eval has to know where the gold begins); continuations and chats are
sent as text, so that the engine's tokenizer and template are under test too. lm-eval drops `finish_reason`: an item's
result has none.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import requests
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr, TemplateAPI
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from evals.results import ItemResult
from evals.tasks import Item, Scoring
from evals.tasks.formats import holds
from serving.core.errors import UpstreamError

CONCURRENCY = 8
SERVICE_TIER = "flex"
MAX_PROMPT_TOKENS = 2048
MAX_NEW_TOKENS = {"arithmetic": 8, "copying": 32, "format": 48}
REQUEST_TIMEOUT_S = 300

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Whom to ask.

    Attributes:
        url: of the gateway, without `/v1`.
        model: the name that requests carry.
        tokenizer: the folder of the model's tokenizer.
        api_key: None where the gateway wants none.
        replica: the one replica that is to answer (admins alone may say so); any when None.
        concurrency: requests in flight. Texts differ between concurrencies, so compared runs have the same.
    """

    url: str
    model: str
    tokenizer: Path
    api_key: str | None = None
    replica: str | None = None
    concurrency: int = CONCURRENCY

    def headers(self) -> dict[str, str]:
        """Of every request."""
        headers = {"x-target-replica": self.replica} if self.replica else {}
        return headers | ({"Authorization": f"Bearer {self.api_key}"} if self.api_key else {})


class _Completions(LocalCompletionsAPI):
    """lm-eval's completions, in our service tier."""

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._create_payload(*args, **kwargs), "service_tier": SERVICE_TIER}


class _Chat(LocalChatCompletion):
    """lm-eval's chat completions, in our service tier."""

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._create_payload(*args, **kwargs), "service_tier": SERVICE_TIER}


def ask(
    items: Sequence[Item], endpoint: Endpoint, *, seed: int, on_progress: Progress | None = None
) -> tuple[list[ItemResult], Mapping[str, float]]:
    """Asks every item, task by task. Blocks; not to be called on an event loop's thread.

    Args:
        items: of any tasks.
        endpoint: whom to ask.
        seed: that requests carry; answers are greedy all the same.
        on_progress: told the task, the items done and all items, before each task and at the end.

    Returns:
        The results in the order of the items' tasks, and the seconds of each task.

    Raises:
        UpstreamError: a request failed three times.
    """
    # lm-eval tells of every retry and of its settings; what matters reaches the caller as an error.
    logging.getLogger("lm_eval").setLevel(logging.CRITICAL)
    by_task: dict[str, list[Item]] = {}
    for item in items:
        by_task.setdefault(item.task, []).append(item)
    results: list[ItemResult] = []
    seconds: dict[str, float] = {}
    tell = on_progress or (lambda task, done, total: None)
    for task, of_task in by_task.items():
        tell(task, len(results), len(items))
        began_s = time.monotonic()
        try:
            results += _SCORERS[of_task[0].scoring](of_task, endpoint, seed)
        except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
            raise UpstreamError(f"task {task}: {endpoint.url} failed three times: {error}") from error
        seconds[task] = time.monotonic() - began_s
    tell("", len(results), len(items))
    return results, seconds


def _result(item: Item, is_right: bool, **found: Any) -> ItemResult:
    return ItemResult(item.id, item.source, item.task, item.scoring, float(is_right), **found)


def _golds(items: Sequence[Item], endpoint: Endpoint, seed: int) -> list[ItemResult]:
    found = _likelihoods([(item.prompt, f" {item.gold}") for item in items], endpoint, seed)
    return [_result(item, is_greedy, log_likelihood=nats) for item, (nats, is_greedy) in zip(items, found, strict=True)]


def _choices(items: Sequence[Item], endpoint: Endpoint, seed: int) -> list[ItemResult]:
    endings = [(item.prompt, f" {ending}") for item in items for ending in (item.gold, item.other)]
    nats = [found for found, _ in _likelihoods(endings, endpoint, seed)]
    return [
        _result(item, gold > other, log_likelihood=gold)
        for item, gold, other in zip(items, nats[::2], nats[1::2], strict=True)
    ]


def _continuations(items: Sequence[Item], endpoint: Endpoint, seed: int) -> list[ItemResult]:
    model = _model(_Completions, endpoint, seed, "completions", tokenizer_backend=None)
    texts = _generated(model, items[0].task, [item.prompt for item in items], until=["\n"])
    return [
        _result(item, text.split("\n")[0].strip() == item.gold, answer=text)
        for item, text in zip(items, texts, strict=True)
    ]


def _checks(items: Sequence[Item], endpoint: Endpoint, seed: int) -> list[ItemResult]:
    model = _model(_Chat, endpoint, seed, "chat/completions", tokenizer_backend=None)
    chats = [JsonChatStr(json.dumps([{"role": "user", "content": item.prompt}])) for item in items]
    texts = _generated(model, items[0].task, chats, until=[])
    return [_result(item, holds(item.gold, text), answer=text) for item, text in zip(items, texts, strict=True)]


_SCORERS: Mapping[Scoring, Callable[[Sequence[Item], Endpoint, int], list[ItemResult]]] = {
    Scoring.GOLD: _golds,
    Scoring.CHOICE: _choices,
    Scoring.GENERATE: _continuations,
    Scoring.CHECK: _checks,
}


def _likelihoods(pairs: Sequence[tuple[str, str]], endpoint: Endpoint, seed: int) -> list[tuple[float, bool]]:
    """Of each (prompt, ending): nats of the ending, and whether each of its tokens is the most likely one."""
    model = _model(_Completions, endpoint, seed, "completions", tokenizer_backend="huggingface")
    asked = [Instance("loglikelihood", {}, pair, index) for index, pair in enumerate(pairs)]
    return list(model.loglikelihood(asked, disable_tqdm=True))


def _generated(model: TemplateAPI, task: str, prompts: Sequence[Any], until: list[str]) -> list[str]:
    settings = {"until": until, "max_gen_toks": MAX_NEW_TOKENS[task], "temperature": 0}
    asked = [Instance("generate_until", {}, (prompt, settings), index) for index, prompt in enumerate(prompts)]
    return list(model.generate_until(asked, disable_tqdm=True))


def _model(kind: type[TemplateAPI], endpoint: Endpoint, seed: int, path: str, *, tokenizer_backend: str | None) -> Any:
    return kind(
        model=endpoint.model,
        base_url=f"{endpoint.url}/v1/{path}",
        tokenizer=str(endpoint.tokenizer) if tokenizer_backend else None,
        tokenizer_backend=tokenizer_backend,
        tokenized_requests=tokenizer_backend is not None,
        num_concurrent=endpoint.concurrency,
        max_length=MAX_PROMPT_TOKENS,
        seed=seed,
        timeout=REQUEST_TIMEOUT_S,
        # lm-eval takes an empty dict for none and then sends a key of the environment's.
        header=endpoint.headers() or {"Accept": "application/json"},
    )
