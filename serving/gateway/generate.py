"""`POST /v1/generate`, our own API: one request shape for text and messages, one answer with its usage and price.

    {model, version?, text | messages, …, tier?, stream?}  ──▶ the engine's completions or chat completions
    {text, finish_reason, usage}  ◀── the engine's answer;  a stream: {text} …, {finish_reason, usage}, [DONE]

It is the same path through the gateway as OpenAI's routes: only the body on its way in and the answer on its way
out are turned into the other shape.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import orjson

from serving.core.errors import BadRequest
from serving.core.state import Tier
from serving.engine.sse import DONE, EventSplitter, payload
from serving.gateway.http_errors import Headers
from serving.gateway.relay import Writer

# Passed on under the same name; everything else is refused, so that a typing error is no silent default.
CONTROLS = (
    *("max_tokens", "temperature", "top_p", "top_k", "min_p", "stop", "seed", "stream"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty"),
)
_OWN = ("model", "version", "adapter", "text", "messages", "tier")
_SERVICE_TIERS = {Tier.INTERACTIVE: "priority", Tier.DEFAULT: "default", Tier.BATCH: "flex"}

Describe = Callable[[], dict[str, Any]]
"""What the last part of an answer says beside its text: `{model, version, adapter, finish_reason, usage}`."""


def to_openai(body: dict[str, Any]) -> dict[str, Any]:
    """The body of OpenAI's completions (for `text`) or chat completions (for `messages`) that asks for the same.

    Raises:
        BadRequest: a field is unknown, missing or of a wrong type; `param` names it.
    """
    for name in body:
        if name not in CONTROLS and name not in _OWN:
            raise BadRequest(f"/v1/generate has no field {name!r}", param=name)
    if (body.get("text") is None) == (body.get("messages") is None):
        raise BadRequest("give 'text' or 'messages', one of them", param="text")
    turned = {name: body[name] for name in CONTROLS if body.get(name) is not None}
    turned["model"] = _reference(body)
    if body.get("tier") is not None:
        turned["service_tier"] = _service_tier(body["tier"])
    if body.get("messages") is not None:
        turned["messages"] = body["messages"]
        return turned
    if not isinstance(body["text"], str):
        raise BadRequest("'text' must be a text", param="text")
    turned["prompt"] = body["text"]
    return turned


def _reference(body: dict[str, Any]) -> Any:
    """`name[@version][+adapter]` of the three fields."""
    reference = body.get("model")
    for name, separator in (("version", "@"), ("adapter", "+")):
        value = body.get(name)
        if value is None:
            continue
        if not isinstance(value, str) or not isinstance(reference, str):
            raise BadRequest(f"{name!r} must be a text", param=name)
        if separator in reference:
            raise BadRequest(f"{name!r} is given twice: in 'model' too", param=name)
        reference += separator + value
    return reference


def _service_tier(tier: Any) -> str:
    try:
        return _SERVICE_TIERS[Tier(tier)]
    except ValueError:
        raise BadRequest(f"'tier' must be one of {', '.join(Tier)}", param="tier") from None


class GenerateWriter:
    """Turns an engine's answer into ours on its way to the client."""

    def __init__(self, writer: Writer, request_id: str, describe: Describe) -> None:
        self._writer = writer
        self._request_id = request_id
        self._describe = describe
        self._splitter = EventSplitter()

    @property
    def is_started(self) -> bool:
        """See Exchange."""
        return self._writer.is_started

    @property
    def is_paused(self) -> bool:
        """The client does not read."""
        return self._writer.is_paused

    @property
    def on_pause(self) -> Callable[[bool], None] | None:
        """See Exchange."""
        return self._writer.on_pause

    @on_pause.setter
    def on_pause(self, called: Callable[[bool], None] | None) -> None:
        self._writer.on_pause = called

    def start(self, status: int, headers: Headers, data: bytes = b"") -> None:
        """Begins a stream, with the texts in `data`."""
        self._writer.start(status, headers, self._turned(data))

    def write(self, data: bytes) -> None:
        """Sends the texts in `data`."""
        turned = self._turned(data)
        if turned:
            self._writer.write(turned)

    def end(self, data: bytes = b"") -> None:
        """Sends the last texts, and what the answer came to."""
        self._writer.end(self._turned(data))

    def whole(self, status: int, headers: Headers, body: bytes) -> None:
        """Sends a complete answer."""
        choice = orjson.loads(body)["choices"][0]
        answer = {"id": self._request_id, "text": _text(choice), **self._describe()}
        self._writer.whole(status, headers, orjson.dumps(answer))

    def _turned(self, data: bytes) -> bytes:
        return b"".join(self._event(event) for event in self._splitter.feed(data))

    def _event(self, event: bytes) -> bytes:
        content = payload(event)
        if content is None:
            return event
        if content == DONE:
            last = {"id": self._request_id, **self._describe()}
            return b"data: " + orjson.dumps(last) + b"\n\n" + event
        text = "".join(_text(choice) for choice in orjson.loads(content).get("choices") or ())
        return b"data: " + orjson.dumps({"text": text}) + b"\n\n" if text else b""


def _text(choice: dict[str, Any]) -> str:
    part = choice.get("message") or choice.get("delta")
    text = part.get("content") if part is not None else choice.get("text")
    return text or ""
