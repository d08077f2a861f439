"""`workbench keys`: API keys, each shown once."""

from __future__ import annotations

import time
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from rich.markup import escape

from serving.core.tenancy import ApiKey, Limits, Scope
from serving.core.tenant_edits import key_of, put_key, revoke_key, rotate_key, tenant_of
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, run, settings, table
from workbench.cli.tenant_options import (
    CODES,
    RpmOption,
    StreamsOption,
    TpdOption,
    TpmOption,
    UsdHourOption,
    UsdRequestOption,
    new_limits,
    say,
    shown_limits,
)
from workbench.tenants import edit_directory, make_key, read_directory

app = typer.Typer(no_args_is_help=True, help="API keys of tenants: shown once, stored as a hash.")
DAY_S = 86400.0
HOUR_S = 3600.0
KeyArgument = Annotated[str, typer.Argument(help="The key's id, or its label where one key has it.")]


@app.command(
    epilog=epilog(
        "workbench keys create acme --label ci",
        "workbench keys create acme --label web --model smollm2-135m --expires-days 90 --requests-per-minute 60",
        codes=CODES,
    )
)
def create(
    tenant: Annotated[str, typer.Argument(help="The tenant that it speaks for.")],
    label: Annotated[str, typer.Option(help="A word to find it by.")] = "",
    scope: Annotated[
        list[Scope] | None, typer.Option(help="What it is for; repeatable. Inference if left out.")
    ] = None,
    model: Annotated[list[str] | None, typer.Option(help="Only this of the tenant's models; repeatable.")] = None,
    expires_days: Annotated[float | None, typer.Option(help="Days until it expires.", min=0)] = None,
    requests_per_minute: RpmOption = None,
    tokens_per_minute: TpmOption = None,
    tokens_per_day: TpdOption = None,
    max_streams: StreamsOption = None,
    usd_per_request: UsdRequestOption = None,
    usd_per_hour: UsdHourOption = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a key and prints it, this once: only its hash is kept."""
    limits = new_limits(
        Limits(),
        requests_per_minute=requests_per_minute,
        tokens_per_minute=tokens_per_minute,
        tokens_per_day=tokens_per_day,
        max_streams=max_streams,
        usd_per_request=usd_per_request,
        usd_per_hour=usd_per_hour,
    )
    key, kept = make_key(
        tenant,
        scopes=tuple(scope or (Scope.INFERENCE,)),
        models=tuple(model or ("*",)),
        limits=limits,
        expires_at_s=None if expires_days is None else time.time() + expires_days * DAY_S,
        label=label,
    )
    run(edit_directory(settings(config), lambda directory: put_key(directory, kept), say))
    _show_once(key, kept, as_json)


@app.command("list", epilog=epilog("workbench keys list", "workbench keys list acme --all --json", codes=CODES))
def list_keys(
    tenant: Annotated[str | None, typer.Argument(help="Only this tenant's.")] = None,
    every: Annotated[bool, typer.Option("--all", help="Also those that are revoked or expired.")] = False,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Shows keys by id and label, never the keys."""
    directory = run(read_directory(settings(config), say))
    if tenant is not None:
        tenant_of(directory, tenant)
    now_s = time.time()
    keys = [key for key in directory.keys if tenant in (None, key.tenant_id)]
    data = [_plain(key, now_s) for key in keys]
    data = [row for row in data if every or row["state"] == "active"]

    def show() -> None:
        columns = ["key", "label", "tenant", "scopes", "models", "limits", "created", "expires", "state"]
        limits = {key.key_id: shown_limits(key.limits) for key in keys}
        rows = [_row(row, limits[row["key_id"]]) for row in data]
        out.print(table(None, columns, rows) if rows else "no keys: workbench keys create TENANT")

    emit(data, as_json, show)


@app.command(epilog=epilog("workbench keys revoke ci", "workbench keys revoke 4f1c09a2b7d3 --json", codes=CODES))
def revoke(key: KeyArgument, config: ConfigOption = None, as_json: JsonOption = False) -> None:
    """Ends a key: every worker refuses it within 5 s."""
    now_s = time.time()
    found: list[str] = []

    def change(directory: Any) -> Any:
        found[:] = [key_of(directory, key).key_id]
        return revoke_key(directory, key, now_s)

    directory = run(edit_directory(settings(config), change, say))
    data = _plain(key_of(directory, found[0]), time.time())
    emit(data, as_json, lambda: out.print(f"{found[0]} is revoked: workers refuse it within 5 s", highlight=False))


@app.command(epilog=epilog("workbench keys rotate ci", "workbench keys rotate ci --overlap-hours 1", codes=CODES))
def rotate(
    key: KeyArgument,
    overlap_hours: Annotated[float, typer.Option(help="Hours for which the old key still counts.", min=0)] = 24.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Makes a key of the same grants and label, prints it this once, and lets the old one expire."""
    new, successor = make_key("")
    directory = run(
        edit_directory(settings(config), lambda d: rotate_key(d, key, successor, overlap_hours * HOUR_S), say)
    )
    _show_once(new, key_of(directory, successor.key_id), as_json)


def _show_once(key: str, kept: ApiKey, as_json: bool) -> None:
    data = {"key": key} | _plain(kept, kept.created_at_s)
    emit(data, as_json, lambda: out.print(key, highlight=False, soft_wrap=True))
    say(f"key {kept.key_id} of {kept.tenant_id}; it is not shown again")


def _plain(key: ApiKey, now_s: float) -> dict[str, Any]:
    plain = asdict(key)
    del plain["sha256"]
    state = "active"
    if key.revoked_at_s is not None:
        state = "revoked"
    elif key.expires_at_s is not None and key.expires_at_s <= now_s:
        state = "expired"
    return plain | {"state": state}


def _row(row: dict[str, Any], limits: str) -> list[Any]:
    listed = [", ".join(row[name]) for name in ("scopes", "models")]
    times = [_day(row[name]) for name in ("created_at_s", "expires_at_s")]
    return [row["key_id"], escape(row["label"]), row["tenant_id"], *listed, limits, *times, row["state"]]


def _day(at_s: float | None) -> str:
    return "never" if at_s is None else datetime.fromtimestamp(at_s, UTC).strftime("%Y-%m-%d %H:%M")
