"""The gateway's part of the configuration: who may ask, what is looked at, what it keeps."""

from __future__ import annotations

from typing import Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from serving.core.policies.guardrails import GuardrailSettings, OnFailure, mistakes
from serving.core.tenancy import AuthMode
from serving.gateway.guardrails.patterns import BadPattern, custom
from serving.settings import AccessLog, is_loopback, open_to_all
from workbench.config_layers import Port, Strict


class GuardrailsConfig(Strict):
    """Checks of a request's texts before any GPU time; `actions` by check are `allow | flag | block | redact`.

    `toxicity`, `presidio` and `guard_model` are off until an action turns them on: they take milliseconds or more.
    """

    actions: dict[str, str] = Field(default_factory=dict)
    blocklist: tuple[str, ...] = ()
    patterns: dict[str, str] = Field(default_factory=dict)
    max_chars: PositiveInt = 1_000_000
    toxicity_threshold: float = Field(default=0.8, ge=0, le=1)
    presidio_threshold: float = Field(default=0.5, ge=0, le=1)
    presidio_entities: tuple[str, ...] = ()
    guard_model: str | None = None
    off_loop_timeout_s: PositiveFloat = 2.0
    on_failure: OnFailure = OnFailure.CLOSED
    workers: PositiveInt = 1
    max_waiting: PositiveInt = 64

    @model_validator(mode="after")
    def _can_be_kept(self) -> Self:
        found = mistakes(self.settings())
        for name, expression in self.patterns.items():
            try:
                custom(name, expression)
            except BadPattern as error:
                found.append(f"patterns.{error}")
        if found:
            raise ValueError("; ".join(found))
        return self

    def settings(self) -> GuardrailSettings:
        """As the gateway takes it."""
        return GuardrailSettings(**dict(self))


class GatewayConfig(Strict):
    """The endpoint that applications call.

    `auth` says whether a key is required; left out it is open, which only loopback may be without being told.
    `auth_max_staleness_s` is how long workers authenticate by a tenant directory that nobody could confirm.
    `cors_origins` are the web pages (`https://app.example`, or `*`) that may call it from a browser.
    `sse_keep_alive_s`: a stream without a token for so long gets a comment, so that no proxy closes it.
    `write_timeout_s`: a client that leaves its answer unread for so long is cut off.
    `upstream_timeout_s`: an engine that has not completed an answer by then counts as failed.
    `drain_timeout_s`: how long requests in flight may take when a worker ends.
    `default_output_tokens` are reserved for a request that names no bound of its own.
    `access_log` says which requests get a line in the workers' logs: `all`, `errors` or `off`.
    `decision_log_frac`: the share of requests whose routing decision is written down.
    """

    host: str = "127.0.0.1"
    port: Port = 8000
    workers: PositiveInt = 1
    max_body_bytes: PositiveInt = 8 * 1024 * 1024
    auth: AuthMode | None = None
    auth_max_staleness_s: PositiveFloat = 3600.0
    cors_origins: tuple[str, ...] = ()
    sse_keep_alive_s: PositiveFloat = 15.0
    write_timeout_s: PositiveFloat = 60.0
    upstream_timeout_s: PositiveFloat = 600.0
    drain_timeout_s: float = Field(default=30.0, ge=0)
    default_output_tokens: PositiveInt = 256
    access_log: AccessLog = AccessLog.ERRORS
    decision_log_frac: float = Field(default=0.01, ge=0, le=1)
    guardrails: GuardrailsConfig = GuardrailsConfig()

    @model_validator(mode="after")
    def _open_only_where_nobody_else_is(self) -> Self:
        if self.auth is None and not is_loopback(self.host):
            raise ValueError(open_to_all("gateway.host", self.host, "gateway.auth"))
        return self
