"""JupyterLab on notebooks/, with MLflow and the endpoint's docs proxied beside it and in its launcher.

    /lab/tree/notebooks   the notebooks
    /mlflow/              MLflow's page
    /endpoint/docs        the gateway's description of its API

jupyter-server-proxy hands the two on to their ports on loopback, behind JupyterLab's token: whoever reaches the one
address, through a tunnel for instance, has all three. A port where nothing listens answers 500 until something does.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from workbench.config import WorkbenchConfig
from workbench.stack.parts import answers, url_host
from workbench.stack.service import Service
from workbench.wiring import Layout

LAB_HOST = "127.0.0.1"
LOOPBACK = frozenset({"127.0.0.1", "localhost", "::1"})
SETTINGS_FILE = "lab.json"


def jupyter_lab(config: WorkbenchConfig, layout: Layout, token: str, root_dir: Path) -> Service:
    """JupyterLab on loopback behind a token, which is handed over in the environment and never on a command line.

    Args:
        config: ports of JupyterLab and of what it proxies.
        layout: where its settings and its log go.
        token: that opens it.
        root_dir: what its file browser shows.

    Raises:
        OSError: its settings cannot be written.
    """
    settings = layout.run_dir / SETTINGS_FILE
    settings.parent.mkdir(parents=True, exist_ok=True)
    settings.write_text(json.dumps({"ServerProxy": {"servers": proxied(config)}}, indent=1), encoding="utf-8")
    command = [
        *(sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", f"--config={settings.resolve()}"),
        *(f"--ServerApp.ip={LAB_HOST}", f"--ServerApp.port={config.lab.port}", "--ServerApp.port_retries=0"),
        f"--ServerApp.root_dir={root_dir}",
    ]
    return Service(
        "lab",
        command,
        layout.log_dir / "lab.log",
        ready=answers(f"http://{LAB_HOST}:{config.lab.port}", "/api"),
        env={"JUPYTER_TOKEN": token},
    )


def lab_url(config: WorkbenchConfig, token: str, root_dir: Path) -> str:
    """Where a browser opens it: on the notebooks, where there are any."""
    tree = "/tree/notebooks" if (root_dir / "notebooks").is_dir() else ""
    return f"http://{LAB_HOST}:{config.lab.port}/lab{tree}?token={token}"


def proxied(config: WorkbenchConfig) -> dict[str, dict[str, Any]]:
    """jupyter-server-proxy's servers: name → where it listens and how the launcher shows it.

    An MLflow on another machine has an address of its own and is not among them.
    """
    found = {"endpoint": _server("Endpoint docs", "endpoint/docs", url_host(config.gateway.host), config.gateway.port)}
    uri = urlsplit(config.stores.mlflow_tracking_uri or f"http://127.0.0.1:{config.mlflow.port}")
    if uri.hostname in LOOPBACK and uri.scheme == "http" and uri.port is not None:
        found["mlflow"] = _server("MLflow", "mlflow/", uri.hostname, uri.port)
    return found


def _server(title: str, path: str, host: str, port: int) -> dict[str, Any]:
    return {
        "port": port,
        # Both build links and examples from the Host that they are asked by: they get their own, not JupyterLab's.
        "request_headers_override": {"Host": f"{host}:{port}"},
        "launcher_entry": {"title": title, "path_info": path, "category": "Workbench"},
    }
