"""Where ports meet adapters: folders, addresses and connections that follow from the configuration.

A command finds the running stack through its state file; addresses of servers that somebody else runs come from
the configuration and win.
"""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass
from pathlib import Path

from serving.core.tenancy import AuthMode
from workbench.config import WorkbenchConfig
from workbench.mlflow_accounts import Account, has_own_account, service_account, speak_as
from workbench.stack.state import StackState, StateFile

SHARED_MEMORY = Path("/dev/shm")


class NotRunning(Exception):
    """A command needs a running stack, or the address of what it needs in the configuration."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Where things lie below the data folder."""

    data_dir: Path

    @property
    def run_dir(self) -> Path:
        """State of the running stack; nothing in it is worth keeping."""
        return self.data_dir / "run"

    @property
    def state_file(self) -> StateFile:
        """What runs."""
        return StateFile(self.run_dir / "stack.json")

    @property
    def lock_path(self) -> Path:
        """Held by the one supervisor of this folder."""
        return self.run_dir / "stack.lock"

    @property
    def log_dir(self) -> Path:
        """A log a process."""
        return self.data_dir / "logs"

    @property
    def models_dir(self) -> Path:
        """Weights by digest; a conversion is never done twice."""
        return self.data_dir / "models"

    @property
    def store_dir(self) -> Path:
        """The embedded store's data and socket."""
        return self.data_dir / "store"

    @property
    def mlflow_dir(self) -> Path:
        """The embedded MLflow's database and artifacts."""
        return self.data_dir / "mlflow"

    @property
    def secrets_dir(self) -> Path:
        """Passwords and keys, for their owner alone."""
        return self.data_dir / "secrets"

    @property
    def results_dir(self) -> Path:
        """Finished cells of sweeps: JSON and parquet, whatever happens to MLflow."""
        return self.data_dir / "results"

    @property
    def routing_table_path(self) -> Path:
        """The file copy of the routing table."""
        return self.data_dir / "routing-table.json"

    @property
    def cost_table_path(self) -> Path:
        """The file copy of the published cost table."""
        return self.data_dir / "cost-table.json"

    @property
    def tenants_path(self) -> Path:
        """The file copy of the tenant directory."""
        return self.data_dir / "tenants.json"

    @property
    def releases_path(self) -> Path:
        """The file copy of the release book: champions and evidence as the control plane knows them."""
        return self.data_dir / "releases.json"

    @property
    def decisions_dir(self) -> Path:
        """Decision records of the gateway workers."""
        return self.data_dir / "decisions"

    @property
    def usage_dir(self) -> Path:
        """Usage spool of the gateway workers."""
        return self.data_dir / "usage"

    @property
    def metrics_dir(self) -> Path:
        """Counters that the gateway workers of a port share; begins empty with each stack.

        They are mapped into memory, where a full disk kills who writes them: so they lie in memory where that can be.
        """
        if not (SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK | os.X_OK)):
            return self.run_dir / "metrics"
        name = hashlib.sha256(str(self.data_dir.resolve()).encode()).hexdigest()[:16]
        return SHARED_MEMORY / f"workbench-{os.getuid()}-{name}"

    @property
    def versions_path(self) -> Path:
        """Versions by digest as the registry last gave them, for a start without MLflow."""
        return self.data_dir / "versions.json"

    @property
    def last_run_path(self) -> Path:
        """What `workbench up --ask` did."""
        return self.data_dir / "last-run.json"


def layout(config: WorkbenchConfig) -> Layout:
    """The folders of a configuration."""
    return Layout(config.data_dir)


def running_stack(config: WorkbenchConfig) -> StackState | None:
    """The stack that runs from this configuration's data folder, if one does."""
    state = layout(config).state_file.read()
    return state if state is not None and state.is_running else None


def store_url(config: WorkbenchConfig) -> str:
    """The store's address.

    Raises:
        NotRunning: no stack runs and no address is configured.
    """
    return _address(config, "store", config.stores.redis_url, "stores.redis_url or REDIS_URL")


def mlflow_uri(config: WorkbenchConfig) -> str:
    """MLflow's address; from now on this process speaks to it as its user's account, else as the service account.

    Raises:
        NotRunning: no stack runs and no address is configured.
    """
    if not has_own_account():
        speak_as_service(config)
    return _address(
        config, "mlflow", config.stores.mlflow_tracking_uri, "stores.mlflow_tracking_uri or MLFLOW_TRACKING_URI"
    )


def service_account_of(config: WorkbenchConfig) -> Account | None:
    """The account that the workbench speaks to this configuration's MLflow as, if one was made and may be read."""
    server = config.stores.mlflow_tracking_uri
    if server is None and config.mlflow.auth is not AuthMode.REQUIRED:
        return None
    return service_account(layout(config).secrets_dir, server)


def speak_as_service(config: WorkbenchConfig) -> None:
    """Makes MLflow's client in this process speak as the service account, where there is one."""
    speak_as(service_account_of(config))


def gateway_url(config: WorkbenchConfig) -> str:
    """The gateway's address without a path.

    Raises:
        NotRunning: no stack runs.
    """
    return _address(config, "gateway", None, "a running stack")


def _address(config: WorkbenchConfig, part: str, configured: str | None, setting: str) -> str:
    if configured is not None:
        return configured
    state = running_stack(config)
    if state is None or part not in state.urls:
        raise NotRunning(f"no {part}: start the stack with `workbench up`, or set {setting}")
    return state.urls[part]
