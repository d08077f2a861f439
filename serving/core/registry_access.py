"""Who may write what releases are judged by, in a registry whose own permissions leave holes.

    service     the account of the workbench and the control plane: verdicts, evidence, weights, aliases
    manager     release managers: approvals and rejections, as themselves
    admin       everything, so that somebody can; the control plane puts right what it has not recorded
    user        everybody else: none of it

MLflow asks no permission for tags that come with a version's creation, gives aliases to whoever may edit the model, and
writes nobody's name down. This says yes or no before it, from the request alone.
"""

from __future__ import annotations

import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any
from urllib.parse import unquote

from serving.core.approval import CHAMPION, TAG_APPROVAL, is_reserved
from serving.core.gate_record import FOLDER

CANDIDATE = "candidate"
PROMPT_TAG = "mlflow.prompt.is_prompt"
_CALL = re.compile(r"/(?:ajax-)?api/\d+\.\d+/mlflow/([a-z-]+/[a-z-]+)/?$")
_EVIDENCE = re.compile(rf"/artifacts/(?:[^/]+/)*artifacts/{FOLDER}(?:/|$)")
_ASSISTANT = re.compile(r"/mlflow/assistant(?:/|$)")
_UPLOAD = "/mlflow/upload-artifact"


class Role(StrEnum):
    """In what role a user writes."""

    ADMIN = "admin"
    SERVICE = "service"
    MANAGER = "manager"
    USER = "user"


class Kind(StrEnum):
    """What a request writes."""

    TAG = "tag"
    TAG_WITH_CREATION = "tag with creation"
    ALIAS = "alias"
    MODEL_TAG = "model tag"
    EVIDENCE = "evidence"


@dataclass(frozen=True, slots=True)
class Write:
    """One thing that releases are judged by, about to be written; `value` None takes it away.

    `name` is a tag, an alias or a path of an artifact; `version` is empty where the request names none.
    """

    kind: Kind
    model: str
    version: str
    name: str
    value: str | None


def writes_of(method: str, path: str, query: Mapping[str, str], body: Mapping[str, Any]) -> tuple[Write, ...]:
    """What a request to MLflow would write of it; nothing for all other requests.

    Args:
        method: HTTP's.
        path: as sent, with or without a prefix in front.
        query: parameters of the address.
        body: the JSON object, empty where there is none.
    """
    if method == "GET":
        return ()
    plain = _plain(path)
    if _EVIDENCE.search(plain):
        return (Write(Kind.EVIDENCE, "", "", plain, None if method == "DELETE" else ""),)
    if plain.endswith(_UPLOAD):
        artifact = _plain(f"/{query.get('path', '')}").lstrip("/")
        is_evidence = artifact.partition("/")[0] == FOLDER
        return (Write(Kind.EVIDENCE, "", "", f"{query.get('run_uuid', '')}/{artifact}", ""),) if is_evidence else ()
    call = _CALL.search(plain)
    return () if call is None else _of_call(call[1], method, body)


def is_closed(path: str) -> bool:
    """Whether the path leads to MLflow's assistant, which runs programs for whoever is signed in: nobody's here."""
    return _ASSISTANT.search(_plain(path)) is not None


def refusal(role: Role, write: Write) -> str | None:
    """Why this role may not write that, in words for who tried; None when it may."""
    if role is Role.ADMIN:
        return None
    is_approval = write.kind is Kind.TAG and write.name.partition(".")[0] == TAG_APPROVAL
    if is_approval:
        if role is Role.MANAGER or (role is Role.SERVICE and write.value is None):
            return None
        if role is Role.SERVICE:
            return "an approval is a person's word: sign in as a release manager, not as the service account"
        return "only a release manager approves or rejects a version"
    if role is Role.SERVICE and write.kind is not Kind.MODEL_TAG:
        return None
    return {
        Kind.TAG: f"the tag {write.name} is written by the gates and the control plane alone",
        Kind.TAG_WITH_CREATION: f"no version is created with the tag {write.name}: the gates write it afterwards",
        Kind.ALIAS: f"the alias {write.name} is written by the control plane alone: start a rollout",
        Kind.MODEL_TAG: f"the tag {write.name} of a model is an administrator's to write",
        Kind.EVIDENCE: f"artifacts below {FOLDER}/ are evidence: the gates write them alone",
    }[write.kind]


def _of_call(call: str, method: str, body: Mapping[str, Any]) -> tuple[Write, ...]:
    model, version = str(body.get("name", "")), str(body.get("version", ""))
    if call in ("model-versions/set-tag", "model-versions/delete-tag"):
        key = str(body.get("key", ""))
        value = None if call.endswith("delete-tag") else str(body.get("value", ""))
        return (Write(Kind.TAG, model, version, key, value),) if is_reserved(key) else ()
    if call == "model-versions/create":
        tags = [tag for tag in body.get("tags") or () if isinstance(tag, Mapping)]
        found = [(str(tag.get("key", "")), str(tag.get("value", ""))) for tag in tags]
        return tuple(Write(Kind.TAG_WITH_CREATION, model, "", key, value) for key, value in found if is_reserved(key))
    if call == "registered-models/alias":
        alias = str(body.get("alias", ""))
        if alias.lower() not in (CHAMPION, CANDIDATE):
            return ()
        return (Write(Kind.ALIAS, model, version, alias, None if method == "DELETE" else version),)
    if call in ("registered-models/set-tag", "registered-models/delete-tag") and body.get("key") == PROMPT_TAG:
        value = None if call.endswith("delete-tag") else str(body.get("value", ""))
        return (Write(Kind.MODEL_TAG, model, "", PROMPT_TAG, value),)
    return ()


def _plain(path: str) -> str:
    """The path without escapes, doubled slashes and dots, however often they were wrapped."""
    while (once := unquote(path)) != path:
        path = once
    return posixpath.normpath("/" + path.replace("\\", "/").lstrip("/"))
