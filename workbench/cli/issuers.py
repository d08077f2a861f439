"""`workbench tenants trust` and `untrust`: whose signed tokens are taken in place of API keys."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from serving.core.tenancy import Issuer
from serving.core.tenant_edits import put_issuer, remove_issuer
from serving.store.connection import BrokenDocument, StoreUnavailable
from serving.store.jwks import fetch_jwks, in_one_order, parse_jwks
from workbench.cli.common import ConfigOption, JsonOption, emit, epilog, out, run, settings
from workbench.cli.exits import CommandFailed, Exit
from workbench.cli.tenant_options import CODES, say
from workbench.tenants import edit_directory


def add_to(app: typer.Typer) -> None:
    """Adds the commands to `workbench tenants`."""
    app.command(
        epilog=epilog(
            "workbench tenants trust https://login.example.com --audience workbench --jwks keys.json",
            "workbench tenants trust https://login.example.com --audience workbench "
            "--jwks-url https://login.example.com/jwks.json --tenant-claim org",
            codes=CODES,
        )
    )(trust)
    app.command(epilog=epilog("workbench tenants untrust https://login.example.com", codes=CODES))(untrust)


def trust(
    issuer: Annotated[str, typer.Argument(help="The tokens' claim `iss`, letter by letter.")],
    audience: Annotated[str, typer.Option(help="The tokens' claim `aud`.")],
    jwks_url: Annotated[str | None, typer.Option(help="Where the issuer publishes its keys.")] = None,
    jwks: Annotated[Path | None, typer.Option(help="A file with the issuer's keys, in place of an address.")] = None,
    algorithm: Annotated[list[str] | None, typer.Option(help="RS256 or ES256; both when left out.")] = None,
    tenant_claim: Annotated[str, typer.Option(help="The claim that names the tenant.")] = "tenant",
    scope_claim: Annotated[str, typer.Option(help="The claim with the scopes inference, admin.")] = "scope",
    max_lifetime_s: Annotated[float, typer.Option(help="Tokens made for longer are refused.", min=1)] = 3600.0,
    leeway_s: Annotated[float, typer.Option(help="How far clocks may be apart.", min=0, max=300)] = 30.0,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes signed tokens (JWT) of an issuer; each names a tenant of ours and its scopes."""
    made = Issuer(
        issuer=issuer,
        audience=audience,
        jwks_url=jwks_url,
        jwks=_key_set(jwks, jwks_url),
        algorithms=tuple(algorithm or ("RS256", "ES256")),
        tenant_claim=tenant_claim,
        scope_claim=scope_claim,
        max_lifetime_s=max_lifetime_s,
        leeway_s=leeway_s,
    )
    run(edit_directory(settings(config), lambda directory: put_issuer(directory, made), say))
    emit(
        shown_issuer(made), as_json, lambda: out.print(f"trusts {issuer} for {audience}", highlight=False, markup=False)
    )


def untrust(
    issuer: Annotated[str, typer.Argument(help="As it was trusted.")],
    audience: Annotated[str | None, typer.Option(help="Only for this audience; for all when left out.")] = None,
    config: ConfigOption = None,
    as_json: JsonOption = False,
) -> None:
    """Takes an issuer's tokens no longer; those in use are refused within 5 s."""
    run(edit_directory(settings(config), lambda directory: remove_issuer(directory, issuer, audience), say))
    emit(
        {"issuer": issuer, "removed": True}, as_json, lambda: out.print(f"{issuer} is trusted no longer", markup=False)
    )


def shown_issuer(issuer: Issuer) -> dict[str, Any]:
    """All of an issuer but its key set, of which the size is told."""
    plain = asdict(issuer)
    text = plain.pop("jwks")
    return plain | {"num_keys": None if text is None else len(parse_jwks(text))}


def _key_set(file: Path | None, url: str | None) -> str | None:
    """The key set at hand; without one the control plane fetches it."""
    if file is not None:
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CommandFailed(f"cannot read {file}: {error}", Exit.USAGE) from None
        parse_jwks(text)
        return in_one_order(text)
    if url is None:
        raise CommandFailed("say where the issuer's keys are: --jwks-url URL or --jwks FILE", Exit.USAGE)
    try:
        return run(fetch_jwks(url))
    except (StoreUnavailable, BrokenDocument) as error:
        say(f"{error.message}; the control plane tries again, until then its tokens are refused")
        return None
