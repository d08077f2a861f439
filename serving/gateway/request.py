"""From a parsed body to a checked call: what the router reads and what the engine gets.

    asked()   which model, version and tier: all that authorization needs
    build()   the call; the fields that we read are checked, those that isolate tenants are ours

Everything that we don't read passes through; the engine's own refusals are relayed.
"""

from __future__ import annotations

import hashlib
import hmac
import re
from collections.abc import Sequence
from enum import StrEnum
from typing import Any

from serving.core.errors import BadRequest, NotFound, Unavailable
from serving.core.fleet import Fleet
from serving.core.state import RequestView, Task, Tier
from serving.core.tenancy import Principal, Tenant, authorize
from serving.core.values import value
from serving.gateway.body import count, encode, optional
from serving.gateway.sessions import Sessions, Trial


class Endpoint(StrEnum):
    """The engine's routes that a request may go to; the value is the path there."""

    task: Task | None
    """What a pool must do to serve it; None when any does."""
    can_stream: bool
    """Whether an answer may come as events."""
    sends_chunks: bool
    """Whether its events are chunks with choices; those of responses are of many types."""

    def __new__(cls, path: str, task: Task | None) -> Endpoint:
        """A route and what it needs, each looked at several times a request."""
        member = str.__new__(cls, path)
        member._value_ = path
        member.task = task
        member.can_stream = task is Task.GENERATE
        member.sends_chunks = path != "/v1/responses"
        return member

    CHAT = "/v1/chat/completions", Task.GENERATE
    COMPLETIONS = "/v1/completions", Task.GENERATE
    EMBEDDINGS = "/v1/embeddings", Task.EMBED
    RESPONSES = "/v1/responses", Task.GENERATE
    TOKENIZE = "/tokenize", None


TIERS = {
    "priority": Tier.INTERACTIVE,
    "default": Tier.DEFAULT,
    "auto": Tier.DEFAULT,
    "flex": Tier.BATCH,
}
# vLLM serves the lowest number first. The default is its default, so that it is also right without priority scheduling.
ENGINE_PRIORITIES = {Tier.INTERACTIVE: -1, Tier.DEFAULT: 0, Tier.BATCH: 1}

REFUSED_FIELDS = frozenset({"priority", "kv_transfer_params", "ec_transfer_params", "vllm_xargs"})
"""Fields with which a client could reach into the engine past the gateway."""

TOKENS_PER_MESSAGE = 4
"""What a chat template adds around a message, about."""

_NAME = r"[a-z0-9._-]+"
_REFERENCE = re.compile(rf"(?P<name>{_NAME})(?:@(?P<version>{_NAME}))?(?:\+(?P<adapter>{_NAME}(?:@{_NAME})?))?")
_MAX_KEPT_REFERENCES = 1024
_MAX_KEPT_SALTS = 10_000
_MAX_KEPT_GRANTS = 4096


Reference = tuple[str, str | None, str | None]
"""Name, version and adapter of a model as a request names it."""


@value
class Asked:
    """What a request asks for, as far as grants speak of it."""

    model: str
    version: str | None
    tier: Tier
    adapter: str | None = None


@value
class Call:
    """A checked request: what the router reads and what the engine gets.

    `max_output_tokens` is the client's bound on one choice, None where it gave none. `timeout_s` is its deadline,
    counted from its arrival; None without one. `trial` is what a running rollout is told of it; None outside of one.
    `traceparent` ties the engine's spans to the client's (W3C Trace Context).
    """

    endpoint: Endpoint
    view: RequestView
    body: bytes
    stream: bool
    wants_usage: bool
    num_choices: int = 1
    max_output_tokens: int | None = None
    timeout_s: float | None = None
    trial: Trial | None = None
    traceparent: bytes | None = None


class CacheSalts:
    """What keeps tenants apart in the engines' prefix caches: an HMAC of the tenant or of its sharing group."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        self._known: dict[str, str] = {}

    def of(self, tenant: Tenant) -> str:
        """The tenant's `cache_salt`."""
        group = tenant.cache_group
        salt = self._known.get(group)
        if salt is None:
            if len(self._known) >= _MAX_KEPT_SALTS:
                self._known.clear()
            salt = self._known[group] = hmac.new(self._secret, group.encode(), hashlib.sha256).hexdigest()
        return salt


