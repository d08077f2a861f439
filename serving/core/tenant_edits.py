"""Changes of the tenant directory as pure functions: each takes a directory and returns the next one.

The epoch is left to whoever publishes. `check` says what is wrong with a directory; nothing wrong is published.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from typing import Any, TypeVar

from serving.core.errors import BadRequest, NotFound
from serving.core.policies.guardrails import GuardrailSettings
from serving.core.policies.guardrails import mistakes as guardrail_mistakes
from serving.core.tenancy import ANY, ApiKey, Issuer, Limits, Tenant, TenantDirectory

ALGORITHMS = ("RS256", "ES256")
DEFAULT_GUARDRAILS = GuardrailSettings()

MAX_LABEL_CHARS = 100

_NAME = re.compile(r"[a-z0-9._-]{1,64}")
_GRANT = re.compile(r"[a-z0-9._-]+")
_KEY_ID = re.compile(r"[a-z0-9]{4,32}")
_SHA256 = re.compile(r"[0-9a-f]{64}")
_JWKS_URL = re.compile(r"(https://[^/\s@]+|http://(localhost|127\.0\.0\.1|\[::1\])(:\d+)?)(/\S*)?")

T = TypeVar("T")


def tenant_of(directory: TenantDirectory, tenant_id: str) -> Tenant:
    """The tenant of that id. Raises NotFound, naming those that there are."""
    for tenant in directory.tenants:
        if tenant.tenant_id == tenant_id:
            return tenant
    known = ", ".join(sorted(tenant.tenant_id for tenant in directory.tenants)) or "none"
    raise NotFound(f"no tenant {tenant_id!r}; there are: {known}")


def key_of(directory: TenantDirectory, reference: str) -> ApiKey:
    """The key of that id, or the one key in force of that label.

    Raises:
        NotFound: there is none.
        BadRequest: the label stands on several keys.
    """
    for key in directory.keys:
        if key.key_id == reference:
            return key
    labelled = [key for key in directory.keys if key.label == reference and key.revoked_at_s is None]
    if len(labelled) > 1:
        ids = ", ".join(key.key_id for key in labelled)
        raise BadRequest(f"several keys are called {reference!r}: name one by its id: {ids}")
    if not labelled:
        raise NotFound(f"no key {reference!r}: `workbench keys list` shows ids and labels")
    return labelled[0]


def add_tenant(directory: TenantDirectory, tenant: Tenant) -> TenantDirectory:
    """With one tenant more. Raises BadRequest when it is there already."""
    if any(known.tenant_id == tenant.tenant_id for known in directory.tenants):
        raise BadRequest(f"tenant {tenant.tenant_id!r} is there already: change it with `workbench tenants update`")
    return put_tenant(directory, tenant)


def put_tenant(directory: TenantDirectory, tenant: Tenant) -> TenantDirectory:
    """With this tenant, in place of one of its id."""
    return replace(directory, tenants=_put(directory.tenants, tenant, ("tenant_id",)))


def remove_tenant(directory: TenantDirectory, tenant_id: str) -> TenantDirectory:
    """Without the tenant and its keys. Raises NotFound."""
    tenant_of(directory, tenant_id)
    return replace(
        directory,
        tenants=tuple(tenant for tenant in directory.tenants if tenant.tenant_id != tenant_id),
        keys=tuple(key for key in directory.keys if key.tenant_id != tenant_id),
    )


def put_key(directory: TenantDirectory, key: ApiKey) -> TenantDirectory:
    """With this key, in place of one of its id. Raises NotFound for an unknown tenant."""
    tenant_of(directory, key.tenant_id)
    return replace(directory, keys=_put(directory.keys, key, ("key_id",)))


def revoke_key(directory: TenantDirectory, reference: str, now_s: float) -> TenantDirectory:
    """With the key revoked; one that is revoked already stays as it is. Raises NotFound, BadRequest."""
    key = key_of(directory, reference)
    return directory if key.revoked_at_s is not None else put_key(directory, replace(key, revoked_at_s=now_s))


def rotate_key(directory: TenantDirectory, reference: str, successor: ApiKey, overlap_s: float) -> TenantDirectory:
    """With a new key of the same grants; the old one ends after `overlap_s`.

    Args:
        directory: as it is.
        reference: id or label of the old key.
        successor: id, hash and time of the new key; its grants are taken from the old one.
        overlap_s: how long both count, from `successor.created_at_s`.

    Raises:
        NotFound, BadRequest: as `key_of`, and for a key that is revoked.
    """
    old = key_of(directory, reference)
    if old.revoked_at_s is not None:
        raise BadRequest(f"key {old.key_id} is revoked: make a new one with `workbench keys create`")
    new = replace(
        successor,
        tenant_id=old.tenant_id,
        scopes=old.scopes,
        models=old.models,
        limits=old.limits,
        label=old.label,
        expires_at_s=_shifted_expiry(old, successor.created_at_s),
    )
    ends_at_s = successor.created_at_s + overlap_s
    ended = replace(old, expires_at_s=min(ends_at_s, old.expires_at_s or ends_at_s), label=_retired(old))
    return put_key(put_key(directory, ended), new)


def put_issuer(directory: TenantDirectory, issuer: Issuer) -> TenantDirectory:
    """With this issuer, in place of one of the same name and audience."""
    return replace(directory, issuers=_put(directory.issuers, issuer, ("issuer", "audience")))


def remove_issuer(directory: TenantDirectory, name: str, audience: str | None = None) -> TenantDirectory:
    """Without the issuer, for one audience or all. Raises NotFound."""
    left = tuple(i for i in directory.issuers if i.issuer != name or audience not in (None, i.audience))
    if len(left) == len(directory.issuers):
        known = ", ".join(sorted(issuer.issuer for issuer in directory.issuers)) or "none"
        raise NotFound(f"no issuer {name!r}; there are: {known}")
    return replace(directory, issuers=left)


def check(directory: TenantDirectory, guardrails: GuardrailSettings = DEFAULT_GUARDRAILS) -> list[str]:
    """All that is wrong with a directory, each in words; empty when it can be published.

    `guardrails` are the gateway's: a tenant's policy may name the checks that its patterns are.
    """
    names = [tenant.tenant_id for tenant in directory.tenants]
    mistakes = [f"tenant {name!r} stands there twice" for name in _twice(names)]
    mistakes += [f"key {key_id!r} stands there twice" for key_id in _twice([k.key_id for k in directory.keys])]
    for tenant in directory.tenants:
        mistakes += [f"tenant {tenant.tenant_id!r}: {mistake}" for mistake in _tenant_mistakes(tenant, guardrails)]
    for key in directory.keys:
        mistakes += [f"key {key.key_id!r}: {mistake}" for mistake in _key_mistakes(key, set(names))]
    for issuer in directory.issuers:
        mistakes += [f"issuer {issuer.issuer!r}: {mistake}" for mistake in _issuer_mistakes(issuer)]
    pairs = [f"{issuer.issuer} for {issuer.audience}" for issuer in directory.issuers]
    return mistakes + [f"issuer {pair} stands there twice" for pair in _twice(pairs)]


def differences(old: TenantDirectory, new: TenantDirectory) -> list[str]:
    """What changes from one directory to the next, a line each, without hashes and key sets."""
    lines = _changes("tenant", _by(old.tenants, "tenant_id"), _by(new.tenants, "tenant_id"))
    lines += _changes("key", _by(old.keys, "key_id"), _by(new.keys, "key_id"))
    return lines + _changes("issuer", _by(old.issuers, "issuer", "audience"), _by(new.issuers, "issuer", "audience"))


_UNSHOWN = {"sha256", "jwks"}


def _changes(what: str, old: dict[str, Any], new: dict[str, Any]) -> list[str]:
    lines = [f"- {what} {name}" for name in old if name not in new]
    for name, entry in new.items():
        if name not in old:
            lines.append(f"+ {what} {name}")
            continue
        for field in fields(entry):
            before, after = getattr(old[name], field.name), getattr(entry, field.name)
            if before != after:
                shown = "changed" if field.name in _UNSHOWN else f"{_shown(before)} -> {_shown(after)}"
                lines.append(f"~ {what} {name}: {field.name}: {shown}")
    return lines


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(str(item) for item in value)}]"
    if isinstance(value, Limits):
        given = {f.name: getattr(value, f.name) for f in fields(value) if getattr(value, f.name) is not None}
        return ", ".join(f"{name} {bound}" for name, bound in given.items()) or "none"
    return str(value)


def _by(entries: Iterable[Any], *names: str) -> dict[str, Any]:
    return {" for ".join(getattr(entry, name) for name in names): entry for entry in entries}


def _put(entries: tuple[T, ...], entry: T, names: tuple[str, ...]) -> tuple[T, ...]:
    def identity(one: T) -> tuple[Any, ...]:
        return tuple(getattr(one, name) for name in names)

    if all(identity(known) != identity(entry) for known in entries):
        return (*entries, entry)
    return tuple(entry if identity(known) == identity(entry) else known for known in entries)


def _shifted_expiry(old: ApiKey, now_s: float) -> float | None:
    """The new key lives as long as the old one was to live from its making."""
    return None if old.expires_at_s is None else now_s + (old.expires_at_s - old.created_at_s)


def _retired(key: ApiKey) -> str:
    """The label goes to the successor."""
    return f"{key.label} (rotated)" if key.label else ""


def _twice(names: Sequence[str]) -> list[str]:
    return sorted({name for name in names if names.count(name) > 1}) if len(set(names)) != len(names) else []


def _tenant_mistakes(tenant: Tenant, settings: GuardrailSettings) -> list[str]:
    mistakes = [] if _NAME.fullmatch(tenant.tenant_id) else ["a tenant's id is 1 to 64 of a-z 0-9 . _ -"]
    if tenant.sharing_group is not None and not _NAME.fullmatch(tenant.sharing_group):
        mistakes.append("a sharing group's name is 1 to 64 of a-z 0-9 . _ -")
    lists = {"models": tenant.models, "adapters": tenant.adapters, "regions": tenant.regions}
    mistakes += [mistake for name, grants in lists.items() for mistake in _grant_mistakes(name, grants)]
    mistakes += [f"guardrails.{mistake}" for mistake in guardrail_mistakes(settings, tenant.guardrails)]
    if any(not days > 0 or math.isinf(days) for days in tenant.retention_days.values()):
        mistakes.append("retention_days must be over 0")
    return mistakes + _limit_mistakes(tenant.limits)


def _grant_mistakes(what: str, grants: tuple[str, ...]) -> list[str]:
    wrong = [grant for grant in grants if grant != ANY and not _GRANT.fullmatch(grant)]
    return (
        [f"{what}: {', '.join(map(repr, wrong))} is no name (a-z 0-9 . _ -, without a version) nor *"] if wrong else []
    )


def _key_mistakes(key: ApiKey, tenants: set[str]) -> list[str]:
    mistakes = [] if _KEY_ID.fullmatch(key.key_id) else ["a key's id is 4 to 32 of a-z 0-9"]
    if not _SHA256.fullmatch(key.sha256):
        mistakes.append("sha256 is not 64 hexadecimal digits")
    if key.tenant_id not in tenants:
        mistakes.append(f"there is no tenant {key.tenant_id!r}")
    if len(key.label) > MAX_LABEL_CHARS or not key.label.isprintable():
        mistakes.append(f"a label is at most {MAX_LABEL_CHARS} printable characters")
    mistakes += _grant_mistakes("models", key.models)
    return mistakes + _limit_mistakes(key.limits)


def _issuer_mistakes(issuer: Issuer) -> list[str]:
    mistakes = []
    if not issuer.issuer or not issuer.audience:
        mistakes.append("it needs a name and an audience")
    if issuer.jwks is None and issuer.jwks_url is None:
        mistakes.append("it needs a jwks_url or a jwks to verify tokens with")
    if issuer.jwks_url is not None and not _JWKS_URL.fullmatch(issuer.jwks_url):
        mistakes.append("jwks_url is no https:// URL (http:// is for loopback alone: keys must not come unprotected)")
    if not issuer.algorithms or set(issuer.algorithms) - set(ALGORITHMS):
        mistakes.append(f"algorithms are {' and '.join(ALGORITHMS)}")
    if not issuer.tenant_claim or not issuer.scope_claim:
        mistakes.append("tenant_claim and scope_claim must be named")
    if not issuer.max_lifetime_s > 0 or not 0 <= issuer.leeway_s <= 300:
        mistakes.append("max_lifetime_s is over 0, leeway_s between 0 and 300")
    return mistakes


def _limit_mistakes(limits: Limits) -> list[str]:
    bounds = {field.name: getattr(limits, field.name) for field in fields(limits)}
    return [
        f"{name} must be over 0, or left out for no bound"
        for name, bound in bounds.items()
        if bound is not None and (not bound > 0 or math.isinf(bound))
    ]
