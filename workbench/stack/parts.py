"""The stack's own servers as child processes: gateway workers and the control plane."""

from __future__ import annotations

import asyncio
import json
import os
import secrets
import sys
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from pathlib import Path

from serving.core.errors import ServingError
from serving.core.tenancy import AuthMode
from serving.engine.client import EngineClient
from workbench.config import WorkbenchConfig
from workbench.mlflow_accounts import ADMIN, Account
from workbench.mlflow_server import ServerAuth, mlflow_server
from workbench.stack.service import Service, ServiceFailed
from workbench.stack.slots import Slot
from workbench.wiring import Layout, service_account_of


def url_host(host: str) -> str:
    """The host that a client on this machine uses for a listening address."""
    if host in ("0.0.0.0", "::", ""):
        return "127.0.0.1"
    return f"[{host}]" if ":" in host else host


def gateway_workers(config: WorkbenchConfig, layout: Layout, store_url: str) -> list[Service]:
    """The gateway's worker processes; they share one port, and each says itself when it serves."""
    env = {
        "WORKBENCH_GATEWAY_HOST": config.gateway.host,
        "WORKBENCH_GATEWAY_PORT": str(config.gateway.port),
        "WORKBENCH_GATEWAY_REDIS_URL": store_url,
        "WORKBENCH_GATEWAY_ROUTING_TABLE_PATH": str(layout.routing_table_path),
        "WORKBENCH_GATEWAY_AUTH": (config.gateway.auth or AuthMode.OPEN).value,
        "WORKBENCH_GATEWAY_TENANTS_PATH": str(layout.tenants_path),
        "WORKBENCH_GATEWAY_AUTH_MAX_STALENESS_S": str(config.gateway.auth_max_staleness_s),
        "WORKBENCH_GATEWAY_MAX_BODY_BYTES": str(config.gateway.max_body_bytes),
        "WORKBENCH_GATEWAY_NUM_WORKERS": str(config.gateway.workers),
        "WORKBENCH_GATEWAY_CORS_ORIGINS": json.dumps(config.gateway.cors_origins),
        "WORKBENCH_GATEWAY_SSE_KEEP_ALIVE_S": str(config.gateway.sse_keep_alive_s),
        "WORKBENCH_GATEWAY_WRITE_TIMEOUT_S": str(config.gateway.write_timeout_s),
        "WORKBENCH_GATEWAY_UPSTREAM_TIMEOUT_S": str(config.gateway.upstream_timeout_s),
        "WORKBENCH_GATEWAY_DRAIN_TIMEOUT_S": str(config.gateway.drain_timeout_s),
        "WORKBENCH_GATEWAY_DEFAULT_OUTPUT_TOKENS": str(config.gateway.default_output_tokens),
        "WORKBENCH_GATEWAY_DECISION_LOG_FRAC": str(config.gateway.decision_log_frac),
        "WORKBENCH_GATEWAY_GUARDRAILS": config.gateway.guardrails.model_dump_json(),
        "WORKBENCH_GATEWAY_USAGE_DIR": str(layout.usage_dir),
        "WORKBENCH_GATEWAY_ACCESS_LOG": config.gateway.access_log,
        "WORKBENCH_GATEWAY_METRICS_DIR": str(layout.metrics_dir),
        "WORKBENCH_GATEWAY_DECISION_LOG_PATH": str(layout.decisions_dir),
        "WORKBENCH_GATEWAY_CACHE_SALT_SECRET": kept_secret(layout.secrets_dir / "cache-salt"),
        "WORKBENCH_GATEWAY_REPLAY_SECRET": kept_secret(layout.secrets_dir / "replays"),
    }
    return [
        Service(
            f"gateway-{number}",
            [sys.executable, "-m", "serving.gateway"],
            layout.log_dir / f"gateway-{number}.log",
            slot=Slot(config.gateway.host, config.gateway.port),
            env=env,
            stop_timeout_s=config.gateway.drain_timeout_s + 5.0,
        )
        for number in range(config.gateway.workers)
    ]


def control_plane(config: WorkbenchConfig, layout: Layout, store_url: str, mlflow_uri: str) -> Service:
    """The one that composes and publishes the routing table."""
    env = {
        "WORKBENCH_CONTROL_REDIS_URL": store_url,
        "WORKBENCH_CONTROL_MLFLOW_TRACKING_URI": mlflow_uri,
        "WORKBENCH_CONTROL_ROUTING_TABLE_PATH": str(layout.routing_table_path),
        "WORKBENCH_CONTROL_COST_TABLE_PATH": str(layout.cost_table_path),
        "WORKBENCH_CONTROL_TENANTS_PATH": str(layout.tenants_path),
        "WORKBENCH_CONTROL_DECISION_LOG_PATH": str(layout.decisions_dir),
        "WORKBENCH_CONTROL_ROUTING": json.dumps(config.routing.model_dump()),
        "WORKBENCH_CONTROL_RELEASES": json.dumps(asdict(config.releases.policy())),
        "WORKBENCH_CONTROL_RELEASES_PATH": str(layout.releases_path),
        "WORKBENCH_CONTROL_METRICS_DIR": str(layout.metrics_dir),
    }
    if config.releases.webhook is not None:
        env["WORKBENCH_CONTROL_RELEASE_WEBHOOK"] = config.releases.webhook.get_secret_value()
    account = service_account_of(config)
    if account is not None:
        env |= account.env
    return Service(
        "control",
        [sys.executable, "-m", "serving.control"],
        layout.log_dir / "control.log",
        ready=_at_once,
        env=env,
    )


def mlflow(config: WorkbenchConfig, layout: Layout) -> Service:
    """The stack's own MLflow server.

    Raises:
        ServiceFailed: it asks who somebody is, and nobody has an account yet.
    """
    if config.mlflow.auth is not AuthMode.REQUIRED:
        return mlflow_server(layout.mlflow_dir, config.mlflow.port)
    if service_account_of(config) is None:
        raise ServiceFailed("mlflow.auth is 'required' and no account was made yet: workbench mlflow init-auth")
    return mlflow_server(layout.mlflow_dir, config.mlflow.port, auth=mlflow_auth(layout))


def mlflow_auth(layout: Layout) -> ServerAuth:
    """Admin and key of the stack's own MLflow server, made once. Raises OSError where they can't be kept."""
    admin = Account(ADMIN, kept_secret(layout.secrets_dir / "mlflow-admin"))
    return ServerAuth(admin, kept_secret(layout.secrets_dir / "mlflow-forms"))


def kept_secret(path: Path) -> str:
    """A secret made once and kept where only its owner reads it.

    Raises:
        OSError: it cannot be written.
    """
    if path.exists() and (kept := path.read_text("utf-8").strip()):
        return kept
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    # In one step: a full disk must not leave an empty secret that a later start takes for one.
    temporary = path.with_suffix(".tmp")
    temporary.unlink(missing_ok=True)
    secret = secrets.token_hex(32)
    with os.fdopen(os.open(temporary, os.O_CREAT | os.O_WRONLY | os.O_EXCL, 0o600), "w") as file:
        file.write(secret)
    temporary.replace(path)
    return secret


def answers(url: str, path: str) -> Callable[[], Awaitable[bool]]:
    """A question for `Service`: does this address answer with success?"""

    async def ask() -> bool:
        client = EngineClient(url, connect_timeout_s=1.0)
        try:
            response = await client.request("GET", path, timeout_s=2.0)
            await response.read()
            return 200 <= response.status < 300
        except ServingError:
            return False
        finally:
            await client.close()

    return ask


async def _at_once() -> bool:
    await asyncio.sleep(0.2)
    return True
