"""Whom an evaluation asks, and whether it answers."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import orjson

from serving.engine.client import EngineClient, UnexpectedStatus

CONCURRENCY = 8
SERVICE_TIER = "flex"
CHECK_TIMEOUT_S = 60.0


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


async def check(endpoint: Endpoint) -> None:
    """Asks for one token, so that a refusal is told once, in the gateway's words, with what to do about it.

    Raises:
        UpstreamError: it refuses, or does not answer.
    """
    headers = [(name.encode(), value.encode()) for name, value in endpoint.headers().items()]
    body = {"model": endpoint.model, "prompt": "Hello", "max_tokens": 1, "service_tier": SERVICE_TIER}
    async with (
        EngineClient(endpoint.url) as client,
        await client.request(
            "POST",
            "/v1/completions",
            headers=[*headers, (b"content-type", b"application/json")],
            body=orjson.dumps(body),
            timeout_s=CHECK_TIMEOUT_S,
        ) as response,
    ):
        answer = (await response.read())[:300].decode("utf-8", "replace")
    if response.status != 200:
        raise UnexpectedStatus(
            f"the gateway answered {response.status}: {answer}{_remedy(response.status, endpoint)}",
            engine_status=response.status,
            body=answer.encode(),
        )


def _remedy(status: int, endpoint: Endpoint) -> str:
    """What to do about a refusal; nothing where the answer says it itself."""
    if status == 401 and endpoint.api_key is None:
        return ". Name the environment variable that holds a key with --api-key-env (from Python: api_key)"
    if status == 401:
        return ". This key is unknown, or was revoked: `workbench keys list TENANT` shows those there are"
    if status == 403 and endpoint.replica is not None:
        return ". To choose a replica takes a key with the scope admin (`workbench keys create TENANT --scope admin`)"
    if status == 403:
        return ". Evaluations are flex traffic: the key's tenant needs this model and the tier flex"
    if status == 429:
        return ". The key's limits are used up: wait, or give its tenant more with `workbench tenants update`"
    return ""
