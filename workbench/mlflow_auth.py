"""Runs inside MLflow's server, as its basic-auth app's `authorization_function`: who may write what releases rest on.

    [mlflow]
    authorization_function = workbench.mlflow_auth:authenticate

After MLflow has checked the password, `serving/core/registry_access.py` says whether this user may write that; if not,
the answer is 403 before anything happens. MLflow's own permissions are asked after it. Each such write is a line in the
audit log: who, when, what, and how it was answered. Where no line can be written, nothing else is.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Sequence
from typing import Any

from flask import Response, after_this_request, g, make_response, request
from mlflow.server.auth import authenticate_request_basic_auth, store
from werkzeug.datastructures import Authorization

from serving.core.registry_access import Kind, Role, Write, is_closed, refusal, writes_of

logger = logging.getLogger(__name__)

AUDIT_PATH = "WORKBENCH_MLFLOW_AUDIT_PATH"
SERVICE_ACCOUNT = "WORKBENCH_MLFLOW_SERVICE_ACCOUNT"
MANAGER_ROLE = "release-manager"


def authenticate() -> Authorization | Response:
    """As MLflow's own, and 403 for a write that this user may not do. MLflow calls it several times a request."""
    authorization: Authorization | Response = authenticate_request_basic_auth()
    if hasattr(g, "workbench_has_looked"):
        return authorization
    g.workbench_has_looked = True
    if is_closed(request.path):
        return make_response("Permission denied: MLflow's assistant is closed here", 403)
    writes = writes_of(request.method, request.path, request.args, _body())
    if not writes:
        return authorization
    user = None if isinstance(authorization, Response) else authorization.username
    role = None if user is None else _role(user)
    why = None if role is None else next((no for write in writes if (no := refusal(role, write))), None)
    audit = _Audit(user or _claimed(), role, writes, why)
    try:
        audit.open()
    except OSError as error:
        logger.error("the audit log cannot be written: %s", error)
        return make_response(f"the audit log cannot be written ({error.strerror}): nothing was changed", 503)
    if why is not None:
        audit.write(403)
        return make_response(f"Permission denied: {why}", 403)
    if isinstance(authorization, Response):
        audit.write(authorization.status_code)
    elif any(write.kind is Kind.EVIDENCE for write in writes):
        audit.write(None)  # MLflow serves artifacts elsewhere: this request's own answer is never seen here
    else:
        after_this_request(audit.answered)
    return authorization


class _Audit:
    """The line of one request."""

    def __init__(self, user: str, role: Role | None, writes: Sequence[Write], why: str | None) -> None:
        self._line: dict[str, Any] = {
            "at_s": time.time(),
            "user": user,
            "role": role,
            "from": request.remote_addr,
            "writes": [
                {"kind": one.kind, "model": one.model, "version": one.version, "name": one.name, "value": one.value}
                for one in writes
            ],
            "refused": why,
        }
        self._file: int | None = None

    def open(self) -> None:
        """Raises OSError where the log cannot be written; nothing else is done then."""
        path = os.environ[AUDIT_PATH]
        self._file = os.open(path, os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o600)

    def write(self, status: int | None) -> None:
        """Writes the line, in one piece: several workers append to one file."""
        if self._file is None:
            return
        try:
            os.write(self._file, json.dumps(self._line | {"status": status}).encode() + b"\n")
        except OSError as error:
            logger.error("a line of the audit log is lost (%s): %s", error, self._line)
        finally:
            os.close(self._file)
            self._file = None

    def answered(self, response: Response) -> Response:
        """Called with MLflow's answer."""
        self.write(response.status_code)
        return response


def _body() -> dict[str, Any]:
    """The request's JSON as MLflow reads it: also one that was encoded twice."""
    if "/mlflow-artifacts/" in request.path or not request.content_length:
        return {}
    found = request.get_json(force=True, silent=True)
    if isinstance(found, str):
        try:
            found = json.loads(found)
        except ValueError:
            return {}
    return found if isinstance(found, dict) else {}


def _role(username: str) -> Role:
    user = store.get_user(username)
    if user.is_admin:
        return Role.ADMIN
    if username == os.environ[SERVICE_ACCOUNT]:
        return Role.SERVICE
    is_manager = any(role.name == MANAGER_ROLE for role in store.list_user_roles(user.id))
    return Role.MANAGER if is_manager else Role.USER


def _claimed() -> str:
    """Who somebody said to be whose password was wrong."""
    return "" if request.authorization is None else f"not signed in: {request.authorization.username}"
