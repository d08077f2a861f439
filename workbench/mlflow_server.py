"""The MLflow server that the stack starts where nobody names one: SQLite and a folder of artifacts.

It runs as a child process and is never imported here: MLflow takes seconds to import.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from serving.core.errors import UpstreamError
from serving.engine.client import EngineClient
from workbench.mlflow_accounts import SERVICE, Account
from workbench.stack.service import Service

HEALTH_PATH = "/health"
START_TIMEOUT_S = 240.0
PROBE_TIMEOUT_S = 2.0
# Checking a password takes 0.3 s; one that was changed counts for so long.
AUTH_CACHE_S = 60

SERVER_ENV = {
    # Job execution adds ten processes of 260 MB; nothing here uses it.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}


AUDIT_FILE = "audit.jsonl"


@dataclass(frozen=True, slots=True)
class ServerAuth:
    """With this the server asks who somebody is. `secret_key` signs its forms; both are kept over restarts."""

    admin: Account
    secret_key: str


def mlflow_server(
    data_dir: Path, port: int, *, host: str = "127.0.0.1", num_workers: int = 1, auth: ServerAuth | None = None
) -> Service:
    """An MLflow server that keeps everything below `data_dir`; start and stop it as any part of the stack.

    Args:
        data_dir: holds `mlflow.db`, `artifacts/` and `server.log`; created when missing.
        port: where it listens.
        host: the address that it binds to.
        num_workers: server processes; each takes about 300 MB.
        auth: makes it ask who somebody is; accounts then lie in `auth.db`, and what was written of releases in
            `audit.jsonl`.
    """
    data_dir = data_dir.resolve()
    data_dir.mkdir(parents=True, exist_ok=True)
    command = [
        sys.executable,
        *("-m", "mlflow", "server"),
        *("--host", host, "--port", str(port), "--workers", str(num_workers)),
        *("--backend-store-uri", f"sqlite:///{data_dir / 'mlflow.db'}"),
        *("--artifacts-destination", str(data_dir / "artifacts")),
    ]
    if auth is not None:
        command += ["--app-name", "basic-auth"]
    uri = f"http://{host}:{port}"
    return Service(
        "mlflow",
        command,
        data_dir / "server.log",
        ready=lambda: is_healthy(uri),
        env=SERVER_ENV if auth is None else SERVER_ENV | _auth_env(data_dir, auth),
        start_timeout_s=START_TIMEOUT_S,
    )


def auth_settings(database: Path) -> str:
    """The file that MLFLOW_AUTH_CONFIG_PATH names. Who has no role sees nothing."""
    return f"""[mlflow]
default_permission = NO_PERMISSIONS
database_uri = sqlite:///{database}
authorization_function = workbench.mlflow_auth:authenticate
auth_cache_ttl_seconds = {AUTH_CACHE_S}
"""


def _auth_env(data_dir: Path, auth: ServerAuth) -> dict[str, str]:
    settings = data_dir / "auth.ini"
    settings.write_text(auth_settings(data_dir / "auth.db"), "utf-8")
    return {
        "MLFLOW_AUTH_CONFIG_PATH": str(settings),
        # A route that MLflow has no permission for is refused, not let through.
        "MLFLOW_BASIC_AUTH_FAIL_CLOSED": "true",
        "MLFLOW_AUTH_ADMIN_USERNAME": auth.admin.username,
        "MLFLOW_AUTH_ADMIN_PASSWORD": auth.admin.password,
        "MLFLOW_FLASK_SERVER_SECRET_KEY": auth.secret_key,
        "WORKBENCH_MLFLOW_AUDIT_PATH": str(data_dir / AUDIT_FILE),
        "WORKBENCH_MLFLOW_SERVICE_ACCOUNT": SERVICE,
    }


async def is_healthy(tracking_uri: str) -> bool:
    """Whether an MLflow server answers its health check there within two seconds."""
    client = EngineClient(tracking_uri, connect_timeout_s=PROBE_TIMEOUT_S)
    try:
        response = await client.request("GET", HEALTH_PATH, timeout_s=PROBE_TIMEOUT_S)
        await response.read()
    except UpstreamError:
        return False
    finally:
        await client.close()
    return response.status == 200
