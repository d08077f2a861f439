"""`workbench purge`: takes away what is older than its kind of data may be kept."""

from __future__ import annotations

import math
import re
import time
from typing import Annotated, Any

import typer

from serving.store.connection import StoreUnavailable, connect
from serving.store.replay_purge import purge_answers, shred_answers
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, err, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.config import WorkbenchConfig
from workbench.purge import DAY_S, OF_A_TENANT, Kind, Removal, Scope, num_kept_usage, plan
from workbench.wiring import NotRunning, layout, running_stack, store_url

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE)
STORE_TIMEOUT_S = 10.0
TENANT = re.compile(r"[a-z0-9._-]{1,64}")


def add_to(app: typer.Typer) -> None:
    """Makes `purge` a command of the tree."""
    app.command(
        epilog=epilog(
            "workbench purge --dry-run",
            "workbench purge --kind logs --kind decisions --older-than 7",
            "workbench purge --tenant acme --older-than 0",
            codes=CODES,
        )
    )(purge)


def purge(
    kind: Annotated[list[Kind] | None, typer.Option(help="Only this kind of data; repeatable.")] = None,
    older_than: Annotated[
        float | None, typer.Option(metavar="DAYS", min=0, help="Days, instead of each kind's own; 0 is all.")
    ] = None,
    tenant: Annotated[
        str | None, typer.Option(help="Only this tenant's stored answers (and usage); 0 days shreds them.")
    ] = None,
    drop_usage: Annotated[
        bool, typer.Option("--drop-usage", help="Also usage events that no ledger has committed.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would go.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes away stored answers, decision records, logs and request records that are older than they may be kept."""
    if older_than is not None and math.isnan(older_than):
        raise CommandFailed("--older-than is no number", Exit.USAGE)
    kinds = tuple(kind or (OF_A_TENANT if tenant is not None else Kind))
    if tenant is not None and not TENANT.fullmatch(tenant):
        raise CommandFailed(f"--tenant: {tenant!r} is no tenant's id (1 to 64 of a-z 0-9 . _ -)", Exit.USAGE)
    strangers = [one for one in kinds if tenant is not None and one not in OF_A_TENANT]
    if strangers:
        raise CommandFailed(f"--tenant: {strangers[0]} name no tenant; they go for all tenants or none", Exit.USAGE)
    loaded = settings(config)
    places, now_s = layout(loaded), time.time()
    kept_days = loaded.retention_days.model_dump()
    days = {one: kept_days[one] if older_than is None else older_than for one in Kind}
    scope = Scope(
        kinds,
        {one: now_s - days[one] * DAY_S for one in Kind},
        tenant=tenant,
        is_running=running_stack(loaded) is not None,
        drops_usage=drop_usage,
    )
    removals, remarks = plan(places, scope), []
    num_kept = num_kept_usage(places, scope)
    if num_kept:
        remarks.append(f"{num_kept} usage segments are old and stay: no ledger has committed them (--drop-usage)")
    failures = [] if dry_run else _act(removals)
    num_answers = None
    if Kind.REPLAYS in kinds:
        num_answers = _answers(loaded, tenant, days[Kind.REPLAYS], dry_run, remarks, must=kind is not None)
    data = _data(removals, days, kinds) | {"stored_answers": num_answers, "dry_run": dry_run, "remarks": remarks}
    emit(data | {"failures": failures}, as_json, lambda: _show(removals, num_answers, remarks, dry_run))
    if failures:
        raise CommandFailed("\n".join(failures))


def _act(removals: list[Removal]) -> list[str]:
    failures = []
    for removal in removals:
        try:
            removal.act()
        except OSError as error:
            failures.append(f"{removal.path} could not be purged: {error.strerror or error}")
    return failures


def _answers(
    loaded: WorkbenchConfig, tenant: str | None, days: float, dry_run: bool, remarks: list[str], *, must: bool
) -> int | None:
    """Purges the stored answers; None when that was not tried."""
    if dry_run:
        remarks.append("stored answers are not counted in a dry run")
        return None
    try:
        return run(_purge_answers(store_url(loaded), tenant, days))
    except (NotRunning, StoreUnavailable) as error:
        if must or tenant is not None:
            raise
        remarks.append(f"stored answers were not purged, they end by themselves within a day: {error}")
        return None


async def _purge_answers(url: str, tenant: str | None, days: float) -> int:
    client = connect(url, timeout_s=STORE_TIMEOUT_S)
    try:
        if tenant is not None and days == 0:
            return await shred_answers(client, tenant)
        return await purge_answers(client, tenant, older_than_s=days * DAY_S)
    finally:
        await client.aclose()


def _data(removals: list[Removal], days: dict[Kind, float], kinds: tuple[Kind, ...]) -> dict[str, Any]:
    return {
        "retention_days": {one: days[one] for one in kinds},
        "removed": [
            {"kind": one.kind, "path": str(one.path), "num_bytes": one.num_bytes, "whole": one.is_whole}
            for one in removals
        ],
        "num_bytes": sum(removal.num_bytes for removal in removals),
    }


def _show(removals: list[Removal], num_answers: int | None, remarks: list[str], dry_run: bool) -> None:
    would = "would remove" if dry_run else "removed"
    for removal in removals:
        what = "" if removal.is_whole else "lines of "
        out.print(f"{would} {what}{removal.path} ({removal.num_bytes} bytes)", highlight=False, markup=False)
    if num_answers is not None:
        out.print(f"{would} {num_answers} stored answers", highlight=False)
    if not removals and not num_answers:
        out.print("nothing is old enough to go" if dry_run else "nothing was old enough to go")
    for remark in remarks:
        err.print(remark, highlight=False, markup=False)
