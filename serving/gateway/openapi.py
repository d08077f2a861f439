"""The hot routes as OpenAPI shows them: bodies, examples, headers, errors. `openai_routes.py` serves them.

Nothing here is called: requests are checked in `request.py`.
"""

from __future__ import annotations

from typing import Annotated, Any, NoReturn

from fastapi import APIRouter, Body, Security
from fastapi.security import HTTPBearer

from serving.gateway.openai_routes import GENERATE, MODERATIONS
from serving.gateway.openapi_schemas import (
    ChatCompletion,
    ChatCompletionRequest,
    Completion,
    CompletionRequest,
    EmbeddingRequest,
    Embeddings,
    ErrorAnswer,
    GenerateAnswer,
    GenerateRequest,
    Moderation,
    ModerationRequest,
    Response,
    ResponseRequest,
    TokenizeRequest,
    Tokens,
)
from serving.gateway.request import Endpoint

_RETRY_AFTER = {"Retry-After": {"description": "Seconds to wait.", "schema": {"type": "integer", "minimum": 1}}}
_STATUSES: dict[int, str] = {
    400: "The request is wrong: no JSON, a field missing or of a wrong type, larger than a limit, blocked by a "
    "guardrail, or refused by the engine.",
    401: "No API key or token, or one that is not valid.",
    403: "A grant is missing.",
    404: "No such model, version or target replica, or none that you may use; the message names those that you may.",
    409: "The Idempotency-Key was used before, and its answer was not kept.",
    413: "The body is over the limit.",
    422: "The Idempotency-Key was used with another body.",
    429: "A limit of the tenant or of its key is reached, or the engines' queues are full.",
    502: "The engine failed or broke off.",
    503: "No replica serves this model now, or the store is away and the request needs it.",
    504: "The time in X-Request-Timeout-Ms has passed.",
}
ERRORS: dict[int | str, dict[str, Any]] = {
    status: {"model": ErrorAnswer, "description": text, **({"headers": _RETRY_AFTER} if status in (429, 503) else {})}
    for status, text in _STATUSES.items()
}
_RATE_LIMITS = {
    f"x-ratelimit-{what}-{unit}": {"schema": {"type": "string"}}
    for what in ("limit", "remaining", "reset")
    for unit in ("requests", "tokens")
}
_STREAM = {
    "description": "The answer; with `stream`, server-sent events. Headers `x-request-id` and `x-served-by` "
    "(pool; version; table epoch/cost table run), and what is left of the limits.",
    "headers": _RATE_LIMITS,
    "content": {"text/event-stream": {"schema": {"type": "string"}}},
}


def _header(name: str, text: str, **schema: Any) -> dict[str, Any]:
    return {
        "in": "header",
        "name": name,
        "description": text,
        "required": False,
        "schema": {"type": "string", **schema},
    }


_HEADERS = {
    "parameters": [
        _header("Idempotency-Key", "A retry under it joins or repeats the first answer.", pattern="^[!-~]{1,255}$"),
        _header("X-Request-Id", "Comes back as `x-request-id`; else one is made.", maxLength=128),
        _header("X-Target-Replica", "Admins: the one replica that is to serve it, or 404.", pattern="^[!-~]{1,128}$"),
        _header("X-Request-Timeout-Ms", "After so long the engine stops: 504.", pattern="^[0-9]{1,8}$"),
    ]
}
_BEARER = Security(HTTPBearer(auto_error=False, description="An API key, or a token of a trusted issuer."))

router = APIRouter(tags=["OpenAI API"], dependencies=[_BEARER])


