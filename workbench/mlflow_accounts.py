"""Accounts of an MLflow server with basic auth: who the workbench speaks as, and the roles that people get.

    admin               made by the server itself; makes accounts
    workbench-service   the workbench and the control plane: registers versions, shows verdicts and the champion
    release-manager     a role: reads everything, writes tags of versions (which ones: mlflow_auth.py)
    researcher          a role: runs and experiments of its own and others', reads the registry

Passwords of the first two lie in `secrets/` of the data folder, for its owner alone. Whoever reads them is them.
"""

from __future__ import annotations

import base64
import json
import os
import re
import secrets
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from serving.core.errors import ServingError, Unavailable

USERNAME, PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
ADMIN, SERVICE = "admin", "workbench-service"
WORKSPACE = "default"
TIMEOUT_S = 30.0


class UserRole(StrEnum):
    """What a person may be."""

    RELEASE_MANAGER = "release-manager"
    RESEARCHER = "researcher"


# Resource and permission, on everything of its kind. Tags hang on the version's permission, aliases on the model's.
PERMISSIONS: Mapping[str, tuple[tuple[str, str], ...]] = {
    SERVICE: (("experiment", "MANAGE"), ("registered_model", "MANAGE"), ("registered_model_version", "MANAGE")),
    UserRole.RELEASE_MANAGER: (
        *(("experiment", "READ"), ("registered_model", "READ"), ("registered_model_version", "EDIT")),
    ),
    UserRole.RESEARCHER: (
        *(("experiment", "EDIT"), ("registered_model", "READ"), ("registered_model_version", "READ")),
    ),
}


class AccountsRefused(ServingError):
    """MLflow answered with an error; the message holds its own words."""

    status = 502


@dataclass(frozen=True, slots=True)
class Account:
    """A name and its password, which `repr` does not show."""

    username: str
    password: str

    def __repr__(self) -> str:
        return f"Account({self.username!r})"

    @property
    def env(self) -> dict[str, str]:
        """By which MLflow's client speaks as this account."""
        return {USERNAME: self.username, PASSWORD: self.password}


def service_path(secrets_dir: Path, server: str | None) -> Path:
    """Where the service account's password lies: for the stack's own server, or for somebody else's at that address."""
    where = "" if server is None else "-" + re.sub(r"[^a-z0-9.]+", "-", urllib.parse.urlsplit(server).netloc.lower())
    return secrets_dir / f"mlflow-service{where}"


def service_account(secrets_dir: Path, server: str | None) -> Account | None:
    """The account that the workbench speaks as; None where none was made, or this user may not read it."""
    try:
        password = service_path(secrets_dir, server).read_text("utf-8").strip()
    except (FileNotFoundError, PermissionError):
        return None
    return Account(SERVICE, password)


def own_account() -> Account | None:
    """The account that this process' environment names."""
    name, password = os.environ.get(USERNAME), os.environ.get(PASSWORD)
    return Account(name, password) if name and password else None


def has_own_account() -> bool:
    """Whether MLflow's client finds an account of this user: in the environment, or in its own file of credentials."""
    return own_account() is not None or (Path.home() / ".mlflow" / "credentials").exists()


def speak_as(account: Account | None) -> None:
    """Makes MLflow's client in this process speak as the account; None leaves it as it is."""
    if account is not None:
        os.environ.update(account.env)


def new_password() -> str:
    """One that nobody guesses."""
    return secrets.token_urlsafe(18)


class Accounts:
    """Makes accounts and roles on a server, as its admin. Everything may be done twice. Blocks."""

    def __init__(self, uri: str, admin: Account) -> None:
        self._uri = uri.rstrip("/")
        token = base64.b64encode(f"{admin.username}:{admin.password}".encode()).decode()
        self._authorization = f"Basic {token}"

    def make_role(self, name: str) -> int:
        """The role with the permissions that belong to it; its id. Raises Unavailable, AccountsRefused."""
        roles = self._ask("GET", "3.0/mlflow/roles/list", {"workspace": WORKSPACE})["roles"]
        found = next((role for role in roles if role["name"] == name), None)
        if found is None:
            found = self._ask("POST", "3.0/mlflow/roles/create", {"workspace": WORKSPACE, "name": name})["role"]
        role_id = int(found["id"])
        listed = self._ask("GET", "3.0/mlflow/roles/permissions/list", {"role_id": str(role_id)})["role_permissions"]
        there = {(one["resource_type"], one["permission"]) for one in listed}
        for resource, permission in PERMISSIONS[name]:
            if (resource, permission) not in there:
                wanted = {"resource_type": resource, "resource_pattern": "*", "permission": permission}
                self._ask("POST", "3.0/mlflow/roles/permissions/add", {"role_id": role_id, **wanted})
        return role_id

    def make_user(self, name: str, role: str, password: str) -> bool:
        """The user in that role; whether it was made now, else its password stays. Raises as `make_role`."""
        role_id = self.make_role(role)
        try:
            self._ask("POST", "2.0/mlflow/users/create", {"username": name, "password": password})
            is_new = True
        except AccountsRefused as error:
            if "RESOURCE_ALREADY_EXISTS" not in error.message:
                raise
            is_new = False
        roles = self._ask("GET", "3.0/mlflow/users/roles/list", {"username": name})["roles"]
        if all(one["id"] != role_id for one in roles):
            self._ask("POST", "3.0/mlflow/roles/assign", {"username": name, "role_id": role_id})
        return is_new

    def set_password(self, name: str, password: str) -> None:
        """Gives the user another password. Raises as `make_role`."""
        self._ask("PATCH", "2.0/mlflow/users/update-password", {"username": name, "password": password})

    def _ask(self, method: str, call: str, data: Mapping[str, Any]) -> dict[str, Any]:
        url, body = f"{self._uri}/api/{call}", None
        if method == "GET":
            url += "?" + urllib.parse.urlencode(data)
        else:
            body = json.dumps(data).encode()
        headers = {"authorization": self._authorization, "content-type": "application/json"}
        request = urllib.request.Request(url, body, headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                return json.loads(response.read() or b"{}")
        except urllib.error.HTTPError as error:
            words = error.read().decode(errors="replace")[:500]
            if error.code == 404 and "RESOURCE_DOES_NOT_EXIST" not in words:
                words = "it runs without accounts; start it with them first (for the stack's own: down, then up)"
            raise AccountsRefused(f"MLflow at {self._uri} answered {error.code} to {call}: {words}") from error
        except OSError as error:
            raise Unavailable(f"MLflow at {self._uri} does not answer ({getattr(error, 'reason', error)})") from error