class CallBuilder:
    """Checks the few fields that we read and writes the engine's body."""

    def __init__(self, fleet: Fleet, salts: CacheSalts, sessions: Sessions, default_output_tokens: int) -> None:
        self._fleet = fleet
        self._sessions = sessions
        self._salts = salts
        self._default_output_tokens = default_output_tokens
        self._references: dict[str, Reference] = {}
        # What a principal was found to be granted: the same for its next request under the same table.
        self._granted: dict[tuple[int, str, str | None], tuple[Principal, Asked]] = {}
        self._epoch: int | None = None

    def asked(self, body: dict[str, Any], principal: Principal) -> Asked:
        """Which model and tier the body asks for, when its sender may.

        Raises:
            BadRequest: the model or the tier is missing or of a wrong kind.
            NotFound: no such model, or it is not granted.
            Forbidden: another grant is missing.
        """
        reference, wanted_tier = body.get("model"), body.get("service_tier")
        if not isinstance(reference, str) or not reference:
            raise BadRequest(
                "'model' is required: a name such as smollm2-135m, name@version or name+adapter", param="model"
            )
        table = self._fleet.table
        if table is None or table.epoch != self._epoch:
            self._heed_table()
        key = id(principal), reference, wanted_tier if isinstance(wanted_tier, str) else None
        known = self._granted.get(key)
        if known is not None and key[2] is wanted_tier:
            return known[1]
        name, version, adapter = self.resolve(reference, principal)
        tier = _tier(body)
        authorize(principal, name, tier, adapter=adapter)
        asked = Asked(name, version, tier, adapter)
        if len(self._granted) >= _MAX_KEPT_GRANTS:
            self._granted.clear()
        self._granted[key] = principal, asked  # held, so that its id stays its own
        return asked

    def build(
        self,
        endpoint: Endpoint,
        request_id: str,
        asked: Asked,
        body: dict[str, Any],
        tenant: Tenant,
        timeout_s: float | None = None,
        target_replica: str | None = None,
        session: bytes | None = None,
        traceparent: bytes | None = None,
    ) -> Call:
        """The call of `body`, which is changed in place. The version is settled here, for all tries.

        `target_replica` is the only one that may serve it, `session` the client's name for the conversation.

        Raises:
            BadRequest: names the field at fault.
            NotFound: no such model; names those that there are.
        """
        if not REFUSED_FIELDS.isdisjoint(body):
            _refuse_fields(body)
        stream = endpoint.can_stream and optional(body, "stream", bool, "true or false") is True
        wants_usage = False
        if endpoint is Endpoint.RESPONSES:
            _keep_nothing(body)
        elif stream:
            wants_usage = _ask_for_usage(body)
        model = self._fleet.model(asked.model)
        num_prompt_tokens, num_prompts = _prompt(endpoint, model.tokens_per_byte, body)
        num_choices = num_prompts * (count(body, "n", at_least=1) or 1) if "n" in body else num_prompts
        limit = _max_output_tokens(endpoint, body)
        version, trial = asked.version, None
        if version is None and model.split is None:
            version = model.champion
        elif version is None and model.split is not None:
            trial = self._sessions.trial(model.split, session, body, tenant.tenant_id)
            version = self._fleet.version_of(asked.model, tenant.regions, trial.place, asked.adapter)
        view = RequestView(
            request_id,
            asked.model,
            version,
            endpoint.task or model.task,
            0 if endpoint is Endpoint.TOKENIZE else num_prompt_tokens,
            num_choices * (self._default_output_tokens if limit is None else limit),
            asked.tier,
            tenant.regions,
            target_replica,
            asked.adapter,
        )
        body["model"] = asked.adapter or asked.model  # an engine knows its adapters by names beside its model's
        body.pop("service_tier", None)
        body.pop("request_id", None)
        if endpoint is not Endpoint.TOKENIZE:
            body["cache_salt"] = self._salts.of(tenant)
            if asked.tier is not Tier.DEFAULT:
                body["priority"] = ENGINE_PRIORITIES[asked.tier]
        return Call(
            endpoint, view, encode(body), stream, wants_usage, num_choices, limit, timeout_s, trial, traceparent
        )

    def resolve(self, reference: str, principal: Principal) -> Reference:
        """The parts of `name[@version][+adapter]`.

        Raises:
            NotFound: there is none, or none that the principal may use: the same words, naming those that it may.
            Unavailable: this worker has no routing table yet.
        """
        self._heed_table()
        found = self._references.get(reference) or self._resolved(reference)
        if found is None or not principal.may_use(found[0]):
            raise NotFound(f"no model {reference!r}; there are: {self._usable(reference, principal)}", param="model")
        if found[2] is not None:
            usable = self.adapters(found[0], found[1], principal)
            if found[2] not in usable:
                base = reference.partition("+")[0]
                names = ", ".join(f"{base}+{adapter}" for adapter in usable) or "none"
                raise NotFound(f"no adapter {found[2]!r} of {base}; there are: {names}", param="model")
        return found

    def adapters(self, name: str, version: str | None, principal: Principal) -> Sequence[str]:
        """Names of the model's adapters that the principal may use; `version` as in `Fleet.adapters_of`."""
        return [one for one in self._fleet.adapters_of(name, version) if principal.may_use_adapter(one)]

    def _heed_table(self) -> None:
        """What was found in another routing table is forgotten. Raises Unavailable when there is none yet."""
        table = self._fleet.table
        if table is None:
            raise Unavailable("no routing table yet: the control plane has published none", retry_after_s=1.0)
        if table.epoch != self._epoch:
            self._references.clear()
            self._granted.clear()
            self._epoch = table.epoch

    def _resolved(self, reference: str) -> Reference | None:
        match = _REFERENCE.fullmatch(reference)
        model = None if match is None else next((m for m in self._fleet.models if m.name == match["name"]), None)
        if match is None or model is None or match["version"] not in (None, *model.versions):
            return None
        found = model.name, match["version"], match["adapter"]
        if len(self._references) < _MAX_KEPT_REFERENCES:
            self._references[reference] = found
        return found

    def _usable(self, reference: str, principal: Principal) -> str:
        """The versions of a model that is granted, else the models that are."""
        usable = [model for model in self._fleet.models if principal.may_use(model.name)]
        for model in usable:
            if reference.startswith(f"{model.name}@"):
                return ", ".join(f"{model.name}@{version}" for version in model.versions) or "none"
        return ", ".join(model.name for model in usable) or "none"


