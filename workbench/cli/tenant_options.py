"""What the commands for tenants, keys and issuers share: options, limits in words, remarks."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import Annotated, Any

import typer

from serving.core.state import Tier
from serving.core.tenancy import Consent, Limits
from workbench.cli.common import err
from workbench.cli.exits import Exit

CODES = (Exit.OK, Exit.FAILED, Exit.USAGE, Exit.UNAVAILABLE)

TenantArgument = Annotated[str, typer.Argument(help="The tenant's id.")]
ModelOption = Annotated[list[str] | None, typer.Option("--model", help="A model it may use, * for all; repeatable.")]
AdapterOption = Annotated[list[str] | None, typer.Option("--adapter", help="An adapter, * for all; repeatable.")]
TierOption = Annotated[list[Tier] | None, typer.Option("--tier", help="A service tier; repeatable.")]
RegionOption = Annotated[list[str] | None, typer.Option("--region", help="Where its requests may run; repeatable.")]
RpmOption = Annotated[int | None, typer.Option("--requests-per-minute", help="0 for no bound.", min=0)]
TpmOption = Annotated[int | None, typer.Option("--tokens-per-minute", help="0 for no bound.", min=0)]
TpdOption = Annotated[int | None, typer.Option("--tokens-per-day", help="0 for no bound.", min=0)]
StreamsOption = Annotated[int | None, typer.Option("--max-streams", help="Streams at once; 0 for no bound.", min=0)]
UsdRequestOption = Annotated[float | None, typer.Option("--usd-per-request", help="0 for no bound.", min=0)]
UsdHourOption = Annotated[float | None, typer.Option("--usd-per-hour", help="0 for no bound.", min=0)]
GroupOption = Annotated[
    str | None, typer.Option("--sharing-group", help="Shares cached prefixes with it; '' for none.")
]
ContentOption = Annotated[
    bool | None, typer.Option("--stores-content/--stores-no-content", help="Whether answers may be kept for replays.")
]
ConsentOption = Annotated[
    list[str] | None, typer.Option("--consent", help="What its requests may be used for: shadow; '' for nothing.")
]


def consents(names: tuple[str, ...]) -> tuple[Consent, ...]:
    """Consents by name. Raises typer.BadParameter."""
    try:
        return tuple(Consent(name) for name in names)
    except ValueError as error:
        known = ", ".join(Consent)
        raise typer.BadParameter(f"{error}; there are: {known}", param_hint="--consent") from None


def say(line: str) -> None:
    """A remark for people, beside the output."""
    err.print(line, highlight=False, markup=False)


def new_limits(old: Limits, **given: Any) -> Limits:
    """The limits with those that were given in place; 0 takes a bound away."""
    return replace(old, **{name: bound or None for name, bound in given.items() if bound is not None})


def shown_limits(limits: Limits) -> str:
    """The bounds that there are."""
    return ", ".join(f"{name} {bound:g}" for name, bound in asdict(limits).items() if bound is not None) or "none"
