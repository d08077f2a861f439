"""What the serving processes read from their environment.

`WORKBENCH_GATEWAY_*` configures a gateway worker, `WORKBENCH_CONTROL_*` the control plane. The stack
sets both from `workbench.yaml`; a process started by hand needs nothing but the environment.
"""

from __future__ import annotations

import difflib
import os
from enum import StrEnum
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Self

from pydantic import Field, SecretStr, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from serving.core.approval import ReleasePolicy
from serving.core.policies.guardrails import GuardrailSettings
from serving.core.policies.idempotency import ReplaySettings
from serving.core.state import RoutingPolicy
from serving.core.tenancy import AuthMode


class UnknownSetting(ValueError):
    """An environment variable with our prefix names no setting: most likely a typing error."""


class _Settings(BaseSettings):
    """Settings that refuse a variable with their prefix that they do not know."""

    model_config = SettingsConfigDict(extra="forbid", frozen=True)

    def __init__(self, **values: Any) -> None:
        refuse_unknown(self.model_config.get("env_prefix", ""), set(type(self).model_fields))
        super().__init__(**values)


def refuse_unknown(prefix: str, fields: set[str]) -> None:
    """Raises UnknownSetting when the environment holds `prefix` + a name that is not in `fields`."""
    known = {f"{prefix}{name}".upper() for name in fields}
    for name in os.environ:
        if not name.upper().startswith(prefix.upper()) or name.upper() in known:
            continue
        nearest = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)
        raise UnknownSetting(f"environment variable {name} is no setting; did you mean {nearest[0]}?")


class AccessLog(StrEnum):
    """Which requests get a line in a worker's log; the usage spool has them all."""

    ALL = "all"
    ERRORS = "errors"
    OFF = "off"


class GatewaySettings(_Settings):
    """One gateway worker. Sizes in bytes, times in seconds.

    Attributes:
        redis_url: the store (`unix:///path` or `redis://host:port`); None runs from the file alone.
        routing_table_path: file copy of the routing table, enough to start from with the store dead.
        auth: `open` (who brings no key is the tenant `default`) or `required`; open without being said only on
            loopback.
        tenants_path: file copy of the tenant directory, enough to authenticate by with the store dead.
        auth_max_staleness_s: how long a directory counts that no source could confirm; after that nobody gets in.
        cache_salt_secret: key of the HMAC that isolates tenants in the engines' prefix caches. All workers
            need the same one to share cached prefixes; None draws one for this process and warns.
        replay_secret: from which the keys are made that seal stored answers; the same one for all workers, else none
            can replay what another stored.
        replays: how answers are kept for retries with an Idempotency-Key (JSON).
        usage_dir: folder of the usage spool, shared by the workers; None writes no usage events.
        access_log: which requests get a line in the log.
        metrics_dir: folder shared by the workers of one port, so that each `/metrics` shows them all.
        decision_log_path: folder of the decision records; None writes none.
        decision_log_frac: share of requests whose routing decision is written.
        drain_timeout_s: how long requests in flight may take to finish after SIGTERM.
        write_timeout_s: how long a client may leave its answer unread before its connection is aborted.
        num_workers: among how many limits are divided while the store is away, until it has told how many there are.
        cors_origins: web pages that may call from a browser (JSON: `["https://app.example"]`, or `["*"]`).
        guardrails: checks of a request's texts (JSON).
        sse_keep_alive_s: a stream without a token for so long gets a comment, so that nobody closes its connection.
        upstream_timeout_s: how long an engine may take to complete an answer before it counts as failed.
    """

    model_config = SettingsConfigDict(env_prefix="WORKBENCH_GATEWAY_", extra="forbid", frozen=True)

    host: str = "127.0.0.1"
    port: int = Field(default=8000, ge=1, le=65535)
    redis_url: str | None = None
    routing_table_path: Path | None = None
    auth: AuthMode | None = None
    tenants_path: Path | None = None
    auth_max_staleness_s: float = Field(default=3600.0, gt=0)
    table_poll_s: float = Field(default=0.5, gt=0, le=1.0)
    report_poll_s: float = Field(default=0.25, gt=0)
    num_workers: int = Field(default=1, ge=1)
    max_body_bytes: int = Field(default=8 * 2**20, ge=1024)
    default_output_tokens: int = Field(default=256, ge=1)
    connect_timeout_s: float = Field(default=2.0, gt=0)
    cors_origins: tuple[str, ...] = ()
    guardrails: GuardrailSettings = GuardrailSettings()
    sse_keep_alive_s: float = Field(default=15.0, gt=0)
    upstream_timeout_s: float = Field(default=600.0, gt=0)
    drain_timeout_s: float = Field(default=30.0, ge=0)
    write_timeout_s: float = Field(default=60.0, gt=0)
    cache_salt_secret: SecretStr | None = None
    replay_secret: SecretStr | None = None
    replays: ReplaySettings = ReplaySettings()
    usage_dir: Path | None = None
    access_log: AccessLog = AccessLog.ERRORS
    metrics_dir: Path | None = None
    decision_log_path: Path | None = None
    decision_log_frac: float = Field(default=0.01, ge=0, le=1)
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")

    @property
    def auth_mode(self) -> AuthMode:
        """As said, or open."""
        return self.auth or AuthMode.OPEN

    @model_validator(mode="after")
    def _open_only_where_nobody_else_is(self) -> Self:
        if self.auth is None and not is_loopback(self.host):
            raise ValueError(open_to_all("host", self.host, "auth"))
        return self


