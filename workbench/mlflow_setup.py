"""Makes the accounts of an MLflow server: the workbench's own, and people's with their roles.

the stack's own server      while it runs, or started for the moment; its admin is ours
somebody else's             by its address; the environment names its admin
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

from serving.core.errors import BadRequest
from serving.core.tenancy import AuthMode
from workbench.config import WorkbenchConfig
from workbench.mlflow_accounts import (
    PASSWORD,
    SERVICE,
    USERNAME,
    Account,
    Accounts,
    UserRole,
    new_password,
    own_account,
    service_path,
)
from workbench.mlflow_server import mlflow_server
from workbench.stack.parts import kept_secret, mlflow_auth
from workbench.wiring import layout, running_stack


@dataclass(frozen=True, slots=True)
class Made:
    """A user after it; `account` is None for one that was there: its password stays."""

    name: str
    role: str
    account: Account | None


async def init_auth(config: WorkbenchConfig, people: Mapping[str, UserRole]) -> list[Made]:
    """Makes the service account and `people`, in their roles; what is there already stays. May be done again.

    Raises:
        BadRequest: the stack's server does not ask who somebody is; or nobody says who is admin of somebody else's.
        ServiceFailed: the stack's own server does not start.
        Unavailable, AccountsRefused: the server does not answer, or says no.
    """
    if taken := sorted({SERVICE, "admin"} & set(people)):
        raise BadRequest(f"{taken[0]} is an account of the workbench's own: name the person otherwise")
    async with _server(config) as (uri, admin):
        return await asyncio.to_thread(_make, config, Accounts(uri, admin), people)


def _make(config: WorkbenchConfig, accounts: Accounts, people: Mapping[str, UserRole]) -> list[Made]:
    path = service_path(layout(config).secrets_dir, config.stores.mlflow_tracking_uri)
    is_known = path.exists()
    service = Account(SERVICE, kept_secret(path))
    if not accounts.make_user(SERVICE, SERVICE, service.password) and not is_known:
        accounts.set_password(SERVICE, service.password)
    for role in UserRole:
        accounts.make_role(role)
    made = []
    for name, role in people.items():
        account = Account(name, new_password())
        made.append(Made(name, role, account if accounts.make_user(name, role, account.password) else None))
    return made


@asynccontextmanager
async def _server(config: WorkbenchConfig) -> AsyncIterator[tuple[str, Account]]:
    """Address and admin of the server, which runs as long as this."""
    if config.stores.mlflow_tracking_uri is not None:
        admin = own_account()
        if admin is None:
            raise BadRequest(f"say who is admin of {config.stores.mlflow_tracking_uri}: set {USERNAME} and {PASSWORD}")
        yield config.stores.mlflow_tracking_uri, admin
        return
    if config.mlflow.auth is not AuthMode.REQUIRED:
        raise BadRequest("the stack's MLflow asks nobody who they are: set mlflow: {auth: required} in workbench.yaml")
    places = layout(config)
    auth, uri = mlflow_auth(places), f"http://127.0.0.1:{config.mlflow.port}"
    if running_stack(config) is not None:
        yield uri, auth.admin
        return
    server = mlflow_server(places.mlflow_dir, config.mlflow.port, auth=auth)
    await server.start()
    try:
        yield uri, auth.admin
    finally:
        await server.stop()
