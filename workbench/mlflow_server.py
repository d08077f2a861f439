"""The MLflow server that the stack starts where nobody names one: SQLite and a folder of artifacts.

It runs as a child process and is never imported here: MLflow takes seconds to import.
"""

from __future__ import annotations

import sys
from pathlib import Path

from serving.core.errors import UpstreamError
from serving.engine.client import EngineClient
from workbench.stack.service import Service

HEALTH_PATH = "/health"
START_TIMEOUT_S = 240.0
PROBE_TIMEOUT_S = 2.0

SERVER_ENV = {
    # Job execution adds ten processes of 260 MB; nothing here uses it.
    "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "DO_NOT_TRACK": "1",
}


def mlflow_server(data_dir: Path, port: int, *, host: str = "127.0.0.1", num_workers: int = 1) -> Service:
    """An MLflow server that keeps everything below `data_dir`; start and stop it as any part of the stack.

    Args:
        data_dir: holds `mlflow.db`, `artifacts/` and `server.log`; created when missing.
        port: where it listens.
        host: the address that it binds to.
        num_workers: server processes; each takes about 300 MB.
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
    uri = f"http://{host}:{port}"
    return Service(
        "mlflow",
        command,
        data_dir / "server.log",
        ready=lambda: is_healthy(uri),
        env=SERVER_ENV,
        start_timeout_s=START_TIMEOUT_S,
    )


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
