"""What holds requests of one conversation together: the client's word, else the beginning of the conversation.

X-Session-Id ── else body's prompt_cache_key ── else an HMAC of the first user message, prompt or input

The HMAC's key is shared by the workers: they agree, and nobody can tell the text from the result.
"""

from __future__ import annotations

import hashlib
import hmac
from typing import Any

from serving.core.split import Place, Split, place
from serving.core.values import value
from serving.gateway.body import encode

MAX_SESSION_BYTES = 512


@value
class Trial:
    """A request in a running rollout: its session's place, and an HMAC of what it asks."""

    split: Split
    place: Place
    prompt: str


class Sessions:
    """Names the session of a request."""

    def __init__(self, secret: bytes) -> None:
        """`secret`: equal in all workers, else they send a conversation to different versions."""
        self._secret = secret

    def of(self, header: bytes | None, body: dict[str, Any], tenant_id: str) -> str:
        """The session; unique only together with its tenant.

        Args:
            header: value of X-Session-Id.
            body: of the request, as parsed.
            tenant_id: whose it is; equal texts of two tenants are two sessions.
        """
        if header:
            return f"id:{header[:MAX_SESSION_BYTES].decode('latin-1')}"
        key = body.get("prompt_cache_key")
        if isinstance(key, str) and key:
            return f"cache:{key[:MAX_SESSION_BYTES]}"
        return f"text:{self.fingerprint(tenant_id, _beginning(body))}"

    def trial(self, split: Split, header: bytes | None, body: dict[str, Any], tenant_id: str) -> Trial:
        """What a rollout of the model that is asked for is told of the request. Arguments as those of `of`."""
        session = self.of(header, body, tenant_id)
        asked = body.get("messages", body.get("prompt", body.get("input")))
        return Trial(split, place(split.rollout_id, tenant_id, session), self.fingerprint(tenant_id, asked))

    def fingerprint(self, tenant_id: str, content: object) -> str:
        """An HMAC of content of a tenant, 128 bits."""
        digest = hmac.new(self._secret, tenant_id.encode() + b"\0" + encode({"content": content}), hashlib.sha256)
        return digest.hexdigest()[:32]


def _beginning(body: dict[str, Any]) -> object:
    messages = body.get("messages")
    if isinstance(messages, list):
        said = (message for message in messages if isinstance(message, dict) and message.get("role") == "user")
        return next((message.get("content") for message in said), None)
    return body.get("prompt", body.get("input"))
