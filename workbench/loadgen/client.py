"""Sends one request and keeps the answer as it came; nothing is parsed here."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from enum import StrEnum
from time import perf_counter
from typing import Any

import orjson

from serving.core.errors import ErrorCode
from serving.core.state import Task, Tier
from serving.engine.client import ConnectFailed, ConnectionLost, EngineClient, EngineResponse
from serving.gateway.request import ENGINE_PRIORITIES, TIERS
from workbench.loadgen.answers import RawAnswer
from workbench.loadgen.prompts import Prompt
from workbench.loadgen.records import FailureKind, TokenSource
from workbench.loadgen.vocabulary import WorkloadError


class TargetKind(StrEnum):
    """Who answers: an engine takes vLLM's extras, a gateway may refuse them."""

    ENGINE = "engine"
    GATEWAY = "gateway"


@dataclass(frozen=True, slots=True)
class Target:
    """Where requests go.

    Attributes:
        base_url: scheme, host, port; without `/v1`.
        model: the name to send.
        task: generate or embed.
        kind: engine or gateway.
        replica_id: of the engine, for the report.
        api_key: becomes a bearer token.
        takes_extras: whether vLLM's extras (ignore_eos, return_token_ids, cache_salt) are sent; by default to
            engines only. Without them an output may end early, and that is then no failure.
    """

    base_url: str
    model: str
    task: Task = Task.GENERATE
    kind: TargetKind = TargetKind.ENGINE
    replica_id: str | None = None
    api_key: str | None = None
    takes_extras: bool | None = None

    @property
    def has_extras(self) -> bool:
        """Whether vLLM's extras are sent."""
        return self.kind is TargetKind.ENGINE if self.takes_extras is None else self.takes_extras


def encode_request(
    target: Target, prompt: Prompt, *, cache_salt: str | None, count_by: TokenSource
) -> tuple[str, bytes]:
    """Path and body of the request.

    Args:
        target: who gets it.
        prompt: its input, and the output to ask for.
        cache_salt: keeps the prefix cache of one cell from another's; an extra of vLLM.
        count_by: what the server is asked to count tokens by; token ids need a target with extras.

    Raises:
        WorkloadError: the prompt asks for what the target cannot be asked for.
    """
    body: dict[str, Any] = {**prompt.extra, "model": _model(target, prompt), **_priority(target, prompt)}
    if cache_salt is not None and target.has_extras:
        body["cache_salt"] = cache_salt
    if target.task is Task.EMBED:
        return "/v1/embeddings", orjson.dumps(body | {"input": prompt.token_ids or prompt.text})
    body |= {"max_tokens": prompt.num_output_tokens, "stream": True}
    body.setdefault("temperature", 0.0)
    body["stream_options"] = {"include_usage": True}
    if count_by is TokenSource.CONTINUOUS_USAGE:
        body["stream_options"]["continuous_usage_stats"] = True
    if target.has_extras:
        body["ignore_eos"] = not prompt.may_stop
        body["return_token_ids"] = count_by is TokenSource.TOKEN_IDS
    if prompt.messages is not None:
        return "/v1/chat/completions", orjson.dumps(body | {"messages": prompt.messages})
    return "/v1/completions", orjson.dumps(body | {"prompt": prompt.token_ids or prompt.text})


def _model(target: Target, prompt: Prompt) -> str:
    """A gateway takes `model+adapter`; an engine serves an adapter under its own name."""
    if prompt.adapter is None:
        return target.model
    return f"{target.model}+{prompt.adapter}" if target.kind is TargetKind.GATEWAY else prompt.adapter


def _priority(target: Target, prompt: Prompt) -> dict[str, Any]:
    """A gateway is asked by service tier, an engine by the priority that our gateway would give it."""
    if prompt.tier is None:
        return {}
    tier = TIERS.get(prompt.tier) or Tier.__members__.get(prompt.tier.upper())  # usage events name it by the latter
    if tier is None:
        raise WorkloadError(f"tier {prompt.tier!r} is unknown; known are {', '.join(TIERS)}")
    if target.kind is TargetKind.GATEWAY or not target.has_extras:
        return {"service_tier": next(name for name, own in TIERS.items() if own is tier)}
    return {"priority": ENGINE_PRIORITIES[tier]}


def encode_headers(target: Target, request_id: str, session_id: str | None = None) -> list[tuple[bytes, bytes]]:
    """Headers of the request; a gateway keeps the requests of a session together."""
    headers = [(b"content-type", b"application/json"), (b"x-request-id", request_id.encode("ascii"))]
    if session_id is not None:
        headers.append((b"x-session-id", session_id.encode("utf-8")))
    if target.api_key is not None:
        headers.append((b"authorization", b"Bearer " + target.api_key.encode("ascii")))
    return headers


async def fetch(
    client: EngineClient, path: str, headers: list[tuple[bytes, bytes]], body: bytes, *, timeout_s: float
) -> RawAnswer:
    """Sends the request and waits for its end, at most `timeout_s`.

    Every failure is in the answer; cancelling gives an answer that was cut off, with what had come, and is
    not passed on: the runner cancels for no other reason.
    """
    called_at_s = perf_counter()
    response: EngineResponse | None = None
    chunks: list[tuple[float, bytes]] = []
    failure, detail = None, None
    try:
        response = await client.request("POST", path, headers=headers, body=body, timeout_s=timeout_s)
        # Stamped and kept right in the socket's callback: waking a task for each token would take as long again.
        response.forward(lambda at_s, data: chunks.append((at_s, data)), lambda _: None)
        await response.ended()
    except ConnectFailed as error:
        failure, detail = FailureKind.CONNECT, error.message
        error.with_traceback(None)  # whose frames hold the error: a cycle, which only a full collection would find
    except ConnectionLost as error:
        is_late = error.code is ErrorCode.UPSTREAM_TIMEOUT
        failure, detail = FailureKind.TIMEOUT if is_late else FailureKind.LOST, error.message
        error.with_traceback(None)
    except asyncio.CancelledError:
        failure, detail = FailureKind.CUT_OFF, "still running when the run had to end"
        if response is not None:
            response.abort()
    if response is None:
        return RawAnswer(called_at_s, perf_counter(), failure=failure, detail=detail)
    served_by = response.headers.get(b"x-served-by")
    return RawAnswer(
        sent_at_s=response.sent_at_s,
        ended_at_s=perf_counter(),
        head_at_s=response.head_at_s,
        status=response.status,
        served_by=None if served_by is None else served_by.decode("latin-1"),
        chunks=chunks,
        failure=failure,
        detail=detail,
    )
