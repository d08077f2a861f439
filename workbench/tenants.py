"""Reads and changes the tenant directory where its truth is.

    a stack runs, or `stores.redis_url` is set     the store; the file copy at once after it
    the stack's own store does not answer          the file, which its workers read too; the store takes it up later
    nothing runs                                   the file; `workbench up` takes it up
    somebody else's store does not answer          nothing is changed: other machines go by that store

Each change is one compare-and-set on the epoch, tried again when somebody else was quicker.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from serving.core.errors import BadRequest, ServingError, StaleEpoch
from serving.core.tenancy import ApiKey, Issuer, Limits, Scope, Tenant, TenantDirectory
from serving.core.tenant_edits import check, put_issuer, put_key, put_tenant
from serving.store.api_keys import key_sha256, new_key, new_key_id
from serving.store.connection import BrokenDocument, StoreUnavailable, connect
from serving.store.documents import Codec
from serving.store.tenants import FileTenantDirectory, StoreTenantDirectory
from workbench.config import WorkbenchConfig
from workbench.config_layers import parse_yaml
from workbench.wiring import NotRunning, layout, store_url

MAX_TRIES = 20
EMPTY = TenantDirectory(epoch=0, published_at_s=0.0)

Change = Callable[[TenantDirectory], TenantDirectory]
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TenantsFile:
    """What `tenants export` writes and `tenants apply` reads. Keys stand there by their hashes."""

    tenants: tuple[Tenant, ...] = ()
    issuers: tuple[Issuer, ...] = ()
    keys: tuple[ApiKey, ...] = field(default=())


_FILE = Codec(TenantsFile, "tenants")


@dataclass(frozen=True, slots=True)
class _Places:
    store: StoreTenantDirectory | None
    file: FileTenantDirectory
    is_ours: bool


async def read_directory(config: WorkbenchConfig, say: Say) -> TenantDirectory:
    """The directory that counts; an empty one of epoch 0 when there is none.

    Args:
        config: where to look.
        say: told when it is not the store that was read.

    Raises:
        StoreUnavailable, BrokenDocument: it cannot be read.
    """
    async with _places(config, say) as places:
        return (await _newest(places, say))[0]


async def edit_directory(config: WorkbenchConfig, change: Change, say: Say) -> TenantDirectory:
    """Publishes what `change` makes of the directory, and returns it; nothing is published when nothing changes.

    Args:
        config: where to publish.
        change: called again with a newer directory when somebody else was quicker.
        say: told when the change went elsewhere than to a store.

    Raises:
        BadRequest: the result would be wrong; all that is wrong is named.
        StoreUnavailable, BrokenDocument: it cannot be read or written.
        StaleEpoch: others were quicker, time and again.
    """
    async with _places(config, say) as places:
        for _ in range(MAX_TRIES):
            current, store = await _newest(places, say)
            changed = change(current)
            if changed == current:
                return current
            if mistakes := check(changed, config.gateway.guardrails.settings()):
                raise BadRequest("; ".join(mistakes))
            following = replace(changed, epoch=current.epoch + 1, published_at_s=time.time())
            try:
                await (store or places.file).publish(following)
            except StaleEpoch:
                continue
            if store is not None:
                await _copy(places.file, following, say)
            return following
    raise StaleEpoch(f"the tenant directory was changed by others {MAX_TRIES} times in a row; try again")


def make_key(
    tenant_id: str,
    *,
    scopes: tuple[Scope, ...] = (Scope.INFERENCE,),
    models: tuple[str, ...] = ("*",),
    limits: Limits | None = None,
    expires_at_s: float | None = None,
    label: str = "",
) -> tuple[str, ApiKey]:
    """A new key, to be shown once, and what is kept of it."""
    key_id = new_key_id()
    key = new_key(key_id)
    kept = ApiKey(
        key_id=key_id,
        tenant_id=tenant_id,
        sha256=key_sha256(key),
        created_at_s=time.time(),
        scopes=scopes,
        models=models,
        limits=limits or Limits(),
        expires_at_s=expires_at_s,
        label=label,
    )
    return key, kept


def read_tenants_file(path: Path) -> TenantsFile:
    """The file's content; a tenant's fields that it leaves out are the defaults.

    Raises:
        BadRequest: it cannot be read, or a field is wrong; names the field.
    """
    try:
        data = parse_yaml(path.read_text("utf-8"), str(path))
    except (OSError, UnicodeDecodeError) as error:
        raise BadRequest(f"cannot read {path}: {error}") from error
    try:
        return _FILE.decode(json.dumps(data))
    except (ServingError, TypeError, ValueError) as error:
        raise BadRequest(f"{path}: {error}") from error


def applied(directory: TenantDirectory, wanted: TenantsFile, *, prune: bool) -> TenantDirectory:
    """The directory with what the file holds put in; with `prune` without any other tenant, key of one, or issuer."""
    if prune:
        names = {tenant.tenant_id for tenant in wanted.tenants}
        trusted = {(issuer.issuer, issuer.audience) for issuer in wanted.issuers}
        directory = replace(
            directory,
            tenants=tuple(tenant for tenant in directory.tenants if tenant.tenant_id in names),
            keys=tuple(key for key in directory.keys if key.tenant_id in names),
            issuers=tuple(i for i in directory.issuers if (i.issuer, i.audience) in trusted),
        )
    for tenant in wanted.tenants:
        directory = put_tenant(directory, tenant)
    kept = {(issuer.issuer, issuer.audience, issuer.jwks_url): issuer.jwks for issuer in directory.issuers}
    for issuer in wanted.issuers:
        last = issuer.jwks or kept.get((issuer.issuer, issuer.audience, issuer.jwks_url))
        directory = put_issuer(directory, replace(issuer, jwks=last))
    revoked = {key.key_id: key.revoked_at_s for key in directory.keys}
    for key in wanted.keys:  # a file from before a revocation does not undo it
        directory = put_key(directory, replace(key, revoked_at_s=revoked.get(key.key_id) or key.revoked_at_s))
    return directory


@asynccontextmanager
async def _places(config: WorkbenchConfig, say: Say) -> AsyncIterator[_Places]:
    file = FileTenantDirectory(layout(config).tenants_path)
    is_ours = config.stores.redis_url is None
    try:
        url = store_url(config)
    except NotRunning:
        say(f"no stack runs: {file.path} alone is read and written; `workbench up` takes it up")
        yield _Places(None, file, is_ours)
        return
    client = connect(url)
    try:
        yield _Places(StoreTenantDirectory(client), file, is_ours)
    finally:
        await client.aclose()


async def _newest(places: _Places, say: Say) -> tuple[TenantDirectory, StoreTenantDirectory | None]:
    """The directory, and the store if it is there to be written to."""
    if places.store is None:
        return await places.file.read() or EMPTY, None
    in_file = await _in_file(places.file, say)
    try:
        in_store = await places.store.read()
    except StoreUnavailable as error:
        if not places.is_ours:
            raise
        say(f"{error.message}; {places.file.path} alone is read and written, which the workers here read too")
        return in_file or EMPTY, None
    return max(in_store or EMPTY, in_file or EMPTY, key=lambda directory: directory.epoch), places.store


async def _in_file(file: FileTenantDirectory, say: Say) -> TenantDirectory | None:
    try:
        return await file.read()
    except BrokenDocument as error:
        say(f"{error.message}; the store's copy counts")
        return None


async def _copy(file: FileTenantDirectory, directory: TenantDirectory, say: Say) -> None:
    try:
        await file.publish(directory)
    except StaleEpoch:
        return  # the control plane was quicker
    except StoreUnavailable as error:
        say(f"{error.message}; the store has the change, and the control plane writes the file when it can")