@router.post(
    Endpoint.CHAT,
    response_model=ChatCompletion,
    responses={200: _STREAM, **ERRORS},
    openapi_extra=_HEADERS,
    summary="Create a chat completion",
)
async def create_chat_completion(
    body: Annotated[
        ChatCompletionRequest,
        Body(
            openapi_examples={
                "answer": {
                    "value": {
                        "model": "smollm2-135m",
                        "messages": [{"role": "user", "content": "What is the capital city of Japan?"}],
                        "max_tokens": 32,
                    }
                },
                "stream": {
                    "value": {
                        "model": "smollm2-135m",
                        "messages": [{"role": "user", "content": "Count to five."}],
                        "stream": True,
                        "stream_options": {"include_usage": True},
                        "service_tier": "priority",
                    }
                },
            }
        ),
    ],
) -> NoReturn:
    """Continues a conversation. The model needs a chat template; a base model takes /v1/completions."""
    _served_raw()


@router.post(
    Endpoint.COMPLETIONS,
    response_model=Completion,
    responses={200: _STREAM, **ERRORS},
    openapi_extra=_HEADERS,
    summary="Create a completion",
)
async def create_completion(
    body: Annotated[
        CompletionRequest,
        Body(
            openapi_examples={
                "answer": {"value": {"model": "gemma3-270m", "prompt": "The capital of France is", "max_tokens": 16}}
            }
        ),
    ],
) -> NoReturn:
    """Continues a text, or each of several."""
    _served_raw()


@router.post(
    Endpoint.EMBEDDINGS,
    response_model=Embeddings,
    responses=ERRORS,
    openapi_extra=_HEADERS,
    summary="Create embeddings",
)
async def create_embeddings(
    body: Annotated[
        EmbeddingRequest,
        Body(openapi_examples={"two texts": {"value": {"model": "all-minilm-l6-v2", "input": ["a cat", "a dog"]}}}),
    ],
) -> NoReturn:
    """Turns texts into vectors."""
    _served_raw()


@router.post(
    Endpoint.RESPONSES,
    response_model=Response,
    responses={200: _STREAM, **ERRORS},
    openapi_extra=_HEADERS,
    summary="Create a response",
)
async def create_response(
    body: Annotated[
        ResponseRequest,
        Body(openapi_examples={"answer": {"value": {"model": "smollm2-135m", "input": "Say hello.", "store": False}}}),
    ],
) -> NoReturn:
    """Answers an input where the model's engine has this route; else 404."""
    _served_raw()


@router.post(Endpoint.TOKENIZE, response_model=Tokens, responses=ERRORS, openapi_extra=_HEADERS, summary="Count tokens")
async def tokenize(
    body: Annotated[
        TokenizeRequest,
        Body(openapi_examples={"text": {"value": {"model": "smollm2-135m", "prompt": "The capital of France is"}}}),
    ],
) -> NoReturn:
    """The tokens of a text or of messages. Costs no tokens of a limit."""
    _served_raw()


@router.post(MODERATIONS, response_model=Moderation, responses=ERRORS, openapi_extra=_HEADERS, summary="Judge texts")
async def create_moderation(
    body: Annotated[
        ModerationRequest,
        Body(openapi_examples={"two texts": {"value": {"input": ["Mail me at jo@example.org", "a cat"]}}}),
    ],
) -> NoReturn:
    """What the guardrails make of texts; nothing is refused or changed."""
    _served_raw()


@router.post(
    GENERATE,
    tags=["Workbench API"],
    response_model=GenerateAnswer,
    responses={200: _STREAM, **ERRORS},
    openapi_extra=_HEADERS,
    summary="Generate a text",
)
async def generate(
    body: Annotated[
        GenerateRequest,
        Body(
            openapi_examples={
                "text": {"value": {"model": "gemma3-270m", "text": "The capital of France is", "max_tokens": 16}},
                "messages": {
                    "value": {
                        "model": "smollm2-135m",
                        "messages": [{"role": "user", "content": "What is the capital city of Japan?"}],
                        "tier": "interactive",
                        "stream": True,
                    }
                },
            }
        ),
    ],
) -> NoReturn:
    """Continues a text or answers messages; tells tokens and price."""
    _served_raw()


def _served_raw() -> NoReturn:
    raise NotImplementedError("hot routes are answered by HotRoutes before FastAPI sees them")