def _refuse_fields(body: dict[str, Any]) -> None:
    """Refuses what is set by the gateway; null says nothing and stays."""
    for name in body:
        if name in REFUSED_FIELDS and body[name] is not None:
            raise BadRequest(f"{name!r} is set by the gateway; leave it out", param=name)


def _prompt(endpoint: Endpoint, tokens_per_byte: float, body: dict[str, Any]) -> tuple[int, int]:
    """Estimated tokens of the prompt or prompts, and how many prompts there are."""
    if endpoint is Endpoint.CHAT or (endpoint is Endpoint.TOKENIZE and "messages" in body):
        messages = body.get("messages")
        num_bytes = _messages_bytes(messages)
        if body.get("tools"):
            num_bytes += len(encode(body["tools"]))
        return int(num_bytes * tokens_per_byte) + TOKENS_PER_MESSAGE * len(messages or ()) + 1, 1
    if endpoint is Endpoint.RESPONSES:
        return int(_input_bytes(body) * tokens_per_byte) + 1, 1
    field = "input" if endpoint is Endpoint.EMBEDDINGS else "prompt"
    prompts = _prompts(body.get(field), field)
    num_tokens = sum(
        int(_text_bytes(prompt) * tokens_per_byte) + 1 if isinstance(prompt, str) else len(prompt) for prompt in prompts
    )
    return num_tokens, len(prompts)


def _max_output_tokens(endpoint: Endpoint, body: dict[str, Any]) -> int | None:
    if not endpoint.can_stream:
        return 0
    limit = None
    if endpoint is Endpoint.CHAT and "max_completion_tokens" in body:
        limit = count(body, "max_completion_tokens", at_least=1)
    elif endpoint is Endpoint.RESPONSES:
        limit = count(body, "max_output_tokens", at_least=1)
    return count(body, "max_tokens", at_least=0) if limit is None else limit


def _tier(body: dict[str, Any]) -> Tier:
    value = body.get("service_tier")
    if value is None:
        return Tier.DEFAULT
    if not isinstance(value, str) or value not in TIERS:
        raise BadRequest(f"'service_tier' must be one of {', '.join(TIERS)}", param="service_tier")
    return TIERS[value]


def _ask_for_usage(body: dict[str, Any]) -> bool:
    """Has the engine report usage; True when the client asked for it too."""
    options = optional(body, "stream_options", dict, "an object") or {}
    asked = options.get("include_usage") is True
    body["stream_options"] = {**options, "include_usage": True}
    return asked


def _keep_nothing(body: dict[str, Any]) -> None:
    """Replicas share no memory of earlier responses: what asks for it is refused, and nothing is kept."""
    for name in ("previous_response_id", "background", "conversation"):
        if body.get(name):
            raise BadRequest(f"{name!r} is not supported: no response is kept here; send the whole input", param=name)
    if body.get("store"):
        raise BadRequest("'store' must be false: no response is kept here", param="store")
    body["store"] = False


def _input_bytes(body: dict[str, Any]) -> int:
    """Bytes of the input of a response: a text, or a list of messages and other items."""
    value = body.get("input")
    if isinstance(value, str):
        return _text_bytes(value)
    if not isinstance(value, list) or not value:
        raise BadRequest("'input' is required: a text or a list of items", param="input")
    return len(encode(value)) + len(encode(body.get("tools") or []))


def _messages_bytes(messages: object) -> int:
    if not isinstance(messages, list) or not messages:
        raise BadRequest("'messages' is required: a list of at least one message", param="messages")
    num_bytes = 0
    for position, message in enumerate(messages):
        if not isinstance(message, dict):
            raise BadRequest("each of 'messages' must be an object", param=f"messages.{position}")
        content = message.get("content")
        if isinstance(content, str):
            num_bytes += _text_bytes(content)
        elif isinstance(content, list):
            texts = (part.get("text") for part in content if isinstance(part, dict))
            num_bytes += sum(_text_bytes(text) for text in texts if isinstance(text, str))
    return num_bytes


def _prompts(value: object, field: str) -> list[str | list[int]]:
    """One or more prompts, each text or token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if all(type(item) is int for item in value):
            return [value]
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and item and all(type(i) is int for i in item) for item in value):
            return value
    raise BadRequest(
        f"{field!r} is required: a text, a list of texts, a list of token ids or a list of such lists", param=field
    )


def _text_bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode("utf-8", "replace"))
