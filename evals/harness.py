"""Items asked through lm-eval's API models, over HTTP, as an app would ask them.

Likelihoods are of prompts sent as token ids (lm-eval has to know where the gold begins); continuations and chats are
sent as text, so that the engine's tokenizer and template are under test too.

How requests go out is ours and not lm-eval's: one way for any number in flight, no progress bar beside the caller's,
no second try of what was refused.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import aiohttp
import tenacity
from lm_eval.api.instance import Instance
from lm_eval.models.api_models import JsonChatStr, TemplateAPI
from lm_eval.models.openai_completions import LocalChatCompletion, LocalCompletionsAPI

from evals.endpoint import SERVICE_TIER, Endpoint
from evals.results import ItemResult
from evals.tasks import Item, Scoring
from evals.tasks.formats import holds
from serving.core.errors import UpstreamError

MAX_PROMPT_TOKENS = 2048
MAX_NEW_TOKENS = {"arithmetic": 8, "copying": 32, "format": 48}
REQUEST_TIMEOUT_S = 300
NUM_TRIES = 3
SHORTEST_WAIT_S, LONGEST_WAIT_S = 1.0, 10.0
# Refused for now; every other answer from 400 to 499 is refused for good.
PASSING_STATUSES = (408, 429)

Progress = Callable[[str, int, int], None]


class _Api(TemplateAPI):
    """What of lm-eval's API models is ours: the service tier, how requests go out, and answers that say why they ended.

    Attributes:
        num_in_flight: requests at once.
    """

    num_in_flight: int

    def _create_payload(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {**super()._create_payload(*args, **kwargs), "service_tier": SERVICE_TIER}

    async def get_batched_requests(
        self, requests: list[Any], cache_keys: list[Any], *, ctxlens: list[int] | None = None, **kwargs: Any
    ) -> list[Any]:
        """One answer a request, in their order; each is tried `NUM_TRIES` times.

        Raises:
            aiohttp.ClientError, TimeoutError: of the last try of one; the others are given up.
        """
        asked = tenacity.AsyncRetrying(
            retry=tenacity.retry_if_exception(_may_pass),
            stop=tenacity.stop_after_attempt(NUM_TRIES),
            wait=tenacity.wait_exponential(SHORTEST_WAIT_S, LONGEST_WAIT_S),
            reraise=True,
        ).wraps(self.amodel_call)
        turns = asyncio.Semaphore(self.num_in_flight)
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        connector = aiohttp.TCPConnector(limit=self.num_in_flight)
        async with aiohttp.ClientSession(connector=connector, timeout=timeout) as session:
            return await asyncio.gather(
                *(
                    asked(session=session, sem=turns, messages=[request], ctxlens=[length], **kwargs)
                    for request, length in zip(requests, ctxlens or [0] * len(requests), strict=True)
                )
            )

    @staticmethod
    def parse_generations(outputs: Any, **kwargs: Any) -> list[str]:
        """Each choice whole, as JSON: lm-eval carries texts, and would keep the text alone."""
        return [json.dumps(choice) for choice in outputs["choices"]]


class _Completions(_Api, LocalCompletionsAPI):
    """lm-eval's completions."""


class _Chat(_Api, LocalChatCompletion):
    """lm-eval's chat completions."""


def _may_pass(error: BaseException) -> bool:
    """Whether the same request may be answered next time."""
    if isinstance(error, aiohttp.ClientResponseError):
        return error.status >= 500 or error.status in PASSING_STATUSES
    return isinstance(error, aiohttp.ClientError | TimeoutError)


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
        UpstreamError: a request was refused, or failed three times.
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
        except (aiohttp.ClientError, TimeoutError) as error:
            tries = f"failed {NUM_TRIES} times" if _may_pass(error) else "refused a request"
            raise UpstreamError(f"task {task}: {endpoint.url} {tries}: {error or 'no answer in time'}") from error
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
    choices = _generated(model, items[0].task, [item.prompt for item in items], until=["\n"])
    return [
        _result(
            item,
            choice["text"].split("\n")[0].strip() == item.gold,
            answer=choice["text"],
            finish_reason=choice["finish_reason"],
        )
        for item, choice in zip(items, choices, strict=True)
    ]


def _checks(items: Sequence[Item], endpoint: Endpoint, seed: int) -> list[ItemResult]:
    model = _model(_Chat, endpoint, seed, "chat/completions", tokenizer_backend=None)
    chats = [JsonChatStr(json.dumps([{"role": "user", "content": item.prompt}])) for item in items]
    choices = _generated(model, items[0].task, chats, until=[])
    texts = [choice["message"]["content"] or "" for choice in choices]
    return [
        _result(item, holds(item.gold, text), answer=text, finish_reason=choice["finish_reason"])
        for item, text, choice in zip(items, texts, choices, strict=True)
    ]


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


def _generated(model: TemplateAPI, task: str, prompts: Sequence[Any], until: list[str]) -> list[dict[str, Any]]:
    """The choice that answers each prompt."""
    settings = {"until": until, "max_gen_toks": MAX_NEW_TOKENS[task], "temperature": 0}
    asked = [Instance("generate_until", {}, (prompt, settings), index) for index, prompt in enumerate(prompts)]
    return [json.loads(choice) for choice in model.generate_until(asked, disable_tqdm=True)]


def _model(kind: type[_Api], endpoint: Endpoint, seed: int, path: str, *, tokenizer_backend: str | None) -> Any:
    model: Any = kind(
        model=endpoint.model,
        base_url=f"{endpoint.url}/v1/{path}",
        tokenizer=str(endpoint.tokenizer) if tokenizer_backend else None,
        tokenizer_backend=tokenizer_backend,
        tokenized_requests=tokenizer_backend is not None,
        # With one at a time lm-eval goes a way of its own, with another client and a progress bar.
        num_concurrent=max(2, endpoint.concurrency),
        max_length=MAX_PROMPT_TOKENS,
        seed=seed,
        # lm-eval takes an empty dict for none and then sends a key of the environment's.
        header=endpoint.headers() or {"Accept": "application/json"},
    )
    model.num_in_flight = endpoint.concurrency
    return model