def is_loopback(host: str) -> bool:
    """Whether only this machine reaches a server that listens on `host`."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


def open_to_all(host_key: str, host: str, auth_key: str) -> str:
    """The refusal to listen beyond this machine without a word on who may ask; the keys are named as the user does."""
    return (
        f"{auth_key}: {host_key} {host!r} is not loopback: say {auth_key} 'required', "
        "or 'open' to let everybody in who reaches it"
    )


class ControlSettings(_Settings):
    """The control plane: where it reads from, where it publishes to, and the router's policy.

    Attributes:
        routing_table_path: file copy of the table for workers that start with the store dead.
        cost_table_path: file copy of the published cost table, read when the store is down.
        tenants_path: file copy of the tenant directory; it seeds a store that has none.
        routing: the policy published with the table (JSON in the environment).
        registry_poll_s: seconds between two looks at the model registry.
        decision_log_path: folder of the records of rollouts' decisions; None writes none.
        lease_ttl_s: a control plane that says nothing for so long no longer moves rollouts.
        releases: for how long evidence counts, and freezes (JSON).
        releases_path: file copy of the release book: who is champion, and which evidence was recorded.
        release_webhook: address that alarms and waiting approvals are posted to.
        metrics_dir: folder shared with the gateway's workers, whose page then shows what is counted here.
    """

    model_config = SettingsConfigDict(env_prefix="WORKBENCH_CONTROL_", extra="forbid", frozen=True)

    redis_url: str | None = None
    mlflow_tracking_uri: str | None = None
    routing_table_path: Path | None = None
    cost_table_path: Path | None = None
    tenants_path: Path | None = None
    decision_log_path: Path | None = None
    releases: ReleasePolicy = ReleasePolicy()
    releases_path: Path | None = None
    release_webhook: SecretStr | None = None
    metrics_dir: Path | None = None
    routing: RoutingPolicy = RoutingPolicy()
    compose_poll_s: float = Field(default=0.5, gt=0)
    registry_poll_s: float = Field(default=5.0, gt=0)
    report_max_age_s: float = Field(default=5.0, gt=0)
    lease_ttl_s: float = Field(default=5.0, gt=0)
    log_level: str = Field(default="INFO", pattern="^(DEBUG|INFO|WARNING|ERROR)$")
