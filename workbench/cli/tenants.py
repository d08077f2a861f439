"""`workbench tenants`: who may use the endpoint, for what, up to where, and whose tokens are trusted."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.core.state import Tier
from serving.core.tenancy import Limits, Tenant, TenantDirectory
from serving.core.tenant_edits import add_tenant, differences, put_tenant, remove_tenant, tenant_of
from workbench.cli import issuers
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, run, settings, table
from workbench.cli.config import print_yaml
from workbench.cli.issuers import shown_issuer
from workbench.cli.tenant_options import (
    CODES,
    AdapterOption,
    ConsentOption,
    ContentOption,
    GroupOption,
    ModelOption,
    RegionOption,
    RpmOption,
    StreamsOption,
    TenantArgument,
    TierOption,
    TpdOption,
    TpmOption,
    UsdHourOption,
    UsdRequestOption,
    consents,
    new_limits,
    say,
    shown_limits,
)
from workbench.tenants import applied, edit_directory, read_directory, read_tenants_file

app = typer.Typer(no_args_is_help=True, help="Tenants: grants, limits, trusted issuers of tokens.")
issuers.add_to(app)


@app.command("list", epilog=epilog("workbench tenants list", "workbench tenants list --json", codes=CODES))
def list_tenants(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows tenants and trusted issuers."""
    directory = run(read_directory(settings(config), say))
    data = {
        "epoch": directory.epoch,
        "tenants": [_with_keys(directory, tenant) for tenant in directory.tenants],
        "issuers": [shown_issuer(issuer) for issuer in directory.issuers],
    }

    def show() -> None:
        columns = ["tenant", "models", "tiers", "limits", "keys", "state"]
        rows = [_row(directory, tenant) for tenant in directory.tenants]
        out.print(table(None, columns, rows, right=(4,)) if rows else "no tenants: workbench tenants create NAME")
        for issuer in directory.issuers:
            out.print(f"trusts {issuer.issuer} for {issuer.audience}", highlight=False, markup=False)

    emit(data, as_json, show)


@app.command(epilog=epilog("workbench tenants show acme", "workbench tenants show acme --json", codes=CODES))
def show(tenant: TenantArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shows all of a tenant and the names of its keys."""
    directory = run(read_directory(settings(config), say))
    data = _with_keys(directory, tenant_of(directory, tenant))
    emit(data, as_json, lambda: print_yaml(json.loads(json.dumps(data))))


@app.command(
    epilog=epilog(
        "workbench tenants create acme --model smollm2-135m",
        "workbench tenants create lab --model '*' --tier default --tier batch --tokens-per-minute 100000",
        codes=CODES,
    )
)
def create(
    tenant: TenantArgument,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    tier: TierOption = None,
    region: RegionOption = None,
    requests_per_minute: RpmOption = None,
    tokens_per_minute: TpmOption = None,
    tokens_per_day: TpdOption = None,
    max_streams: StreamsOption = None,
    usd_per_request: UsdRequestOption = None,
    usd_per_hour: UsdHourOption = None,
    sharing_group: GroupOption = None,
    stores_content: ContentOption = None,
    consent: ConsentOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a tenant. What is not granted is refused: without --model it may use none."""
    limits = new_limits(
        Limits(),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_streams=max_streams,
        usd_per_request=usd_per_request,
        usd_per_hour=usd_per_hour,
    )
    made = _changed(Tenant(tenant, limits=limits), model, adapter, tier, region, sharing_group, stores_content, consent)
    _edit(config, as_json, tenant, lambda directory: add_tenant(directory, made))
    if not made.models:
        say(f"it may use no model yet: workbench tenants update {tenant} --model NAME")


@app.command(
    epilog=epilog(
        "workbench tenants update acme --requests-per-minute 600",
        "workbench tenants update acme --model smollm2-135m --model gemma3-270m --tokens-per-day 0",
        "workbench tenants update acme --consent shadow",
        codes=CODES,
    )
)
def update(
    tenant: TenantArgument,
    model: ModelOption = None,
    adapter: AdapterOption = None,
    tier: TierOption = None,
    region: RegionOption = None,
    requests_per_minute: RpmOption = None,
    tokens_per_minute: TpmOption = None,
    tokens_per_day: TpdOption = None,
    max_streams: StreamsOption = None,
    usd_per_request: UsdRequestOption = None,
    usd_per_hour: UsdHourOption = None,
    sharing_group: GroupOption = None,
    stores_content: ContentOption = None,
    consent: ConsentOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Changes what is given and leaves the rest; a list replaces the whole list, and '' empties it."""

    def change(directory: TenantDirectory) -> TenantDirectory:
        old = tenant_of(directory, tenant)
        limits = new_limits(
            old.limits,
            requests_per_minute=requests_per_minute,
            tokens_per_minute=tokens_per_minute,
            tokens_per_day=tokens_per_day,
            max_streams=max_streams,
            usd_per_request=usd_per_request,
            usd_per_hour=usd_per_hour,
        )
        new = _changed(
            replace(old, limits=limits), model, adapter, tier, region, sharing_group, stores_content, consent
        )
        return put_tenant(directory, new)

    _edit(config, as_json, tenant, change)


@app.command(epilog=epilog("workbench tenants disable acme", codes=CODES))
def disable(tenant: TenantArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Shuts a tenant out within 5 s, whatever its keys and tokens; nothing of it is lost."""
    _edit(config, as_json, tenant, lambda d: put_tenant(d, replace(tenant_of(d, tenant), disabled=True)))


@app.command(epilog=epilog("workbench tenants enable acme", codes=CODES))
def enable(tenant: TenantArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Lets a disabled tenant in again."""
    _edit(config, as_json, tenant, lambda d: put_tenant(d, replace(tenant_of(d, tenant), disabled=False)))


@app.command(epilog=epilog("workbench tenants remove acme", codes=CODES))
def remove(tenant: TenantArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Removes a tenant and its keys; they are refused within 5 s. To shut it out for a while: disable."""
    run(edit_directory(settings(config), lambda directory: remove_tenant(directory, tenant), say))
    emit({"tenant_id": tenant, "removed": True}, as_json, lambda: out.print(f"{tenant} is removed"))


@app.command(epilog=epilog("workbench tenants export", "workbench tenants export --json", codes=CODES))
def export(config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Prints tenants, issuers and keys (as hashes) as YAML for `workbench tenants apply`."""
    directory = run(read_directory(settings(config), say))
    found = {name: value for name, value in asdict(directory).items() if name in ("tenants", "issuers", "keys")}
    data = json.loads(json.dumps(found))
    emit(data, as_json, lambda: print_yaml(data))


@app.command(
    epilog=epilog(
        "workbench tenants apply tenants.yaml --dry-run", "workbench tenants apply tenants.yaml --prune", codes=CODES
    )
)
def apply(
    file: Annotated[Path, typer.Argument(help="YAML with tenants:, issuers:, keys:.")],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would change.")] = False,
    prune: Annotated[bool, typer.Option("--prune", help="Remove tenants and issuers that the file lacks.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes tenants and issuers what the file says; keys stay as they are, unless the file holds them by hash."""
    wanted = read_tenants_file(file)
    lines: list[str] = []

    def change(directory: TenantDirectory) -> TenantDirectory:
        changed = applied(directory, wanted, prune=prune)
        lines[:] = differences(directory, changed)
        return changed

    if dry_run:
        change(run(read_directory(settings(config), say)))
    else:
        run(edit_directory(settings(config), change, say))
    data = {"changes": lines, "applied": not dry_run}
    emit(data, as_json, lambda: out.print("\n".join(lines) or "nothing changes", highlight=False, markup=False))


def _changed(
    tenant: Tenant,
    model: list[str] | None,
    adapter: list[str] | None,
    tier: list[Tier] | None,
    region: list[str] | None,
    sharing_group: str | None,
    stores_content: bool | None,
    consent: list[str] | None,
) -> Tenant:
    lists = {"models": model, "adapters": adapter, "regions": region}
    changes: dict[str, Any] = {name: _listed(value) for name, value in lists.items() if value}
    if tier:
        changes["tiers"] = tuple(tier)
    if consent:
        changes["consents"] = consents(_listed(consent))
    if sharing_group is not None:
        changes["sharing_group"] = sharing_group or None
    if stores_content is not None:
        changes["stores_content"] = stores_content
    return replace(tenant, **changes)


def _listed(values: list[str]) -> tuple[str, ...]:
    """What was given; one empty value empties the list."""
    return tuple(value for value in values if value)


def _edit(
    config: Path | None, as_json: bool, tenant: str, change: Callable[[TenantDirectory], TenantDirectory]
) -> None:
    directory = run(edit_directory(settings(config), change, say))
    data = _with_keys(directory, tenant_of(directory, tenant))

    def show() -> None:
        found = tenant_of(directory, tenant)
        models = ", ".join(found.models) or "no model"
        state = "disabled" if found.disabled else f"may use {models}; limits: {shown_limits(found.limits)}"
        out.print(f"{tenant} {state}", highlight=False, markup=False)

    emit(data, as_json, show)


def _with_keys(directory: TenantDirectory, tenant: Tenant) -> dict[str, Any]:
    keys = [key.key_id for key in directory.keys if key.tenant_id == tenant.tenant_id and key.revoked_at_s is None]
    return asdict(tenant) | {"keys": keys}


def _row(directory: TenantDirectory, tenant: Tenant) -> list[Any]:
    num_keys = len(_with_keys(directory, tenant)["keys"])
    state = "disabled" if tenant.disabled else "active"
    models, tiers = ", ".join(tenant.models), ", ".join(tenant.tiers)
    return [tenant.tenant_id, models, tiers, shown_limits(tenant.limits), num_keys, state]
